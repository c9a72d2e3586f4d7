"""Comparisons to decide over, made by hand."""

from __future__ import annotations

from pathlib import Path

from mprun.study.compare.comparison import (
    Comparison,
    Estimate,
    Interval,
    Outcome,
    Run,
    StepPercentiles,
    Variant,
    Verdict,
)
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
    return Variant(
        label=label,
        variant_hash=label,
        precision=label.partition("+")[0].partition(" ")[0],
        execution=execution,
        runs=(Run(Path(f"{label}-seed0"), example()),),
        failed=(),
        step_time_ms=StepPercentiles(10.0, 9.0, 11.0),
        step_time_ratio=ratio(time),
        samples_per_second=1000.0,
        throughput_ratio=ratio(throughput),
        no_time_verdict="",
        memory_bytes={"peak": 2**20},
        memory_ratio=memory,
        metric=Estimate(metric, Interval(metric - 0.01, metric + 0.01), 10),
        difference=Estimate(0.0, Interval(-0.001, 0.001), 10),
        equivalence=Interval(-0.001, 0.001),
        verdict=Verdict(word, "made by hand", more_seeds),
    )


def ratio(figures: tuple[float, float, float] | None) -> Estimate | None:
    """A ratio with its interval."""
    return figures and Estimate(figures[0], Interval(*figures[1:]), 10)


def comparison(*others: Variant, higher_is_better: bool = True) -> Comparison:
    """A table with `fp32` as its baseline."""
    baseline = variant("fp32", "baseline", time=(1, 1, 1), throughput=(1, 1, 1), memory=1.0)
    return Comparison(
        recipe="mnist",
        metric="accuracy",
        split="validation",
        higher_is_better=higher_is_better,
        margin=0.005,
        is_relative=False,
        baseline="fp32",
        variants=(baseline, *others),
        skipped=(),
        data="MNIST (local)",
        hardware="Some CPU",
        code="mprun 0.1.0",
    )
