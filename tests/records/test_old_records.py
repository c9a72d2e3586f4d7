"""A summary as an earlier mprun wrote it is read whole, and compared beside one of today."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mprun.compare.load import find_runs
from mprun.compare.verdicts import compare
from mprun.records.files import jsonable
from mprun.records.run_folder import RunFolder
from mprun.records.run_record import Summary, read_summary

OLD = Path(__file__).with_name("old_summary.json")


def old_run(folder: Path) -> Summary:
    folder.mkdir(parents=True)
    shutil.copy(OLD, folder / "summary.json")
    return read_summary(folder)


def test_every_field_of_an_old_summary_is_read_and_written_again(tmp_path: Path) -> None:
    summary = old_run(tmp_path / "runs/old")
    old = json.loads(OLD.read_text(encoding="utf-8"))
    assert without_new_fields(jsonable(asdict(summary)), old) == old


def without_new_fields(record: Any, old: Any) -> Any:
    """The record without fields that `old` lacks; they came later and have a default."""
    if isinstance(old, list):
        return [without_new_fields(x, y) for x, y in zip(record, old, strict=True)]
    if not isinstance(old, dict):
        return record
    return {key: without_new_fields(record[key], old[key]) for key in old}


def test_an_old_run_is_compared_beside_a_new_one(tmp_path: Path) -> None:
    old = old_run(tmp_path / "runs/old")
    new = replace(
        old,
        precision="bf16_mixed",
        variant="bf16_mixed",
        variant_hash="0123456789ab",
        started_at="2026-11-22T12:08:14.026+00:00",
        step_time_ms=replace(old.step_time_ms, median=20.0, p10=18.0, p90=21.0),
        test=replace(old.test, accuracy=0.7539),
    )
    folder = RunFolder(tmp_path / "runs/new")
    folder.summary(new)
    folder.close()
    runs, skipped = find_runs([tmp_path / "runs"])
    assert len(runs) == 2
    assert not skipped
    comparison = compare(runs, margin=0.005, relative_margin=0.02)
    base, other = comparison.variants
    assert (base.label, other.label) == ("fp32", "bf16_mixed")
    assert other.difference is not None
    assert other.step_time_ratio is not None
    assert other.difference.value == pytest.approx(-0.01)
    assert other.step_time_ratio.value == pytest.approx(20.0 / 37.87538799952017)
