"""Time and samples to equal quality, in words: a clause of a variant's result, lines, warnings."""

from __future__ import annotations

from mprun.compare.comparison import Comparison, EqualQuality, Estimate, Variant
from mprun.compare.equal_quality import (
    buys_nothing,
    is_faster_per_sample,
    judge_equal_quality,
)
from mprun.report.cells import ms, plain, ratio_span, times

TO_EQUAL = "to equal validation loss"


def clause(comparison: Comparison, variant: Variant) -> str:
    """What the variant needs to the baseline's validation loss, and what that says of its speed.

    `needs 1.20x the samples and 1.00x the time (95 % interval 0.98 to 1.02, n=5) of fp32 to equal
    validation loss, so its speed buys nothing`; empty without a figure.
    """
    quality = variant.equal_quality
    if quality is None or quality.samples_ratio is None:
        return ""
    name = plain(comparison.baseline)
    return (
        f"needs {_ratios(quality, name)} {TO_EQUAL}{_conclusion(variant)}{_missed(quality, name)}"
    )


def warnings(comparison: Comparison) -> list[str]:
    """A sentence on each variant that is faster per sample and not faster to equal quality.

    One that is worse needs none: its speed is no reason to take it.
    """
    name = plain(comparison.baseline)
    return [
        f"{plain(v.label)} buys nothing: it trains {v.throughput_ratio.value:.2f} times as fast, "
        f"but needs {_ratios(v.equal_quality, name)} {TO_EQUAL}{_missed(v.equal_quality, name)}."
        for v in comparison.variants[1:]
        if v.throughput_ratio is not None
        and v.equal_quality is not None
        and v.verdict.word != "worse"
        and buys_nothing(v)
    ]


def lines(comparison: Comparison) -> list[str]:
    """A line for each variant with a figure: absolute figures, then the ratios."""
    name = plain(comparison.baseline)
    return [
        f"{plain(v.label)} {TO_EQUAL}: {_absolute(v.equal_quality, name)}; "
        f"{_ratios(v.equal_quality, name)}{_conclusion(v)}{_missed(v.equal_quality, name)}"
        for v in comparison.variants[1:]
        if v.equal_quality is not None and v.equal_quality.samples_ratio is not None
    ]


def _ratios(quality: EqualQuality, name: str) -> str:
    """`1.20x (95 % interval 1.18 to 1.22, n=5) the samples and 1.00x (...) the time of fp32`."""
    figures = ((quality.samples_ratio, "samples"), (quality.time_ratio, "time"))
    texts = [f"{_figure(ratio)} the {of}" for ratio, of in figures if ratio is not None]
    return f"{' and '.join(texts)} of {name}"


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
        return ", so its speed buys nothing"
    if is_faster_per_sample(variant) and judge_equal_quality(variant) == "open":
        return ", which leaves open whether its speed buys anything"
    return ""


def _absolute(quality: EqualQuality, name: str) -> str:
    """`12,000 samples in 3.21 s (fp32 10,000 in 3.22 s)`; the medians over pairs."""
    own, base = f"{quality.samples or 0:,.0f} samples", f"{quality.baseline_samples or 0:,.0f}"
    if quality.seconds is not None and quality.baseline_seconds is not None:
        own += f" in {ms(quality.seconds)} s"
        base += f" in {ms(quality.baseline_seconds)} s"
    return f"{own} ({name} {base})"
