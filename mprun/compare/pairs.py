"""A variant beside the baseline, seed by seed: what its verdict will rest on."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from statistics import fmean
from typing import NamedTuple

from mprun.compare import measures
from mprun.compare.digits import counted
from mprun.compare.load import readable
from mprun.compare.measures import Group
from mprun.compare.rows import Run
from mprun.compare.statistics import summarise
from mprun.compare.verdicts import Evidence

NOTHING = 1e-45
"""Less than any float32 loss but 0: differences cannot be shares of it."""


class Setting(NamedTuple):
    """What the pairs of one comparison have in common."""

    split: str
    metric: str
    margin: float
    is_relative: bool
    """Whether differences are shares of the baseline's mean."""
    resolution: float
    """The step in which the metric is known."""


def pair(group: Group, base: Group, setting: Setting) -> Evidence:
    """The evidence on a variant: its paired differences, and failures that outweigh them."""
    ours, theirs = (measures.scores(g, setting.split) for g in (group, base))
    lost = [run.summary.seed for run in base.failed]
    reasons = (failures(group, lost), _divergence(group, ours, theirs, setting.metric))
    return evidence(ours, theirs, setting, "; ".join(filter(None, reasons)))


def evidence(
    ours: Mapping[int, float], theirs: Mapping[int, float], setting: Setting, failure: str = ""
) -> Evidence:
    """The differences of the pairs in which both metrics are finite.

    Args:
        ours: seed to the variant's metric.
        theirs: seed to the baseline's.
        setting: what the pairs have in common.
        failure: why the variant is worse whatever the differences; empty if it is not.
    """
    seeds = [s for s in sorted(ours.keys() & theirs.keys()) if math.isfinite(ours[s] + theirs[s])]
    if not seeds:
        return Evidence(None, setting.margin, "", failure)
    differences = [ours[s] - theirs[s] for s in seeds]
    if not setting.is_relative:
        sample = summarise(differences, setting.resolution)
        return Evidence(sample, setting.margin, "points", failure)
    mean = abs(fmean(theirs[s] for s in seeds))
    if mean >= NOTHING:
        differences = [d / mean for d in differences]
    elif any(differences):  # no share of nothing can be given, only whether they differ
        return Evidence(summarise(differences), 0.0, "", failure)
    return Evidence(summarise(differences), setting.margin, "%", failure)


def failures(group: Group, excused: Collection[int] = ()) -> str:
    """`2 of 5 runs failed: <why the first did>`; empty where none did.

    Args:
        group: the variant.
        excused: seeds with which the baseline failed as well, so that nothing is said by it.
    """
    failed = [run for run in group.failed if run.summary.seed not in excused]
    return f"{len(failed)} of {_runs(group)} failed: {error_text(failed[0])}" if failed else ""


def error_text(run: Run) -> str:
    """Why a run failed."""
    if run.summary.status == "completed":
        return "it has no metric: no step was taken"
    return readable(run.summary.error or "no reason given")


def _divergence(
    group: Group, ours: Mapping[int, float], theirs: Mapping[int, float], metric: str
) -> str:
    """`1 of 5 runs ended with loss nan`, the baseline's having not; else empty."""
    found = [
        value
        for seed, value in ours.items()
        if not math.isfinite(value) and math.isfinite(theirs.get(seed, 0.0))
    ]
    return f"{len(found)} of {_runs(group)} ended with {metric} {found[0]}" if found else ""


def _runs(group: Group) -> str:
    return counted(len(group.completed) + len(group.failed))
