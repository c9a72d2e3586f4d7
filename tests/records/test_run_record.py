"""Records: written whole, readable at any time, and what makes two runs comparable."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mprun.config import compose
from mprun.errors import UsageError
from mprun.records import files
from mprun.records import run_record as record
from mprun.records.run_config import variant_hash
from mprun.records.run_folder import RunFolder
from mprun.records.run_record import Summary, TrainScore
from tests.schema import conforms
from tests.summaries import example


def test_no_torch_is_imported() -> None:
    modules = "mprun.records.run_record, mprun.study.report.tables, mprun.records.console"
    code = f"import {modules}, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# Values


def test_numbers_json_cannot_write_become_strings() -> None:
    value = {
        "a": [math.nan, 1.5, {"b": (math.inf, 2)}],
        "c": -math.inf,
        "d": {"e": None, "f": True, "g": "x", "h": 0},
    }
    found = files.jsonable(value)
    assert found == {
        "a": ["nan", 1.5, {"b": ["inf", 2]}],
        "c": "-inf",
        "d": {"e": None, "f": True, "g": "x", "h": 0},
    }
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1, -0.0, 5e-324])
def test_a_number_survives_the_record(value: float) -> None:
    read = float(json.loads(json.dumps(files.jsonable(value))))
    assert read == value or (math.isnan(read) and math.isnan(value))


# Files replaced whole


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    files.write_atomic(path, b"old")
    before = set(tmp_path.iterdir())

    def full(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert set(tmp_path.iterdir()) == before


def test_the_data_are_on_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "file", []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(path.exists()))
    files.write_atomic(path, b"new")
    assert seen == [False]
    assert path.exists()


# A run's folder


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """A run's folder, closed at the end."""
    made = RunFolder(tmp_path / "outputs" / "run")
    yield made
    made.close()


def test_a_second_run_in_a_folder_is_refused_and_the_first_is_kept(folder: RunFolder) -> None:
    folder.lines([{"step": 1}])
    with pytest.raises(UsageError, match=r"run\.dir=.*another mprun is running there"):
        RunFolder(folder.path)
    folder.close()
    with pytest.raises(UsageError, match=r"run\.dir=.* already contains a run"):
        RunFolder(folder.path)
    assert record.read_lines(folder.path) == [{"step": 1}]


def test_a_resumed_run_removes_what_a_killed_one_was_writing(folder: RunFolder) -> None:
    folder.close()
    left = [folder.path / ".summary.json.7.tmp", folder.path / "checkpoints" / ".last.pt.7.tmp"]
    for path in left:
        path.write_bytes(b"half")
    (folder.path / "mine.tmp").touch()
    RunFolder(folder.path, keep=lambda line: True).close()
    assert not any(path.exists() for path in left)
    assert (folder.path / "mine.tmp").exists()


def test_lines_end_before_the_first_that_is_not_kept(folder: RunFolder) -> None:
    folder.lines([{"kind": "step", "step": n} for n in (1, 2, 3, 1)])
    folder.close()
    resumed = RunFolder(folder.path, keep=lambda line: bool(line["step"] < 3))
    resumed.lines([{"step": 9}])
    resumed.close()
    assert [line["step"] for line in record.read_lines(folder.path)] == [1, 2, 9]


def test_of_runs_that_begin_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    def make(_: int) -> RunFolder | None:
        try:
            return RunFolder(tmp_path / "run")
        except UsageError:
            return None

    with ThreadPoolExecutor(8) as pool:
        made = [folder for folder in pool.map(make, range(8)) if folder is not None]
    assert len(made) == 1
    made[0].close()


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"run\.dir=.*\(or is a file\); choose another folder"):
        RunFolder(tmp_path / "file")
    with pytest.raises(UsageError, match=r"cannot be written \(Not a directory\); choose another"):
        RunFolder(tmp_path / "file" / "run")


def test_a_file_cut_anywhere_gives_its_whole_lines(folder: RunFolder) -> None:
    lines = [{"step": 1, "loss": 0.5}, {"text": "é\n"}, {"step": 3, "loss": -math.inf}]
    folder.lines(lines)
    data = (folder.path / "metrics.jsonl").read_bytes()
    for cut in range(len(data) + 1):
        (folder.path / "metrics.jsonl").write_bytes(data[:cut])
        whole = data[:cut].count(b"\n")
        assert record.read_lines(folder.path) == files.jsonable(lines)[:whole]


# The summary


def test_a_summary_is_read_as_written(folder: RunFolder) -> None:
    summary = example()
    summary.train.loss = math.nan
    folder.summary(summary)
    read = record.read_summary(folder.path)
    assert conforms(read, Summary)
    expected = replace(example(), train=TrainScore(loss="nan"), written_at=summary.written_at)
    assert read == expected


def test_without_a_summary_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"summary\.json cannot be read: No such file .*; is "):
        record.read_summary(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b'{"schema_version": 1'])
def test_a_summary_that_is_no_json(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "summary.json").write_bytes(data)
    with pytest.raises(UsageError, match=r"summary\.json is (not valid JSON|damaged)"):
        record.read_summary(tmp_path)


def test_a_summary_of_a_later_version(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"schema_version": 2}')
    with pytest.raises(UsageError, match=r"\.json has schema_version 2, this mprun reads up to 1"):
        record.read_summary(tmp_path)


# Which runs are of one variant


def resolved(*overrides: str) -> dict[str, Any]:
    return compose(overrides).resolved


def test_what_does_not_make_a_variant() -> None:
    for override in (
        *("seed=123", "run.dir=elsewhere", "data.root=elsewhere", "train.log_every=7"),
        "logger=tensorboard",
    ):
        assert resolved(override) != resolved(), override
        assert variant_hash(resolved(override)) == variant_hash(resolved()), override


def test_what_makes_a_variant() -> None:
    overrides = [
        (),
        ("train.lr=0.5",),
        ("precision=bf16_mixed",),
        ("recipe=linear",),
        ("batch=double",),
        ("recipe.model.units=64",),
        ("data.source=generated",),
    ]
    assert len({variant_hash(resolved(*o)) for o in overrides}) == len(overrides)


def test_a_hash_does_not_depend_on_the_order_of_keys() -> None:
    def reverse(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: reverse(v) for k, v in reversed(value.items())}

    config = resolved()
    assert list(reverse(config)) != list(config)
    assert variant_hash(reverse(config)) == variant_hash(config)
