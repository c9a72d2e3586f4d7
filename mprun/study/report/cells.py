"""Figures as text, the same in the table, on the page and in the sentences.

Accuracies are in per cent, their differences in points. Losses have no unit, their differences are
in per cent of the baseline's loss. Times are in milliseconds, memory is in one binary unit for the
whole table. Files for programs contain the plain numbers (`exports.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mprun.errors import printable
from mprun.records.console.formatting import UNITS, counted, distinct_form, level_text
from mprun.study.compare.comparison import Comparison, Estimate, Interval, StepPercentiles, Variant
from mprun.study.compare.statistics import CONFIDENCE
from mprun.study.compare.times import SAME

NONE = "-"  # A cell without a figure

# The word of a verdict to the role of its colour
TONES = {"better": "good", "equivalent": "good", "worse": "bad", "inconclusive": "open"}
MEASURED = "as measured"  # In place of a ratio's interval

# Formats of the ends of intervals, from few digits to many: the first that is on the right side of
# each limit is taken. 17 significant digits tell all float64 apart.
RATIO_FORMS = tuple(f"{{:.{digits}f}}" for digits in range(2, 16))
DIFFERENCE_FORMS = (
    *(f"{{:+.{digits}f}}" for digits in range(2, 7)),
    *(f"{{:+.{digits}g}}" for digits in range(3, 18)),
)


def plain(text: str, longest: int | None = None) -> str:
    """`text` in one line without control characters, its middle cut out if it is too long."""
    shown = printable(" ".join(text.split()))
    if longest is None or len(shown) <= longest:
        return shown
    tail = longest // 3  # labels and paths of runs differ at the end, so some of it stays
    return f"{shown[: longest - tail - 3]}...{shown[-tail:]}"


def is_emulated(variant: Variant) -> bool:
    """Whether its times and memory come from an emulation; they are not comparable then."""
    return variant.execution != "native"


class VariantCells(NamedTuple):
    """A variant's row: in each cell a figure, and its range or ratio (or nothing)."""

    label: tuple[str, str]  # The name, and the ops that were not computed in the mode's own dtype
    runs: tuple[str, str]
    step_time: tuple[str, str]
    ratio: tuple[str, str]
    samples: tuple[str, str]
    memory: tuple[str, str]
    metric: tuple[str, str]
    difference: tuple[str, str]
    verdict: tuple[str, str]


def rows(comparison: Comparison) -> list[VariantCells]:
    """The table's cells, a row for each variant."""
    return [_row(comparison, variant) for variant in comparison.variants]


def headings(comparison: Comparison) -> VariantCells:
    """The columns' names with units, and the names of the second parts."""
    return VariantCells(
        ("variant", ""),
        ("runs", ""),
        ("step ms", "p10 to p90"),
        ("time ratio", "95 %"),
        ("samples per s", "ratio"),
        (f"peak {memory_unit(comparison)[0]}", "ratio"),
        (" ".join(filter(None, (comparison.metric, metric_unit(comparison)))), "95 %"),
        ("difference %" if comparison.is_relative else "difference, points", "interval"),
        ("verdict", ""),
    )


def _row(comparison: Comparison, variant: Variant) -> VariantCells:
    emulated = is_emulated(variant)
    samples, runs = variant.samples_per_second, len(variant.runs)
    more = variant.verdict.more_seeds
    return VariantCells(
        (plain(variant.label), plain(variant.substituted)),
        (f"{runs} of {runs + len(variant.failed)}" if variant.failed else f"{runs}", ""),
        _step_time(variant.step_time_ms),
        time_ratio(variant, variant.step_time_ratio),
        (
            NONE if samples is None else f"{samples:.0f}",
            "" if emulated or not variant.throughput_ratio else _ratio(variant.throughput_ratio)[0],
        ),
        _memory(comparison, variant),
        _metric(comparison, variant.metric),
        _difference(comparison, variant),
        (variant.verdict.word, f"about {counted(more, 'more seed')}" if more else ""),
    )


def _step_time(step: StepPercentiles | None) -> tuple[str, str]:
    if step is None:
        return NONE, ""
    # The percentiles of a single step are equal: that is no spread.
    return ms(step.median), f"{ms(step.p10)} to {ms(step.p90)}" if step.p10 < step.p90 else ""


def time_ratio(variant: Variant, ratio: Estimate | None) -> tuple[str, str]:
    """A ratio of times or rates of a variant; an emulated one has none."""
    return ("EMULATED", "") if is_emulated(variant) else _ratio(ratio)


def _ratio(ratio: Estimate | None) -> tuple[str, str]:
    if ratio is None:
        return NONE, ""
    return times(ratio.value), ratio_span(ratio.interval) or MEASURED


def ratio_span(interval: Interval | None) -> str:
    """An interval of a ratio, `0.80 to 0.85`, with enough digits to compare it with 1."""
    if interval is None:
        return ""
    return span(interval, distinct_form(interval, (1 / SAME, 1.0, SAME), RATIO_FORMS))


def _memory(comparison: Comparison, variant: Variant) -> tuple[str, str]:
    ratio = None if is_emulated(variant) else variant.memory_ratio
    return memory(comparison, peak(variant)), "" if ratio is None else times(ratio)


def _metric(comparison: Comparison, metric: Estimate | None) -> tuple[str, str]:
    if metric is None:
        return NONE, ""
    unit, form = metric_scale(comparison), _metric_form(comparison)
    return form.format(metric.value * unit), span(metric.interval, form, unit)


def _difference(comparison: Comparison, variant: Variant) -> tuple[str, str]:
    difference = variant.difference
    if difference is None or variant.verdict.word == "baseline":
        return NONE, ""
    unit, form = DIFFERENCE_SCALE, DIFFERENCE_FORM
    pairs = "" if difference.n == len(variant.runs) else f" n={difference.n}"
    interval, level = deciding(variant)
    # The level has no blank, because a narrow table breaks lines at blanks
    at = f"({level.replace(' ', '')})"
    around = "" if interval is None else f"{difference_span(comparison, interval)} {at}"
    return form.format(difference.value * unit), around + pairs


def deciding(variant: Variant) -> tuple[Interval | None, str]:
    """The interval that decided on a variant and its level, `98.75 %`; else the 95 % interval."""
    verdict = variant.verdict
    if verdict.interval is not None and verdict.level is not None:
        return verdict.interval, level_text(verdict.level)
    return variant.difference and variant.difference.interval, level_text(CONFIDENCE)


def peak(variant: Variant) -> int | None:
    """Bytes at the peak of a step."""
    return variant.memory_bytes.get("peak")


def beside(value: str, around: str) -> str:
    """A figure with its interval beside it: `0.82x [0.80, 0.85]`."""
    interval = around.replace(" to ", ", ")
    return f"{value} [{interval}]" if interval != around else f"{value} {around}".rstrip()


def ms(value: float) -> str:
    """Milliseconds with about three significant digits: `0.812`, `12.5`, `180`."""
    # More digits than the clock's noise would only look precise
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


def times(ratio: float) -> str:
    """A ratio: `0.82x`."""
    # From 99.5 on, decimals are noise; 99.5 itself rounds to 100
    return f"{ratio:.2f}x" if ratio < 99.5 else f"{ratio:.0f}x"


def span(interval: Interval | None, form: str, scale: float = 1.0) -> str:
    """An interval: `0.80 to 0.85`, or nothing."""
    if interval is None:
        return ""
    return f"{form.format(interval.low * scale)} to {form.format(interval.high * scale)}"


# ---- units ---------------------------------------------------------------------------------------


def metric_scale(comparison: Comparison) -> float:
    """A metric is shown as this multiple of the recorded number."""
    return 1.0 if comparison.is_relative else 100.0


# A difference is shown as this multiple of the computed number: points, or percent
DIFFERENCE_SCALE = 100.0


def _metric_form(comparison: Comparison) -> str:
    """Losses have as many decimals as make four digits of the largest."""
    if not comparison.is_relative:
        return "{:.2f}"
    sizes = [abs(v.metric.value) for v in comparison.variants if v.metric]
    largest = max(filter(math.isfinite, sizes), default=0.0)
    # One number of decimals for the column, so that its figures can be compared by eye
    decimals = 3 - math.floor(math.log10(largest)) if largest > 0 else 3
    return f"{{:.{max(0, decimals)}f}}" if decimals <= MAX_DECIMALS else "{:.3e}"


DIFFERENCE_FORM = "{:+.2f}"  # Of points or percent
MAX_DECIMALS = 7  # A loss that needs more is shown with an exponent


def metric_name(comparison: Comparison) -> str:
    """`test accuracy`, `training loss of averaged weights (5 places of the last tenth)`."""
    places = comparison.places
    where = f" ({counted(places, 'place')} of the last tenth)" if places is not None else ""
    return axis_name(comparison) + where


def axis_name(comparison: Comparison) -> str:
    """The same without the places, which is short enough for an axis."""
    split = "training" if comparison.split == "train" else comparison.split
    of = " of averaged weights" if comparison.weights == "averaged" else ""
    return f"{split} {comparison.metric}{of}"


def metric_unit(comparison: Comparison) -> str:
    """`%` of a fraction, such as an accuracy; a loss has none."""
    return "" if comparison.is_relative else "%"


def difference_text(comparison: Comparison, value: float, signed: bool = True) -> str:
    """A difference with its unit: `-0.05 points`, `+2.00 %`; without a sign, a margin."""
    number = DIFFERENCE_FORM.format(value * DIFFERENCE_SCALE)
    unit = "%" if comparison.is_relative else "points"
    return f"{number if signed else number.lstrip('+')} {unit}"


def difference_span(comparison: Comparison, interval: Interval) -> str:
    """An interval of differences, `-0.20 to +0.10`, with enough digits to compare each end with 0
    and with the margin."""
    margin = comparison.margin * DIFFERENCE_SCALE
    ends = [end * DIFFERENCE_SCALE for end in interval]
    form = distinct_form(ends, (-margin, 0.0, margin), DIFFERENCE_FORMS)
    return span(interval, form, DIFFERENCE_SCALE)


def memory_unit(comparison: Comparison) -> tuple[str, int]:
    """The unit of all memory of the table: the largest in which every peak is at least 1."""
    peaks = [p for v in comparison.variants if (p := peak(v))]
    least = min(peaks, default=2**20)  # MiB where nothing is known
    return next((unit for unit in UNITS.items() if least >= unit[1]), ("B", 1))


def memory(comparison: Comparison, value: int | None) -> str:
    """Bytes in the table's unit."""
    size = memory_unit(comparison)[1]
    return NONE if value is None else f"{value / size:.1f}" if size > 1 else str(value)
