"""One decision, for a program: is a change kept? And the error of a whole stream of decisions.

A change is kept if its verdict supports a claim: `unharmed` (equivalent or better) or `better`. Who
tries one change after another, each at 5 %, soon keeps one that changes nothing. LORD++ (Ramdas et
al. 2017) gives decision t a level of its own; with k_1 < k_2 < .. the changes kept so far,

    level_t = 5 % (g(t) + g(t - k_2) + g(t - k_3) + ..),  g(t) = t^-1.3 / zeta(1.3), in sum 1

Until a change is kept the levels sum to 5 % at most. So of any number of changes without the
claimed effect, one is kept with a probability of at most 5 %, however the comparisons depend on
each other. Each kept change after the first pays back 5 %, and the expected share of wrong ones
among those kept stays at 5 %: proved for independent p-values, simulated where comparisons share
the baseline's runs (benchmarks/change_stream.py). The price: few pairs seldom reach a late level.

The package online-fdr has LORD++ with the usual g, whose first levels are a fifth of these, and
imports `scipy.stats`, which takes longer than a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import msgspec
from filelock import FileLock, Timeout
from scipy.special import zeta

from mprun.errors import UsageError
from mprun.records.console.formatting import readable
from mprun.records.files import write_atomic
from mprun.records.reader import MAX_JSON_BYTES, read_bytes
from mprun.study.compare.comparison import Comparison, Interval, Run, Variant
from mprun.study.compare.load import SUMMARY
from mprun.study.compare.notes import check_mixing
from mprun.study.compare.statistics import ALPHA, Sample, difference_p, equivalence_p, half_width

Claim = Literal["unharmed", "better"]
DECAY = 1.3  # Of the levels: 2 leaves little after ten decisions, 1.1 has too little for these
LOCK_TIMEOUT_S = 60.0


def two_sides(
    paths: Sequence[Path], runs: Sequence[Run], mix: Sequence[str]
) -> tuple[Sequence[Run], str | None, Sequence[str]]:
    """The runs, the hash of the baseline (None: by default), and what runs may differ in.

    Of two paths each is a variant with the path in its name, and their code may differ: it may be
    the change. Otherwise variants are those of any comparison. The first path's is the baseline.

    Raises:
        UsageError: the runs in one path differ in something that is not in `mix`.
    """
    if len(paths) == 2:
        one, two = (path.parent if path.name == SUMMARY else path for path in paths)
        in_one = [run.path.is_relative_to(one) for run in runs]
        for side in (True, False):
            check_mixing([run for run, at in zip(runs, in_one, strict=True) if at is side], mix)
        runs = [_named(r, one if at else two) for r, at in zip(runs, in_one, strict=True)]
        mix = [*mix, "code"]
    return runs, runs[0].summary.variant_hash if runs and len(paths) > 1 else None, mix


def _named(run: Run, path: Path) -> Run:
    own = run.summary
    variant, digest = f"{own.variant} ({path})", f"{own.variant_hash} {path}"
    return replace(run, summary=replace(own, variant=variant, variant_hash=digest))


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The line of `compare.json`."""

    schema_version: Literal[1] = 1
    baseline: str
    variant: str
    metric: str
    split: str
    unit: Literal["absolute", "share"]  # Of the next three; share: of the baseline's mean
    margin: float
    difference: float | None  # The mean over pairs, the variant minus the baseline
    interval: Interval | None  # The one that decided
    level: float | None  # Its confidence level, from 0 to 1
    seeds: int  # Pairs of runs
    seeds_to_go: int | None  # About how many more would settle the verdict
    verdict: str
    reason: str
    claim: Claim  # What must be shown to keep the variant
    keep: bool | None  # None: not settled
    p: float | None  # The smallest level at which the variant is kept; None: no test
    step_time_ratio: float | None
    step_time_interval: Interval | None  # None: no verdict on the times
    memory_ratio: float | None
    alpha: float = ALPHA  # The level
    tests: int | None = None  # Its number in the stream
    stream: str | None = None


def decide(comparison: Comparison, claim: Claim) -> Decision:
    """The decision on the one variant beside the baseline.

    Raises:
        UsageError: there is not exactly one.
    """
    base, *others = comparison.variants
    if len(others) != 1:
        names = ", ".join(v.label for v in comparison.variants[:5])
        left_out = "".join(f"; left out: {x.path}: {x.reason}" for x in comparison.skipped[:1])
        raise UsageError(
            f"compare.json decides between two variants, and these runs are of "
            f"{len(comparison.variants)}: {names}; name the folders of two, the baseline's first "
            f"(or compare.baseline=LABEL){left_out}"
        )
    verdict, difference, time = others[0].verdict, others[0].difference, others[0].step_time_ratio
    is_harmless = verdict.word == "equivalent" and claim == "unharmed"
    # Without a difference in figures (the baseline's losses are all 0) no change is kept
    is_open = verdict.word == "inconclusive" or (verdict.word != "worse" and difference is None)
    return Decision(
        baseline=base.label,
        variant=others[0].label,
        metric=comparison.metric,
        split=comparison.split,
        unit="share" if comparison.is_relative else "absolute",
        margin=comparison.margin,
        difference=difference and difference.value,
        interval=difference and verdict.interval,
        level=difference and verdict.level,
        seeds=difference.n if difference else 0,
        seeds_to_go=verdict.more_seeds,
        verdict=verdict.word,
        reason=verdict.reason,
        claim=claim,
        keep=None if is_open else is_harmless or verdict.word == "better",
        p=_p(comparison, others[0], claim),
        step_time_ratio=time and time.value,
        step_time_interval=time and time.interval,
        memory_ratio=others[0].memory_ratio,
    )


def _p(comparison: Comparison, variant: Variant, claim: Claim) -> float | None:
    mean, around, n = variant.difference or (0.0, None, 0)
    if around is None or variant.verdict.level is None:
        return None
    # The spread is not stored: it follows from the half width, which is proportional to it
    sample = Sample(n, mean, (around.high - mean) / half_width(Sample(n, 0.0, 1.0)))
    half = difference_p(sample) / 2
    better = half if (mean > 0) == comparison.higher_is_better else 1 - half
    if claim == "better":
        return better
    return min(equivalence_p(sample, comparison.margin), 2 * better)


class StreamLine(msgspec.Struct, frozen=True):
    """A decision in the file of its stream."""

    time: str
    question: list[str]  # Equal if the same is asked again of the same runs
    wealth: float  # What is left of the error after it
    decision: Decision


def next_level(kept: Sequence[bool | None]) -> float:
    """The level of the next decision of a stream, from 0 to 1, by whether each so far was kept."""
    # The first kept change pays nothing back: all of the error is there from the beginning
    paid = [t for t, keep in enumerate(kept, start=1) if keep][1:]
    return ALPHA * sum(float((len(kept) + 1 - t) ** -DECAY) for t in (0, *paid)) / _SUM


_SUM = float(zeta(DECAY))


def decide_in_stream(
    path: Path, claim: Claim, compared: Callable[[float], Comparison]
) -> tuple[Comparison, Decision]:
    """A decision at the level that its stream leaves it, added to the file.

    The same question about the same runs has the answer it had, and adds no line. Nor does a
    comparison without a test (failed runs, fewer than two pairs): it cannot keep a change.

    `compared` makes the comparison whose tests have a given level.

    Raises:
        UsageError: a line is damaged, or the file cannot be read, locked or written.
    """
    factor = 2 if claim == "better" else 1  # One-sided: `compare` tests a difference two-sided
    with _locked(path):
        data = read_bytes(path, MAX_JSON_BYTES) if path.exists() else b""
        lines = [_line(path, i, x) for i, x in enumerate(data.splitlines(), start=1)]
        kept = [line.decision.keep for line in lines]
        level = next_level(kept)
        comparison = compared(factor * level)
        decision = msgspec.structs.replace(
            decide(comparison, claim), alpha=level, tests=len(lines) + 1, stream=str(path)
        )
        question = _question(comparison, claim)
        for line in lines:
            if line.question == question:
                return compared(factor * line.decision.alpha), line.decision
        if decision.p is not None:
            spent = level + sum(line.decision.alpha for line in lines)
            wealth = ALPHA * max(1, sum(map(bool, [*kept, decision.keep]))) - spent
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            line = StreamLine(now, question, wealth, decision)
            gap = b"" if data.endswith(b"\n") or not data else b"\n"
            write_atomic(path, data + gap + msgspec.json.encode(line) + b"\n")
        return comparison, decision


def _question(comparison: Comparison, claim: Claim) -> list[str]:
    """What is asked of which runs: the end of each run's path, and when it started."""
    runs = [
        readable(f"{side}: {'/'.join(run.path.resolve().parts[-2:])} {run.summary.started_at}")
        for side, v in zip(("baseline", "variant"), comparison.variants, strict=True)
        for run in (*v.runs, *v.failed)
    ]
    return [f"{claim}, {comparison.split}, margin {comparison.margin}", *runs]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Inside, no other process reads or writes the stream."""
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_TIMEOUT_S):
            yield
    except (OSError, NotImplementedError, Timeout) as error:  # the second: no locks there
        raise UsageError(
            f"compare.stream={path} cannot be locked, read or written ({error}); legal is a file "
            "in a folder that you may write; name another one"
        ) from None


def _line(path: Path, number: int, text: bytes) -> StreamLine:
    try:
        return msgspec.json.decode(text, type=StreamLine)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"compare.stream={path}: line {number} is damaged ({error}); the levels follow from "
            "all lines: restore it, or begin a stream in another file"
        ) from None
