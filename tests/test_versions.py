"""The environments that mprun is tried with: noxfile.py, nightly.yml, docs/versions.py."""

from __future__ import annotations

import importlib.util
import json
import sys
from datetime import date
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from docs import versions
from mprun import NEWEST_TORCH, OLDEST_PYTHON, OLDEST_TORCH, release
from mprun.records.mode_names import SHIPPED_MODES

ROOT = Path(__file__).resolve().parent.parent
REPORT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" tests="4" time="90">
<testcase classname="tests.test_a" name="test_good" time="1"/>
<testcase classname="tests.test_a" name="test_bad[1]" time="1"><failure message="no"/></testcase>
<testcase classname="tests.test_a" name="test_broken" time="1"><error message="no"/></testcase>
<testcase classname="tests.test_a" name="test_left" time="1"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


class Session:
    """What noxfile.py asks of nox's session; what `make` writes is made up."""

    def __init__(self, folder: Path) -> None:
        self.virtualenv = SimpleNamespace(location=str(folder))
        self.installed: list[str] = []
        self.ran: list[tuple[str, ...]] = []
        self.said: list[str] = []
        self.warn = self.said.append

    def install(self, *words: str) -> None:
        self.installed += words

    def run(self, *words: str, **options: Any) -> None:
        self.ran.append(words)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The sessions of noxfile.py by name: their functions, with `python`."""
    found: dict[str, Any] = {}

    def session(name: str, python: str, venv_params: list[str]) -> Any:
        assert venv_params == ["--seed"]  # with pip, which uv leaves out and tests of wheels call
        return lambda f: found.setdefault(name, SimpleNamespace(run=f, python=python))

    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
    nox = ModuleType("nox")
    vars(nox).update(session=session, Session=Session, options=SimpleNamespace())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    vars(nox)["project"] = SimpleNamespace(load_toml=lambda name: project)
    monkeypatch.setitem(sys.modules, "nox", nox)
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return found


def test_a_session_tries_what_is_installed_and_records_it(
    sessions: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARD", "3/8")
    session = Session(tmp_path)
    sessions["tests-newest"].run(session)
    assert {"-e", ".[docs]", "torch", "--resolution=highest"} <= {*session.installed}
    assert not any(text.startswith("mlflow") for text in session.installed)
    assert "mlflow" in session.said[0]
    assert {p.name for p in tmp_path.glob(".*")} == {".installed", ".installed-dev"}
    test, exhaustive, record = session.ran
    assert test[:3] == ("make", "test", f"VENV={tmp_path}")
    assert exhaustive[:4] == ("make", "test-exhaustive", "SHARD=3/8", f"VENV={tmp_path}")
    reports = [words[-1].removeprefix("JUNIT=") for words in (test, exhaustive)]
    assert record == ("python", "-m", "docs.versions", "newest", *reports)


def test_the_sessions_cover_what_is_supported(sessions: dict[str, Any], tmp_path: Path) -> None:
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))
    job = nightly["jobs"]["versions"]
    assert [f"tests-{name}" for name in job["strategy"]["matrix"]["name"]] == [*sessions]
    assert {f"tests-{name}" for name in versions.records()} == {*sessions}
    for name, (start, python) in {
        "2.11": ("torch==2.11.*", "3.10"),
        "lowest": ("torch", "3.10"),
    }.items():
        session = Session(tmp_path)
        sessions[f"tests-{name}"].run(session)
        assert start in session.installed
        assert sessions[f"tests-{name}"].python == python
    assert "--resolution=lowest-direct" in session.installed


def test_a_record_has_this_environment_and_keeps_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions, "peaks", lambda: {"fp32": 2**20})
    (tmp_path / "a.xml").write_text(REPORT, encoding="utf-8")
    monkeypatch.setattr(versions, "date", SimpleNamespace(today=lambda: date(2026, 11, 28)))
    first = versions.record("own", [tmp_path / "a.xml"])
    assert first["made"] == "2026-11-28"
    assert first["tests"]["passed"] == 1
    assert "addmm" in first["autocast"]["CPU"].split()
    assert {*first["modes"]} == {*SHIPPED_MODES}
    assert (first["modes"]["bf16_sr"], first["modes"]["half_sr_full"]) == ("native", "emulated")
    assert versions.record("own", []) == first
    assert json.loads((tmp_path / "own.json").read_text(encoding="utf-8")) == first


def test_the_records_reach_from_the_oldest_to_the_newest_that_mprun_names() -> None:
    tried = versions.records().values()
    assert min(release(one["torch"]) for one in tried) == OLDEST_TORCH
    assert max(release(one["torch"]) for one in tried) == NEWEST_TORCH
    assert min(release(one["python"]) for one in tried) == OLDEST_PYTHON
