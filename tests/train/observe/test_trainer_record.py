"""What the callbacks share: records that end once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mprun.records.run_record import read_lines, read_summary
from mprun.train.observe.observe import TrainerRecord


def steps(record: TrainerRecord, model: nn.Module, optimizer: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        record.log_values({"loss": 1.0, "text": "a", "flag": True, "many": torch.ones(2)})
        record.report_audit()


def test_a_record_ends_once_and_the_next_training_has_another(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = TrainerRecord(tmp_path / "run")
    record.log_values({"loss": 1.0})  # before the training: of nothing
    record.begin(model, [optimizer], seed=5)
    steps(record, model, optimizer, 6)
    record.end()
    record.end(RuntimeError("late"))
    assert read_summary(tmp_path / "run").status == "completed"
    assert read_summary(tmp_path / "run").seed == 5
    line = next(x for x in read_lines(tmp_path / "run") if x["kind"] == "step")
    assert line["loss"] == 1.0
    assert not {"text", "flag", "many"} & line.keys()

    record.begin(model, [optimizer], seed=None)
    steps(record, model, optimizer, 3)
    record.begin(model, [optimizer], seed=None)  # the one before was not ended
    record.end()
    summary = read_summary(tmp_path / "run_2")
    assert (summary.status, summary.error) == (
        "failed",
        "RuntimeError: the trainer did not end the training",
    )
    with pytest.raises(FileExistsError, match="already contains a run"):
        TrainerRecord(tmp_path / "run").begin(model, [optimizer], seed=None)


def test_a_training_that_an_error_leaves_ends_with_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers that call no callback where they fail: Python keeps the error as sys.last_value."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr(sys, "last_value", RuntimeError("no more"), raising=False)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = TrainerRecord(tmp_path / "run")
    record.begin(model, [optimizer], seed=0)
    steps(record, model, optimizer, 1)
    # the compiler, where it is imported only now, registers functions of its own
    (end,) = (x for x in at_exit if getattr(x, "__self__", None) is record)
    end()
    summary = read_summary(tmp_path / "run")
    assert (summary.status, summary.error, summary.steps) == (
        "failed",
        "RuntimeError: no more",
        1,
    )
