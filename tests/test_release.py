"""What stands in several places for a release: the version, actions and their commits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = [ROOT / "action.yml", *sorted((ROOT / ".github/workflows").glob("*.yml"))]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def version() -> str:
    found = re.search(r'^version = "([\d.]+)"', PROJECT, re.MULTILINE)
    assert found is not None
    return found[1]


def jobs(name: str) -> dict[str, Any]:
    text = (ROOT / ".github/workflows" / name).read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)["jobs"]
    return found


def test_a_citation_names_the_version_and_the_licence() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == version()
    assert f'license = "{cited["license"]}"' in PROJECT


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(workflow: Path) -> None:
    used = re.findall(r"uses: (.*)", workflow.read_text(encoding="utf-8"))
    assert used
    for line in set(used) - {"./"}:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", line), line


@pytest.mark.parametrize(
    ("tag", "heading", "complaint"),
    [
        ("v{}", "## {} - 2026-11-28", None),
        ("v{}", "## [{}] - 2026-11-28", None),
        ("{}", "## {}", "tag v{}, or change it"),
        ("v{}.1", "## {}", "the tag is v{}.1, pyproject.toml has version {}: tag v{}"),
        ("v{}", "## Unreleased", "CHANGELOG.md has no heading '## {}'"),
    ],
)
def test_a_tag_of_another_version_is_refused(
    tag: str, heading: str, complaint: str | None, in_empty_folder: Path
) -> None:
    shutil.copy(ROOT / "pyproject.toml", in_empty_folder)
    filled = [text.replace("{}", version()) for text in (tag, heading, complaint or "")]
    (in_empty_folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{filled[1]}\n")
    (step,) = [s for s in jobs("release.yml")["sdist"]["steps"] if s.get("if")]
    ended = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        env={**os.environ, "GITHUB_REF_NAME": filled[0]},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == (0 if complaint is None else 1)
    assert filled[2] in ended.stderr


def test_only_the_job_that_publishes_may_sign_and_only_for_a_tag() -> None:
    found = jobs("release.yml")
    signing = [name for name, job in found.items() if "id-token" in job["permissions"]]
    assert signing == ["publish"]
    assert "github.ref_type == 'tag'" in found["publish"]["if"]
    assert set(found["publish"]["needs"]) == set(found) - {"publish"}
