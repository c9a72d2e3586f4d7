"""Signs of numerical trouble in a run's record, beside the score it ends with.

A short trial may end with a good score and still be on its way to trouble: steps that are skipped
again and again, a loss scale that falls without end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mprun.records.run_record import Summary, number

SKIPPED_SHARE = 0.05
"""Share of the steps in a run's second half; a dynamic scale has found its height by then."""


def alarms(summary: Summary, lines: Sequence[dict[str, Any]]) -> list[str]:
    """What is alarming about a run, a sentence each.

    Args:
        summary: its summary.
        lines: those of its metrics.jsonl.
    """
    return [*_skipped(summary, lines), *_scale(summary), *_losses(summary)]


def _skipped(summary: Summary, lines: Sequence[dict[str, Any]]) -> list[str]:
    # Every skipped step has a line, whatever train.log_every is; others may have none.
    half = summary.steps // 2
    late = summary.steps - half
    is_step = (line for line in lines if line.get("kind") == "step" and line["step"] > half)
    skipped = sum(bool(line.get("skipped")) for line in is_step)
    if skipped <= SKIPPED_SHARE * late:
        return []
    return [f"{skipped} of the last {late} steps were skipped: gradients overflow"]


def _scale(summary: Summary) -> list[str]:
    row = summary.loss_scale
    if row.kind != "dynamic" or row.final >= 1:
        return []
    return [f"the loss scale fell to {row.final:g}: gradients overflow even unscaled"]


def _losses(summary: Summary) -> list[str]:
    parts = {
        "training": [summary.train.loss, *(e.train.loss for e in summary.history)],
        "validation": [e.validation.loss for e in summary.history],
        "test": [summary.test.loss],
    }
    return [
        f"a {name} loss was not finite"
        for name, losses in parts.items()
        if any(x is not None and not math.isfinite(number(x)) for x in losses)
    ]
