"""What a tracker has to hold of a run, read from the run's own record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mprun.cli.main import main
from mprun.records.run_config import LoggerRecord, read_config, read_logger_record
from mprun.records.run_record import read_lines, read_summary
from mprun.train.logger import LoggedRun, run_tags, summary_scalars

MNIST = [
    *("recipe=mnist", "data.source=generated", "data.train_limit=128", "data.eval_limit=32"),
    *("data.validation_fraction=0.25", "train.batch_size=32"),
]
"""Validation in each of two epochs, and a test."""
LINEAR = ["recipe=linear", "train.checkpoint_every_steps=4"]

Curves = dict[str, list[tuple[int, float]]]


def train(run: Path, *words: str) -> int:
    """The status of a run in this folder."""
    return main([*words, f"run.dir={run}"])


def resume(run: Path, *words: str) -> int:
    return main([f"run.resume={run}", *words])


def curves_of(run: Path) -> Curves:
    """By name the points (step, value) that a logger has to write."""
    curves: Curves = {}
    names = {
        "loss": "train/loss",
        "lr": "train/lr",
        "loss_scale": "train/loss_scale",
        "step_time_ms": "time/step_ms",
        "data_time_ms": "time/data_ms",
    }
    prefixes = {"validation": "validation/", "epoch": "train/epoch_"}
    for line in read_lines(run):
        if line["kind"] == "step":
            values = {tag: line[key] for key, tag in names.items()}
        else:
            scores = {k: line[k] for k in ("loss", "accuracy") if line.get(k) is not None}
            values = {prefixes[line["kind"]] + k: v for k, v in scores.items()}
        for name, value in values.items():
            curves.setdefault(name, []).append((line["step"], float(value)))
    summary = read_summary(run)
    tested = {f"test/{name}": float(value) for name, value in summary.test.named.items()}
    for name, value in {**tested, **summary_scalars(summary)}.items():
        curves[name] = [(summary.steps, value)]
    return curves


def parameters_of(run: Path) -> dict[str, Any]:
    """The configuration of the record, with dotted names."""
    return LoggedRun(folder=run, configuration=read_config(run)).parameters


def tags_of(run: Path) -> dict[str, str]:
    summary = read_summary(run)
    return {**run_tags(summary), "status": summary.status}


def record_of(run: Path) -> LoggerRecord:
    """The content of logger.json."""
    name = json.loads((run / "logger.json").read_text())["logger"]
    record = read_logger_record(run, name)
    assert record is not None
    return record
