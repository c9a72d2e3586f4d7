"""Comparisons to decide over, made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mprun.study.compare.comparison import (
    Comparison,
    Estimate,
    Interval,
    Outcome,
    Run,
    Variant,
    Verdict,
)
from tests.study.report import compared
from tests.summaries import example


def variant(
    label: str,
    word: Outcome = "equivalent",
    *,
    time: tuple[float, float, float] | None = (0.5, 0.4, 0.6),
    throughput: tuple[float, float, float] | None = (2.0, 1.9, 2.1),
    memory: float | None = 0.75,
    metric: float = 0.9,
    execution: str = "native",
    more_seeds: int | None = None,
) -> Variant:
    """A row; ratios as value, low, high."""
    return replace(
        compared.variant(label, 0),
        execution=execution,
        runs=(Run(Path(f"{label}-seed0"), example()),),
        step_time_ratio=ratio(time),
        throughput_ratio=ratio(throughput),
        memory_ratio=memory,
        metric=ratio((metric, metric - 0.01, metric + 0.01)),
        difference=ratio((0.0, -0.001, 0.001)),
        verdict=Verdict(word, "made by hand", more_seeds),
    )


def ratio(figures: tuple[float, float, float] | None) -> Estimate | None:
    """A figure with its interval."""
    return figures and Estimate(figures[0], Interval(*figures[1:]), 10)


def comparison(*others: Variant, higher_is_better: bool = True) -> Comparison:
    """A table with `fp32` as its baseline."""
    baseline = variant("fp32", "baseline", time=(1, 1, 1), throughput=(1, 1, 1), memory=1.0)
    return replace(
        compared.comparison(1),
        split="validation",
        higher_is_better=higher_is_better,
        variants=(baseline, *others),
        notes=(),
    )
