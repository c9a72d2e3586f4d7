"""Run folders and runs to test comparisons with, made from the example summary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from mprun.records.files import jsonable
from mprun.records.run_record import Summary
from mprun.study.compare.comparison import Run
from tests.summaries import example, set_fields

FIRST = datetime(2024, 3, 1, tzinfo=timezone.utc)


def summary_of(variant: str = "fp32", seed: int = 0, **changes: Any) -> Summary:
    """A completed run of `variant`, for example `bf16_mixed x2`.

    Each seed has a day, each variant a time of that day: variants are interleaved over seeds.

    Args:
        variant: its label; the mode's name is the part before `+` and a blank.
        seed: its seed.
        changes: `accuracy`, `loss` and `metric` set the test's scores and the recipe's metric,
            `step_ms` the step time; else fields of the summary, `hardware__name` for nested ones.
    """
    summary = example()
    digest = hashlib.sha256(variant.encode()).hexdigest()[:12]
    mode = variant.partition(" ")[0].partition("+")[0]
    start = FIRST + timedelta(seed or 0, 30 * (int(digest, 16) % 2000))
    set_fields(
        summary,
        variant=variant,
        variant_hash=digest,
        precision=mode,
        seed=seed,
        started_at=start.isoformat(),
        data={"name": "MNIST", "source": "local"},
    )
    for name in ("accuracy", "loss"):
        if name in changes:
            setattr(summary.test, name, changes.pop(name))
    if changes.pop("metric", "accuracy") == "loss":
        set_fields(summary, metric={"name": "loss", "higher_is_better": False})
    if "step_ms" in changes:
        ms = changes.pop("step_ms")
        set_fields(summary.step_time_ms, median=ms, p10=0.9 * ms, p90=1.1 * ms)
        summary.samples_per_second = 128 / ms * 1e3
    for key, value in changes.items():
        *path, last = key.split("__")
        place: Any = summary
        for part in path:
            place = getattr(place, part)
        if isinstance(place, dict):
            place[last] = value
        else:
            set_fields(place, **{last: value})
    return summary


def run_of(variant: str = "fp32", seed: int = 0, path: Path | None = None, **changes: Any) -> Run:
    """A run that was read; its folder need not exist."""
    return Run(path or Path(f"{variant}-{seed}"), summary_of(variant, seed, **changes))


def runs_of(variant: str, accuracies: Sequence[float], **changes: Any) -> list[Run]:
    """Runs with seeds 0, 1, ... and these test accuracies."""
    return [run_of(variant, i, accuracy=a, **changes) for i, a in enumerate(accuracies)]


def write_run(
    folder: Path, variant: str = "fp32", seed: int = 0, config: str = "", **changes: Any
) -> Path:
    """A run's folder as `mprun` leaves it; the folder."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("", encoding="utf-8")
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    text = json.dumps(
        jsonable(asdict(summary_of(variant, seed, **changes))), indent=1, allow_nan=False
    )
    (folder / "summary.json").write_text(text, encoding="utf-8")
    return folder
