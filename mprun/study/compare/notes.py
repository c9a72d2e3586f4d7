"""What the runs of a comparison share, where they may differ, and the caveats below its figures.

A difference between two variants is an effect of precision only if all else is equal. Runs may
differ in recipe, data, hardware and code if the user allows it; a note then reports how.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mprun.errors import UsageError
from mprun.records.console.formatting import (
    by_reason,
    counted,
    listed,
    readable,
    substitution_label,
)
from mprun.records.run_record import Summary
from mprun.study.compare.comparison import KEEPS, Run, Variant
from mprun.study.compare.equal_quality import is_faster_per_sample
from mprun.study.compare.load import RunGroup, differing_keys, hardware, is_partial, score, scores
from mprun.study.compare.looks import PlannedLooks
from mprun.study.compare.statistics import ALPHA
from mprun.study.compare.times import NOT_INTERLEAVED, OVERLAPPED, TWO_KINDS, TWO_MACHINES, UNKNOWN

# ---- what runs share -----------------------------------------------------------------------------

MAX_KINDS = 4  # How many kinds of one thing a message lists


ASPECTS: dict[str, Callable[[Summary], dict[str, Any]]] = {
    "recipes": lambda summary: {"recipe": summary.recipe},
    "data": lambda summary: asdict(summary.data),
    "hardware": hardware,
    "code": lambda summary: {
        "mprun": summary.mprun_version,
        "commit": summary.git_commit,
        **summary.versions,
    },
}


def check_mixing(runs: Sequence[Run], mix: Collection[str]) -> list[str]:
    """Notes on the permitted differences; a UsageError where runs differ in anything else."""
    # Whatever `mix` allows: different metrics have no difference
    kinds = Counter(readable(run.summary.metric.name, 40) for run in runs)
    if len({run.summary.metric.higher_is_better for run in runs}) > 1 or len(kinds) > 1:
        text = ", ".join(f"{name} in {counted(n)}" for name, n in kinds.items())
        raise UsageError(f"the runs are judged by different metrics ({text}): name fewer folders")
    differing = {
        name: text for name, aspect in ASPECTS.items() if (text := _difference(runs, aspect))
    }
    refused = {name: text for name, text in differing.items() if name not in mix}
    if refused:
        differences = "; ".join(f"in {name} ({text})" for name, text in refused.items())
        allowed = ",".join(name for name in ASPECTS if name in refused or name in mix)
        raise UsageError(
            f"the runs differ {differences}: name fewer folders, or allow it with "
            f"compare.mix=[{allowed}]"
        )
    return [f"mixed {name}: {text}" for name, text in differing.items()]


def _difference(runs: Sequence[Run], aspect: Callable[[Summary], dict[str, Any]]) -> str:
    """`threads=1 in 3 runs; threads=2 in 2 runs`; empty if all are of one kind."""
    rows = [aspect(run.summary) for run in runs]
    differing = differing_keys(rows)
    kinds = Counter(", ".join(f"{k}={row.get(k)}" for k in differing) for row in rows)
    if len(kinds) < 2:
        return ""
    listed = [f"{readable(kind)} in {counted(n)}" for kind, n in kinds.most_common(MAX_KINDS)]
    more = len(kinds) - len(listed)
    return "; ".join(listed) + (f"; and {more} more kinds" if more else "")


def common_texts(runs: Sequence[Run]) -> dict[str, str]:
    """Recipe, data, hardware and code of runs: `mnist (local)`; several are joined."""
    texts: dict[str, Callable[[Summary], str]] = {
        "recipe": lambda s: s.recipe,
        "data": lambda s: f"{s.data.name} ({s.data.source})",
        "hardware": lambda s: (
            f"{s.hardware.device}, {s.hardware.name}, {counted(s.hardware.cores, 'core')}, "
            f"{counted(s.backend.threads, 'thread')}"
        ),
        "code": _versions,
    }
    return {
        name: " / ".join(dict.fromkeys(readable(text(run.summary)) for run in runs))
        for name, text in texts.items()
    }


def _versions(summary: Summary) -> str:
    # 12 digits of a commit are enough to find it; `-dirty` marks uncommitted changes
    commit, dirty, _ = (summary.git_commit or "").partition("-dirty")
    own = f"mprun {summary.mprun_version}" + (f" ({commit[:12]}{dirty})" if commit else "")
    versions = summary.versions
    return ", ".join([own, *(f"{k} {versions[k]}" for k in ("torch", "python") if k in versions)])


# ---- caveats ------------------------------------------------------------------------------------

BASELINE, ADJUSTED, EMULATED = "baseline", "verdicts: Holm", "emulated"
LOOKS = "looks"
SUBSTITUTED = "this machine has no float16 kernel"
# Beginnings of notes; see `is_in_table`
OF_TABLE = (BASELINE, ADJUSTED, LOOKS, EMULATED, SUBSTITUTED)


def is_in_table(note: str) -> bool:
    """Whether the rows of a short table show what a note says."""
    return note.startswith(OF_TABLE)


def comparison_notes(
    groups: Sequence[RunGroup],
    split: str,
    by_default: bool,
    tested: int,
    averaged: bool = False,
    looks: PlannedLooks | None = None,
) -> Iterator[str]:
    """Sentences on the runs, the most important first; `tested` variants are adjusted together."""
    base, *others = groups
    summaries = [summary for group in groups for summary in group.by_seed.values()]
    if any(summary.data.source == "generated" for summary in summaries):
        yield "generated data: accuracies do not carry over to real data"
    yield from _changed_recipes(summaries)
    if by_default:
        yield f"{BASELINE}: {base.label}, by default; compare.baseline=LABEL takes another"
    if split == "train":
        yield "the metric is of the training samples: new samples may give another result"
        yield from _last_parts(summaries)
    yield from _incomplete(summaries, split)
    lacking = sum(summary.averaged is None for summary in summaries)
    if not averaged and 0 < lacking < len(summaries):
        yield f"the last weights are judged: {lacking} of {len(summaries)} runs averaged none"
    yield from _seeds(base, () if looks else others, split, averaged)
    if looks is not None:
        places = listed([str(look.pairs) for look in looks.looks], len(looks.looks))
        yield (
            f"{LOOKS} after {places} seeds, planned before the first run: a mode that was settled, "
            f"or hopeless, has no more runs; the error of all looks together is {100 * ALPHA:.0f} %"
        )
    if tested > 1:
        yield (
            f"{ADJUSTED} over {tested} variants; each interval of a difference is the one that "
            "decided, with its level"
        )
    emulated = [group.label for group in groups if not group.is_native]
    if emulated:
        yield f"{EMULATED}, so no gain in time or memory is claimed: {', '.join(emulated)}"
    # A CPU without float16 kernels computes these ops in float32, and casts
    labels = {group.label: substitution_label(group.by_seed.values()) for group in groups}
    for label, names in by_reason({k: v for k, v in labels.items() if v}).items():
        yield (
            f"{SUBSTITUTED}, so {label}: {', '.join(names)}; the times are those of the modes "
            "here, not those of float16 arithmetic, so no gain is claimed"
        )
    if any((summary.git_commit or "").endswith("-dirty") for summary in summaries):
        yield "the code had uncommitted changes: runs may differ in them"


def _changed_recipes(summaries: Sequence[Summary]) -> Iterator[str]:
    """A sentence for each recipe whose runs were trained with different files."""
    for name in dict.fromkeys(summary.recipe for summary in summaries):
        files = Counter(s.recipe_sha256 for s in summaries if s.recipe == name)
        if len(files) > 1:
            kinds = "; ".join(
                f"{sha256[:12] if sha256 else 'no file'} in {counted(n)}"
                for sha256, n in files.most_common(MAX_KINDS)
            )
            yield (
                f"the file of recipe {readable(name)} was changed between the runs (SHA-256 "
                f"{readable(kinds)}): a difference may be the recipe's, not the precision's"
            )


def _last_parts(summaries: Sequence[Summary]) -> Iterator[str]:
    """A sentence on which steps a training metric is of, in loops without validation."""
    parts = {(s.train.last_steps, s.steps) for s in summaries if s.train.last_steps}
    if len(parts) == 1:
        [(last, steps)] = parts
        yield f"the training metric is the mean of the last {last} of {steps} steps"
    elif parts:
        # Runs of several lengths: the rule in place of figures
        yield "the training metric is the mean of the last tenth of the steps, at least 20"


# Why times allow no conclusion, to the remedy or the consequence
REMEDIES = {
    NOT_INTERLEAVED: "a drift of the machine changes the ratios without spreading them: run "
    "mprun sweep, or mprun -m with the seed listed first",
    OVERLAPPED: "they slowed each other: run them one after the other, with one process for each "
    "machine",
    TWO_MACHINES: "equal machines differ by some percent: mprun sweep with one process for each "
    "machine keeps the runs of a seed on one",
    TWO_KINDS: "run both variants on one machine",
    UNKNOWN: "a drift of the machine cannot be separated from the modes",
}

UNEVEN = 1.05  # Two ratios of the same times that differ by less need no explanation
COLLAPSE = 0.1  # The share of seeds that collapse, in the example of a failure that few seeds miss


def artefact_warnings(variants: Sequence[Variant]) -> Iterator[str]:
    """A sentence on each artefact, with the remedy."""
    for v in variants:
        for artefact in v.artefacts:
            yield f"no verdict on the times of {v.label}: {artefact.text}: {artefact.remedy}"


def variant_notes(variants: Sequence[Variant]) -> Iterator[str]:
    """Sentences on the table's rows."""
    for reason, remedy in REMEDIES.items():
        labels = [v.label for v in variants if v.no_time_verdict == reason]
        if labels:
            yield f"no verdict on the times of {', '.join(labels)}: {reason}; {remedy}"
    for untimed, labels in by_reason({v.label: v.untimed for v in variants if v.untimed}).items():
        yield f"the times of {', '.join(labels)} are without {untimed}"
    yield from _uneven_times(variants)
    yield from _unknown_quality(variants)
    pairs = [v.difference.n for v in variants if v.difference and v.verdict.word in KEEPS]
    if pairs:
        missed = (1 - COLLAPSE) ** min(pairs)  # no seed collapses: seeds are independent
        yield (
            f"{min(pairs)} seeds can miss a rare failure: a failure on 1 seed in "
            f"{1 / COLLAPSE:.0f} is missed with probability {100 * missed:.0f} %"
        )


def _uneven_times(variants: Sequence[Variant]) -> Iterator[str]:
    """A sentence where the medians that the table shows have another ratio than the pairs."""
    for v in variants[1:]:
        mean, own, other = v.step_time_ratio, v.step_time_ms, variants[0].step_time_ms
        if v.execution == "native" and mean and own and other and other.median:
            medians = own.median / other.median
            if not 1 / UNEVEN <= mean.value / medians <= UNEVEN:
                yield (
                    f"{v.label}: its time ratio, {mean.value:.2f}, is the mean over {mean.n} pairs "
                    f"of equal seed; the medians of all runs ({own.median:.3g} and "
                    f"{other.median:.3g} ms) have the ratio {medians:.2f}: some runs were slower "
                    "than the others"
                )


def _unknown_quality(variants: Sequence[Variant]) -> Iterator[str]:
    """A sentence for each reason why the time to equal quality of faster variants is not known."""
    reasons = {
        v.label: v.equal_quality.no_figure
        for v in variants
        if v.equal_quality and v.equal_quality.no_figure and is_faster_per_sample(v)
    }
    for reason, labels in by_reason(reasons).items():
        yield f"time to equal validation loss of {', '.join(labels)}: {reason}"


def _incomplete(summaries: Sequence[Summary], split: str) -> Iterator[str]:
    missing = sum(score(summary, split) is None for summary in summaries)
    if missing:
        yield f"{missing} of {len(summaries)} runs have no {split} metric and are not judged"
    partial = sum(is_partial(summary, split) for summary in summaries)
    if partial:
        yield (
            f"{partial} of {len(summaries)} runs have a PARTIAL {split} metric: train.max_time_s "
            "left time for a part of the samples only, so other runs are judged on other samples"
        )


def _seeds(base: RunGroup, others: Sequence[RunGroup], split: str, averaged: bool) -> Iterator[str]:
    theirs = scores(base, split, averaged)
    diverged = sum(not math.isfinite(value) for value in theirs.values())
    if diverged:
        yield f"{base.label}: {counted(diverged)} without a finite metric; these seeds are left out"
    for group in others:
        ours = scores(group, split, averaged)
        common = len(ours.keys() & theirs.keys())
        if ours and common < max(len(ours), len(theirs)):
            yield (
                f"{group.label}: differences and ratios are of the {common} seeds in common "
                f"(of its {len(ours)} and the baseline's {len(theirs)})"
            )
