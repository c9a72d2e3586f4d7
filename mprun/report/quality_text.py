"""Time and samples to equal quality, in words: a clause of a variant's result, lines, warnings."""

from __future__ import annotations

from mprun.compare.comparison import Comparison, EqualQuality, Estimate, Variant
from mprun.compare.equal_quality import (
    buys_nothing,
    is_faster_per_sample,
    judge_equal_quality,
)
from mprun.report.cells import ms, plain, ratio_span, times

NOTHING = ", so its speed buys nothing"


def clause(comparison: Comparison, variant: Variant) -> str:
    """What the variant needs to the baseline's validation loss, and what that says of its speed.

    `needs 1.20x the samples and 1.00x the time (95 % interval 0.98 to 1.02) of fp32 to equal
    validation loss, so its speed buys nothing`; empty without a figure.
    """
    quality = variant.equal_quality
    if quality is None or quality.samples_ratio is None:
        return ""
    name = plain(comparison.baseline)
    needs = [f"{_figure(quality.samples_ratio)} the samples"]
    if quality.time_ratio is not None:
        needs.append(f"{_figure(quality.time_ratio)} the time")
    text = f"needs {' and '.join(needs)} of {name} to equal validation loss"
    return f"{text}{_conclusion(variant)}{_missed(quality, name)}"


def _figure(ratio: Estimate) -> str:
    span = ratio_span(ratio.interval)
    around = f"95 % interval {span}, n={ratio.n}" if span else f"n={ratio.n}, without an interval"
    return f"{times(ratio.value)} ({around})"


def _missed(quality: EqualQuality, name: str) -> str:
    if not quality.missed:
        return ""
    return (
        f" (in {quality.missed} of {_pairs(quality)} its best loss stayed more than "
        f"{100 * quality.tolerance:.3g} % above that of {name}: these are compared at the level "
        "that it did reach)"
    )


def _pairs(quality: EqualQuality) -> str:
    assert quality.samples_ratio is not None
    return f"{quality.samples_ratio.n} pairs" if quality.samples_ratio.n > 1 else "1 pair"


def _conclusion(variant: Variant) -> str:
    if buys_nothing(variant):
        return NOTHING
    if is_faster_per_sample(variant) and judge_equal_quality(variant) == "open":
        return ", which leaves open whether its speed buys anything"
    return ""


def warnings(comparison: Comparison) -> list[str]:
    """A sentence on each variant that is faster per sample and not faster to equal quality.

    One that is worse needs none: its speed is no reason to take it.
    """
    return [
        f"{plain(v.label)} buys nothing: it trains {v.throughput_ratio.value:.2f} times as fast, "
        f"but {clause(comparison, v).replace(NOTHING, '')}."
        for v in comparison.variants[1:]
        if v.verdict.word != "worse" and v.throughput_ratio is not None and buys_nothing(v)
    ]


def lines(comparison: Comparison) -> list[str]:
    """A line for each variant with a figure: absolute figures, then the ratios."""
    return [
        f"{plain(v.label)} {_absolute(v.equal_quality)}{clause(comparison, v)}"
        for v in comparison.variants[1:]
        if v.equal_quality is not None and v.equal_quality.samples_ratio is not None
    ]


def _absolute(quality: EqualQuality) -> str:
    """`took 12,000 samples in 3.21 s (baseline 10,000 in 3.22 s): `."""
    if quality.samples is None or quality.baseline_samples is None:
        return ""
    own, base = f"{quality.samples:,.0f} samples", f"{quality.baseline_samples:,.0f}"
    if quality.seconds is not None and quality.baseline_seconds is not None:
        own += f" in {ms(quality.seconds)} s"
        base += f" in {ms(quality.baseline_seconds)} s"
    return f"took {own} to equal validation loss (the baseline {base}): "
