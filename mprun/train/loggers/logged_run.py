"""What a tracker gets of a run, as plain values: mprun's own run, or a loop that it observes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mprun.records.run_folder import TRACKERS
from mprun.records.run_record import Scores, Summary, number
from mprun.train.callbacks import StepLine

Scalar = str | int | float | bool | None

STORE = "outputs"
STORE_LEVELS = 3  # outputs/DATE/TIME/TRIAL: the folders above the run of a study


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run as a tracker sees it."""

    folder: Path  # The run's folder, with its record
    project: str = "mprun"  # MLflow's experiment; the project of W&B and trackio
    name: str = "run"
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration, nested."""
    tags: Mapping[str, str] = field(default_factory=dict)
    store: Path | None = None
    """The folder of the tracker's files; None for `outputs`, else the run's parent."""
    uri: str | None = None
    """MLflow's store; None for MLFLOW_TRACKING_URI, else a file in `store_folder`."""
    online: bool = False  # Whether W&B sends the data to its server while the run trains
    first_step: int | None = None  # Of a resumed run; None for a new one
    log_every: int = 1  # Every n-th step is logged, and each skipped one, as in metrics.jsonl

    @property
    def store_folder(self) -> Path:
        """One folder for the tracker's files of many runs."""
        if self.store is not None:
            return self.store
        above = list(self.folder.absolute().parents)
        return next((p for p in above[:STORE_LEVELS] if p.name == STORE), above[0])

    @property
    def tracker_folder(self) -> Path:
        """The folder for copies of records: nothing searches it for runs."""
        return self.store_folder / TRACKERS

    @property
    def parameters(self) -> dict[str, Scalar]:
        """The configuration with dotted names: `train.lr`.

        A list is one value, as JSON, and so is a mapping whose keys are not plain names (modules
        by glob, for example): trackers refuse such names.
        """
        return dict(_flattened(self.configuration))

    @property
    def described(self) -> dict[str, Scalar]:
        """Parameters and tags in one mapping, for trackers whose configuration holds both."""
        return {**self.parameters, **{f"tags.{name}": value for name, value in self.tags.items()}}


def _flattened(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and all(map(_is_plain, value)):
            yield from _flattened(value, f"{name}.")
        elif value is None or isinstance(value, str | int | float):
            yield name, value
        else:
            yield name, json.dumps(value)


def _is_plain(key: object) -> bool:
    return isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_-]+", key) is not None


def run_tags(summary: Summary) -> dict[str, str]:
    """The facts that runs are searched by; their names are `OWN_TAGS`, without `status`."""
    return {
        "recipe": summary.recipe,
        "precision": summary.precision,
        "variant": summary.variant,
        "variant_hash": summary.variant_hash,
        "seed": str(summary.seed),
        "execution": summary.execution,
        "device": summary.hardware.device,
        "hardware": summary.hardware.name,
        "mprun_version": summary.mprun_version,
        "git_commit": summary.git_commit or "unknown",
    }


def summary_scalars(summary: Summary) -> dict[str, float]:
    """The figures of the whole run, without those that do not apply."""
    figures = {
        "summary/step_time_ms": summary.step_time_ms.median,
        "summary/data_time_ms": summary.data_time_ms.median,
        "summary/samples_per_second": summary.samples_per_second,
        "summary/peak_memory_bytes": summary.memory_bytes.peak,
        "summary/allocator_peak_bytes": summary.memory_bytes.allocator_peak,
        "summary/skipped_steps": summary.skipped_steps,
        "summary/wall_time_s": summary.wall_time_s,
    }
    return {name: float(value) for name, value in figures.items() if value is not None}


def step_scalars(line: StepLine) -> dict[str, float]:
    """The figures of a step, by their curves."""
    return {
        "train/loss": line.loss,
        **{f"train/loss.{name}": part for name, part in line.parts.items()},
        "train/lr": line.lr,
        "train/loss_scale": line.loss_scale,
        "time/step_ms": line.step_time_ms,
        "time/data_ms": line.data_time_ms,
    }


def score_scalars(prefix: str, scores: Scores) -> dict[str, float]:
    """The scores that apply, by their curves: `validation/loss`, `train/epoch_accuracy`, ..."""
    return {prefix + name: number(value) for name, value in scores.named.items()}
