"""The result of a comparison in sentences: which variants keep the metric, and what they gain.

Speed is samples per second, not time per step: a doubled batch has longer steps and may still be
faster. A variant is called faster or slower only if the 95 % interval of the throughput ratio
excludes 1, and equally fast only if that interval lies within `SAME`. Otherwise the sentence
reports the speed as open. The time to equal quality comes first in the answer, and a warning where
the speed buys nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from mprun.config.settings import Settings
from mprun.records.console.formatting import counted, joined
from mprun.study.compare.comparison import (
    KEEPS,
    Comparison,
    EqualQuality,
    Estimate,
    Interval,
    QuantityVerdict,
    Variant,
)
from mprun.study.compare.equal_quality import (
    buys_nothing,
    is_faster_per_sample,
    judge_equal_quality,
)
from mprun.study.compare.times import SAME, judge_ratio
from mprun.study.report.cells import (
    deciding,
    difference_span,
    difference_text,
    is_emulated,
    metric_name,
    plain,
    ratio_span,
    times,
)

# A peak that differs by a smaller share is called the same: it is computed, so has no interval
SAME_MEMORY = 0.02
LIMIT = Settings().seeds_limit


def headline(comparison: Comparison) -> list[str]:
    """The answer in one or two sentences: the fastest that keeps the metric, and the smallest.

    If a study advises a mode, the advice is the answer, so that a page has one answer.
    """
    if comparison.advice is not None:
        return [plain(comparison.advice.sentence)]
    others, name = comparison.variants[1:], plain(comparison.baseline)
    if not others:
        return [f"There is nothing to compare {name} with: all runs are of one variant."]
    keeping = [v for v in others if v.verdict.word in KEEPS and not is_emulated(v)]
    faster = [v for v in keeping if v.has_own_times and _speed(v) > 0 and not buys_nothing(v)]
    smaller = [v for v in keeping if _memory(v) < 1 - SAME_MEMORY]
    sentences = []
    if faster:
        best = max(faster, key=_gain)
        reached, missing = _equal_quality_first(best, name)
        clauses = (reached, _kept(comparison, best), _memory_clause(best))
        sentences.append(_sentence(best, *clauses, _speed_clause(best, name)) + missing)
        # A second variant is named only if it is smaller than the first by more than that
        smaller = [v for v in smaller if _memory(v) < min(_memory(best), 1) - SAME_MEMORY]
    if smaller:
        # Of peaks that are printed alike, the fastest
        least = min(smaller, key=lambda v: (round(_memory(v), 2), -_throughput(v)))
        speed = _speed_clause(least) if least.has_own_times else ""
        sentences.append(_sentence(least, _kept(comparison, least), _memory_clause(least), speed))
    if comparison.variants[0].precision == "fp64":
        lost = {x.variant for x in comparison.quantities if x.word in ("worse", "differs")}
        enough = (v for v in keeping if v.precision == "fp32" and v.label not in lost)
        sentences += [f"float32 is enough: {_metric_clause(comparison, v)}." for v in enough]
    empty = warnings(comparison)  # about speed that buys nothing
    if not sentences:
        gain = "faster to equal quality" if empty else "faster"
        sentences.append(
            f"No variant was shown to keep the {comparison.metric} of {name} and to be {gain} or "
            f"smaller. {_next_step(comparison)}"
        )
    return [*sentences, *empty]


def _next_step(comparison: Comparison) -> str:
    """What to type next if nothing was shown: more seeds, where these may settle it."""
    needed = [(more, v) for v in comparison.variants[1:] if (more := _more_seeds(v))]
    if not needed:
        return f"Take {plain(comparison.baseline)}. Type next: mprun doctor, for native formats."
    more, nearest = min(needed, key=lambda pair: pair[0])
    label, is_open = plain(nearest.label), nearest.verdict.word == "inconclusive"
    if comparison.planned_pairs and is_open and not nearest.verdict.closed:
        folder = shlex.quote(str(nearest.runs[0].path.parent))
        return (
            f"Type next: mprun sweep run.resume={folder}, which goes on until {label} is settled."
        )
    # Seeds that were looked at must not decide when to stop, so the next sweep takes new ones
    seeds = [run.summary.seed for v in comparison.variants for run in (*v.runs, *v.failed)]
    wanted = len(nearest.runs) + more
    own = (f" seeds_limit={wanted}" if wanted > LIMIT else "") if is_open else f" seeds={wanted}"
    command = f"mprun sweep ... first_seed={max(seeds) + 1}{own}"
    return f"Type next: {command}, which should settle {label}."


def _more_seeds(variant: Variant) -> int | None:
    """About how many seeds would settle the metric, or the speed of one that keeps it."""
    verdict, ratio = variant.verdict, variant.throughput_ratio
    if verdict.word == "inconclusive" and not is_emulated(variant):
        return verdict.more_seeds or (None if verdict.interval else 1)  # too few runs
    is_open = verdict.word in KEEPS and variant.has_own_times and _speed(variant) == 0
    return judge_ratio(ratio).more_seeds if ratio and is_open else None


def _sentence(variant: Variant, *clauses: str) -> str:
    """`label does one thing, does another and does a third.`"""
    return f"{plain(variant.label)} {joined([*filter(None, clauses)])}."


def variant_sentences(comparison: Comparison) -> list[str]:
    """A sentence for each variant but the baseline, in the table's order, without its label."""
    return [_in_full(comparison, variant) for variant in comparison.variants[1:]]


def _in_full(comparison: Comparison, variant: Variant) -> str:
    clauses = [_metric_clause(comparison, variant)]
    if is_emulated(variant):
        clauses.append("emulated on this machine, so its speed and memory are not judged")
    else:
        clauses += [_speed_clause(variant), _memory_clause(variant)]
    clauses.append(_quality_clause(comparison, variant))
    if variant.substituted:  # float32 arithmetic with casts: faster hardware would not show it
        clauses.append(f"{plain(variant.substituted)}, so its speed is no gain of float16")
    return "; ".join(filter(None, clauses)) + "."


VERBS = {"equivalent": "keeps", "better": "improves", "worse": "worsens"}


def _effect(comparison: Comparison, variant: Variant) -> str:
    return f"{VERBS[variant.verdict.word]} the {comparison.metric}"


def _metric_clause(comparison: Comparison, variant: Variant) -> str:
    """The effect on the metric, with the difference and the interval that decided."""
    word, difference = variant.verdict.word, variant.difference
    if word == "worse" and variant.verdict.interval is None:  # failed or diverged
        return f"is worse: {plain(variant.verdict.reason)}"
    if word == "inconclusive":
        text = f"leaves open whether it keeps the {comparison.metric}"
        text += f" ({_would_settle(more)})" if (more := variant.verdict.more_seeds) else ""
    else:
        text = _effect(comparison, variant)
    interval, level = deciding(variant)
    text += f": {difference_text(comparison, difference.value)}" if difference else ""
    shown = difference and interval and difference_span(comparison, interval)
    return f"{text}, {level} interval {shown}" if shown else text


def _kept(comparison: Comparison, variant: Variant) -> str:
    """The effect on the metric, with what `keeps` means: the margin and the seeds."""
    text, difference = _effect(comparison, variant), variant.difference
    if variant.verdict.word != "equivalent" or difference is None:
        return text
    margin = difference_text(comparison, comparison.margin, signed=False)
    return f"{text} (equivalent within {margin}, {counted(difference.n, 'seed')})"


def _equal_quality_first(variant: Variant, name: str) -> tuple[str, str]:
    """What is first in an answer: the share of the baseline's time to its validation loss.

    Without that figure, a sentence that says what is missing.
    """
    quality = variant.equal_quality
    ratio = quality.time_ratio if quality is not None else None
    if quality is None or ratio is None:
        why = quality.no_figure.partition(";")[0] if quality else "no run was validated"
        return (
            "",
            f" Its time to equal validation loss is not known ({why or 'no step was timed'}).",
        )
    around = f" [{ratio_span(ratio.interval).replace(' to ', ', ')}]" if ratio.interval else ""
    but = f" (never in {quality.missed} of {ratio.n} pairs)" if quality.missed else ""
    return f"reaches {name}'s validation loss in {ratio.value:.2f}{around} of the time{but}", ""


def _gain(variant: Variant) -> float:
    """How much sooner it is at the baseline's loss; per sample, where that is not known."""
    quality = variant.equal_quality
    ratio = quality.time_ratio if quality is not None else None
    return _throughput(variant) if ratio is None else 1 / ratio.value


def _speed(variant: Variant) -> int:
    """1 if it is faster, -1 if it is slower, 0 if neither is shown."""
    ratio = variant.throughput_ratio
    return 0 if ratio is None else {"higher": 1, "lower": -1}.get(judge_ratio(ratio).word, 0)


def _throughput(variant: Variant) -> float:
    return variant.throughput_ratio.value if variant.throughput_ratio else 1.0


def _speed_clause(variant: Variant, than: str = "") -> str:
    """The ratio of samples per second; `than` names the baseline, if the sentence needs it."""
    ratio = variant.throughput_ratio
    if ratio is None:
        return ""
    measured = f"measured {times(ratio.value)} the samples per s"
    if ratio.interval is None:
        if variant.no_time_verdict:
            return f"has no verdict on speed ({measured}; {variant.no_time_verdict})"
        return f"has too few runs to judge speed ({measured}; one seed, so without an interval)"
    size = judge_ratio(ratio)
    interval = f"95 % interval {ratio_span(ratio.interval)}, n={ratio.n}"
    more = "" if size.more_seeds is None else f"; {_would_settle(size.more_seeds)}"
    if size.word == "same":
        return f"trains as fast within {100 * (SAME - 1):.0f} % ({measured}, {interval})"
    if size.word == "open":
        few = "has too few runs to judge speed" if size.is_wide else "leaves speed open"
        return f"{few} ({measured}, {interval}{more})"
    word = "faster" if size.word == "higher" else "slower"
    if size.is_wide:
        than = f" than {than}" if than else ""
        how_much = f"too few runs to estimate by how much ({measured}, {interval}{more})"
        return f"trains {word}{than}, with {how_much}"
    if size.word == "lower":
        # "0.8 times as fast" is hard to read: the time per sample, whose ends change places
        longer = ratio_span(Interval(1 / ratio.interval.high, 1 / ratio.interval.low))
        than = f" of {than}" if than else ""
        return (
            f"takes {times(1 / ratio.value)} the time{than} (per sample, 95 % interval {longer}, "
            f"n={ratio.n})"
        )
    than = f" as {than}" if than else ""
    return f"trains {ratio.value:.2f} times as fast{than} (ratio of samples per s, {interval})"


def _would_settle(seeds: int) -> str:
    return f"about {counted(seeds, 'more seed')} would settle it"


def _memory(variant: Variant) -> float:
    """Peak memory over the baseline's; 1 if it is not known."""
    return variant.memory_ratio or 1.0


def _memory_clause(variant: Variant) -> str:
    ratio = variant.memory_ratio
    if ratio is None:
        return ""
    if abs(ratio - 1) <= SAME_MEMORY:
        return "has the same peak memory"
    if ratio > 1:
        return f"takes {ratio:.2f} times the peak memory"
    return f"takes {100 * (1 - ratio):.0f} % less peak memory"


def advice_lines(comparison: Comparison) -> list[str]:
    """The advice in full, a line for each mode; none without advice."""
    return [] if comparison.advice is None else [plain(line) for line in comparison.advice.lines]


def margin_text(comparison: Comparison) -> str:
    """What difference of the metric does not matter."""
    margin = difference_text(comparison, comparison.margin, signed=False)
    return f"differences of {metric_name(comparison)} within {margin} do not matter"


def terms(comparison: Comparison) -> list[str]:
    """Baseline, margin, data, hardware and code."""
    return [
        f"baseline {plain(comparison.baseline)}; {margin_text(comparison)}",
        f"data: {plain(comparison.data)}",
        f"hardware: {plain(comparison.hardware)}",
        f"code: {plain(comparison.code)}",
    ]


def failures(comparison: Comparison) -> list[str]:
    """The runs that failed, with their errors."""
    return [
        f"{plain(variant.label)}, seed {run.summary.seed}: "
        f"{plain(run.summary.error or 'no reason recorded', 160)}"
        for variant in comparison.variants
        for run in variant.failed
    ]


# The least share of the spread over seeds for which a sentence names a remedy
MUCH = 0.1
LONG = {"fp64": "float64", "fp32": "float32", "tf32": "TF32"}


def quantity_sentences(comparison: Comparison) -> list[str]:
    """`forces: float32 adds 0.02 % of what training leaves open; TF32 adds 41 %: turn it off`."""
    rows: dict[str, list[QuantityVerdict]] = {}
    for row in comparison.quantities:
        rows.setdefault(row.quantity, []).append(row)
    return [f"{plain(name)}: {_added(own)}." for name, own in rows.items()]


def _added(rows: Sequence[QuantityVerdict]) -> str:
    """What the arithmetic of each variant adds to the spread over seeds, and what to take."""
    base, known = rows[0], [row for row in rows if row.added is not None]
    known = [row for row in known if row is not base or row.added] or known
    if not known:
        why = "one seed" if base.seeds < 2 else "the seeds have other samples, or no float64 value"
        return f"what training leaves open is not known ({why})"
    good = [row.precision for row in (base, *known) if (row.added or 0.0) < MUCH]
    mode = next((name for name in ("fp32", *good) if name in good), "")
    texts = []
    for row in known:
        text = f"{LONG.get(row.variant, plain(row.variant))} adds {_share(row.added or 0.0)}"
        if row is known[0]:
            seeds = counted(base.seeds, "seed")
            text += f" of what training leaves open (the spread over {seeds})"
        if mode and row.precision not in good:
            text += (
                f": {'turn it off' if row.precision == 'tf32' else 'too much'} (precision={mode})"
            )
        texts.append(text)
    return "; ".join(texts)


def _share(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 1 else f"{100 * value:.2g} %"


TO_EQUAL = "to equal validation loss"


def _quality_clause(comparison: Comparison, variant: Variant) -> str:
    """What the variant needs to the baseline's validation loss, and what that means for its speed.

    `needs 1.20x the samples and 1.00x the time (95 % interval 0.98 to 1.02, n=5) of fp32 to equal
    validation loss, so its speed buys nothing`; empty without a figure.
    """
    quality = variant.equal_quality
    if quality is None or quality.samples_ratio is None:
        return ""
    name = plain(comparison.baseline)
    needed = f"needs {_ratios(quality, name)} {TO_EQUAL}"
    return f"{needed}{_conclusion(variant)}{_missed(quality, name)}"


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


def _ratios(quality: EqualQuality, name: str) -> str:
    """`1.20x (95 % interval 1.18 to 1.22, n=5) the samples and 1.00x (...) the time of fp32`."""
    figures = ((quality.samples_ratio, "samples"), (quality.time_ratio, "time"))
    texts = [f"{ratio_figure(ratio)} the {of}" for ratio, of in figures if ratio is not None]
    return f"{' and '.join(texts)} of {name}"


def ratio_figure(ratio: Estimate) -> str:
    """`1.20x (95 % interval 1.18 to 1.22, n=5)`."""
    span = ratio_span(ratio.interval)
    around = f"95 % interval {span}, n={ratio.n}" if span else f"n={ratio.n}, without an interval"
    return f"{times(ratio.value)} ({around})"


def _missed(quality: EqualQuality, name: str) -> str:
    if not quality.missed:
        return ""
    assert quality.samples_ratio is not None
    pairs = counted(quality.samples_ratio.n, "pair")
    return (
        f" (in {quality.missed} of {pairs} its best loss stayed more than "
        f"{100 * quality.tolerance:.3g} % above that of {name}: these are compared at the level "
        "that it did reach)"
    )


def _conclusion(variant: Variant) -> str:
    if buys_nothing(variant):
        return ", so its speed buys nothing"
    if is_faster_per_sample(variant) and judge_equal_quality(variant) == "open":
        return ", which leaves open whether its speed buys anything"
    return ""
