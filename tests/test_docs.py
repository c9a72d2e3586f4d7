"""The docs say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from mprun.cli.help import configuration_page
from mprun.config.settings import fields

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_of_fields_is_that_of_the_schema() -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    assert page == configuration_page(), "run `make docs`"


def test_the_workflow_example_is_yaml_and_covers_the_oldest_torch() -> None:
    text = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert block is not None
    workflow = yaml.safe_load(block[1])
    installs = " ".join(workflow["jobs"]["smoke"]["strategy"]["matrix"]["torch"])
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for package in ("torch", "torchvision"):
        oldest = re.search(rf'"{package}>=([\d.]+)"', project)
        assert oldest is not None
        assert f"{package}=={oldest[1]}.*" in installs


def test_readme_opens_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 0 < text.index("make run") < text.index("make test") < 1200


def test_links_between_documents_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "recipes/README.md"]
    for page in (p for p in pages if p.exists()):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_on_comparing_lists_every_setting() -> None:
    page = (ROOT / "docs/compare.md").read_text(encoding="utf-8")
    for field in fields(["compare"]).values():
        assert f"| `{field.key}` | `{field.default_text}` | {field.doc} |" in page
