"""What a reader of a comparison must know beside its figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mprun.compare import measures, substitutions
from mprun.compare.digits import counted
from mprun.compare.interleaving import NOT_INTERLEAVED, OVERLAPPED, UNKNOWN
from mprun.compare.measures import Group
from mprun.compare.rows import Variant


def notes(groups: Sequence[Group], split: str, by_default: bool, tested: int) -> Iterator[str]:
    """Sentences, the weightiest first.

    Args:
        groups: the variants, the baseline first.
        split: whose samples the metric is of.
        by_default: whether the baseline was chosen here.
        tested: how many variants had tests, which were adjusted together.
    """
    base, *others = groups
    summaries = [summary for group in groups for summary in group.by_seed.values()]
    if any(summary.data.source == "generated" for summary in summaries):
        yield "generated data: accuracies say nothing of real data"
    if by_default:
        yield f"baseline: {base.label}, by default; compare.baseline=LABEL takes another"
    if split == "train":
        yield "the metric is of the training samples: it says nothing of new ones"
    missing = sum(measures.score(summary, split) is None for summary in summaries)
    if missing:
        yield f"{missing} of {len(summaries)} runs have no {split} metric and are not judged"
    yield from _seeds(base, others, split)
    if tested > 1:
        yield (
            f"verdicts: Holm over {tested} variants; each interval of a difference is the one that "
            "decided, at the level behind it"
        )
    emulated = [group.label for group in groups if not group.is_native]
    if emulated:
        yield f"emulated, so no gain in time or memory can be told: {', '.join(emulated)}"
    for group in groups:
        if label := substitutions.label(group.by_seed.values()):
            yield (
                f"{group.label}: {label}, for want of a float16 kernel on this machine: its time "
                "is what the mode takes here, not what float16 arithmetic takes, and no gain"
            )
    if any((summary.git_commit or "").endswith("-dirty") for summary in summaries):
        yield "the code had changes that were not committed; runs may differ in them unseen"


REMEDIES = {
    NOT_INTERLEAVED: "a drift of the machine is part of the ratios and does not spread them: run "
    "mprun sweep, or mprun -m with the seed listed first",
    OVERLAPPED: "they slowed each other: run them one after the other",
    UNKNOWN: "a drift of the machine cannot be told from the modes",
}
"""Why nothing is concluded from times, and what helps."""

COLLAPSE = 0.1
"""The share of seeds in the example of what few seeds do not see."""


def notes_of(variants: Sequence[Variant]) -> Iterator[str]:
    """What the rows of a table do not tell by themselves."""
    for reason, remedy in REMEDIES.items():
        labels = [v.label for v in variants if v.no_time_verdict == reason]
        if labels:
            yield f"no verdict on the times of {', '.join(labels)}: {reason}; {remedy}"
    kept = [v.difference.n for v in variants if v.difference and v.verdict.word in KEEPS]
    if kept:
        unseen = (1 - COLLAPSE) ** min(kept)
        yield (
            f"{min(kept)} seeds do not see what happens on few: a mode that collapses on 1 seed in "
            f"{1 / COLLAPSE:.0f} shows no collapse here with probability {100 * unseen:.0f} %"
        )


KEEPS = ("equivalent", "better")


def _seeds(base: Group, others: Sequence[Group], split: str) -> Iterator[str]:
    """Where pairs are fewer than runs."""
    theirs = measures.scores(base, split)
    diverged = sum(not math.isfinite(value) for value in theirs.values())
    if diverged:
        yield f"{base.label}: {counted(diverged)} without a finite metric, in seeds left out"
    for group in others:
        ours = measures.scores(group, split)
        common = len(ours.keys() & theirs.keys())
        if ours and common < max(len(ours), len(theirs)):
            yield (
                f"{group.label}: differences and ratios are of the {common} seeds in common "
                f"(of its {len(ours)} and the baseline's {len(theirs)})"
            )
