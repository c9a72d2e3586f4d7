"""Which runs are found, and what is said of everything else that lies on a disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mprun.study.compare.load import expand, find_runs, latest, readable
from tests.study.compare.folders import run_of, write_run


def found(*paths: str) -> list[str]:
    return [str(run.path) for run in find_runs(map(Path, paths)).runs]


def skipped(*paths: str) -> dict[str, str]:
    return {str(s.path): s.reason for s in find_runs(map(Path, paths)).skipped}


# ---- where it looks ------------------------------------------------------------------------------


def test_a_run_a_sweep_and_a_file_s_name() -> None:
    for name in ("sweep/0", "sweep/1", "other"):
        write_run(Path(name))
    assert found("sweep/1") == ["sweep/1"]
    assert found("sweep") == ["sweep/0", "sweep/1"]
    assert found("sweep/0/summary.json") == ["sweep/0"]
    assert found("other", "sweep") == ["other", "sweep/0", "sweep/1"]
    assert found(".") == ["other", "sweep/0", "sweep/1"]
    assert skipped(".") == {}


def test_a_run_counts_once_however_often_it_is_named() -> None:
    write_run(Path("sweep/0"))
    Path("link").symlink_to("sweep")
    assert found("sweep", "sweep/0", "sweep/../sweep", "link") == ["sweep/0"]


def test_links_are_followed_and_may_go_round() -> None:
    write_run(Path("elsewhere/run"))
    Path("chosen").mkdir()
    Path("chosen/run").symlink_to(Path("elsewhere/run").resolve())
    Path("chosen/back").symlink_to(Path("chosen").resolve())
    assert found("chosen") == ["chosen/run"]


def test_checkpoints_and_hidden_folders_are_not_searched() -> None:
    write_run(Path("run"))
    write_run(Path("run/checkpoints/old"))
    write_run(Path("run/.trash/old"))
    (Path("run") / "tensorboard").mkdir()
    assert found("run") == ["run"]
    assert skipped("run") == {}


def test_globs_are_expanded_and_existing_names_are_not() -> None:
    for name in ("a/0", "a/1", "b/0", "odd[0]"):
        write_run(Path(name))
    assert expand("*/0") == [Path("a/0"), Path("b/0")]
    assert expand("**/summary.json")[:2] == [Path("a/0/summary.json"), Path("a/1/summary.json")]
    assert expand("odd[0]") == [Path("odd[0]")]
    assert expand(str(Path.cwd() / "b*")) == [Path.cwd() / "b"]
    assert expand("compare.mix=[code]") == []
    assert expand("x" * 5000) == []


# ---- what it passes over -------------------------------------------------------------------------


def test_folders_without_runs_are_named_once() -> None:
    write_run(Path("outputs/run"))
    Path("outputs/traces/a/b").mkdir(parents=True)
    Path("outputs/day/empty").mkdir(parents=True)
    write_run(Path("outputs/day/run"))
    Path("outputs/README.md").write_text("", encoding="utf-8")
    assert found("outputs") == ["outputs/day/run", "outputs/run"]
    assert skipped("outputs") == {
        "outputs/traces": "contains no run (no summary.json)",
        "outputs/day/empty": "contains no run (no summary.json)",
    }
    assert skipped("outputs/traces/a", "outputs/README.md") == {
        "outputs/traces/a": "contains no run (no summary.json)",
        "outputs/README.md": "is not a folder",
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "running"}, "still running, or killed"),
        (
            {"status": "interrupted", "error": "SIGINT at step 3"},
            "interrupted (SIGINT at step 3); mprun run.resume=run resumes it",
        ),
        (
            {"schema_version": 99},
            "summary.json has schema_version 99, this mprun reads up to 1",
        ),
        ({"metric__name": "bleu"}, "summary.json is damaged: metric.name is 'bleu'"),
        ({"seed": None}, "summary.json is damaged: Expected `int`, got `null` - at `$.seed`"),
    ],
    ids=str,
)
def test_runs_that_cannot_count_are_skipped_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    write_run(Path("run"), **changes)
    assert found("run") == []
    assert skipped("run") == {"run": reason}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"schema_version": 1, "status": "comp', "summary.json is not valid JSON"),
        (b'{"name": "another program\'s"}', "is damaged: Object missing required field"),
        (b'{"schema_version": ' + b"[" * 100_000, "is damaged: "),
    ],
    ids=["cut", "foreign", "deep"],
)
def test_damaged_and_foreign_summaries_are_skipped(content: bytes, reason: str) -> None:
    Path("run").mkdir()
    Path("run/summary.json").write_bytes(content)
    assert found("run") == []
    (said,) = skipped("run").values()
    assert reason in said
    assert "\n" not in said


def test_a_run_cut_off_before_its_first_summary_and_a_folder_in_its_place() -> None:
    write_run(Path("runs/a"))
    (write_run(Path("runs/b")) / "summary.json").unlink()
    Path("runs/c/summary.json").mkdir(parents=True)
    assert found("runs") == ["runs/a"]
    cut_off, folder = skipped("runs").values()
    assert cut_off == "a run that ended before it had a summary.json"
    assert "cannot be read" in folder


def test_what_cannot_be_read_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write_run(Path("runs", name))
    scan = os.scandir

    def locked(path: Path) -> Any:
        if path.name == "b":  # root reads everything, so the lock is a made one
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", locked)
    assert found("runs") == ["runs/a"]
    assert skipped("runs") == {"runs/b": "cannot be read (Permission denied)"}


def test_failed_runs_are_found() -> None:
    write_run(Path("run"), status="failed", error="the loss became nan")
    assert found("run") == ["run"]


# ---- repeated runs -------------------------------------------------------------------------------


def test_of_one_variant_and_seed_the_run_that_began_last_counts() -> None:
    hours = (11, 13, 12)
    runs = [run_of(path=Path(str(h)), started_at=f"2024-02-29T{h}:00:00+00:00") for h in hours]
    others = [run_of(seed=1), run_of("bf16_mixed"), run_of(execution="emulated")]
    kept, repeated = latest([*runs, *others])
    assert kept == [runs[1], *others]
    assert [str(s.path) for s in repeated] == ["11", "12"]
    assert {s.reason for s in repeated} == {"13 has the same variant and seed, and began later"}


def test_text_of_others_is_shown_in_one_harmless_line() -> None:
    assert readable("one\ntwo") == "one"
    assert readable("\x1b[2J\u202ebad") == "\\x1b[2J\\u202ebad"
    assert readable("") == ""
    assert readable("x" * 50, 10) == "xxxxxxx..."
    json.dumps(readable("\ud800"))
