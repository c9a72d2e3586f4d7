"""The runs behind the names on a command line, by variant, and their scores.

A name is a run's folder, a folder with runs somewhere below (a sweep, `outputs/`), or a glob. A
folder without a usable run never ends a comparison: it is reported with the reason, because the
disk of someone who trains has many. Only `summary.json` is read here, and configurations where two
variants have the same label.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from mprun.errors import UsageError
from mprun.records.console.formatting import readable
from mprun.records.listing import NOT_SEARCHED
from mprun.records.run_config import (
    UnreadableConfigError,
    config_fields,
    read_config,
    variant_config,
)
from mprun.records.run_record import Scores, Summary, is_failed_by_machine, read_summary
from mprun.study.compare.comparison import Run, Skipped

SUMMARY = "summary.json"
# A file of an earlier comparison; a folder with it is not reported as skipped
REPORT = "comparison.json"


class LoadedRuns(NamedTuple):
    """Runs that ended, completed or failed, and the folders left out."""

    runs: tuple[Run, ...]
    skipped: tuple[Skipped, ...]


def expand(name: str) -> list[Path]:
    """The path of this name, else what it matches as a glob, else nothing."""
    if os.path.lexists(name):  # Path.exists raises for a name that is too long
        return [Path(name)]
    matches = glob.glob(name, recursive=True)  # noqa: PTH207 (takes absolute patterns, too)
    return [Path(p) for p in sorted(matches, key=_natural)]


def find_runs(paths: Iterable[Path]) -> LoadedRuns:
    """Every run at or below the paths, in their order; folders by name, numbers by size.

    A folder that is reached twice counts once.
    """
    search = _FolderSearch()
    for path in paths:
        if path.name == SUMMARY and not _is_folder(path):
            search.visit(path.parent)
        elif not _is_folder(path):
            search.skip(path, "is not a folder")
        elif not search.visit(path):
            search.skip(path, f"contains no run (no {SUMMARY})")
    return LoadedRuns(tuple(search.runs), tuple(search.skipped))


def others_in(study: Path, runs: Iterable[Run]) -> list[Run]:
    """The runs of a study besides these, whatever became of them."""
    known = {run.path.resolve() for run in runs}  # the user may have named them by a link
    others = []
    for path in sorted(study.glob(f"*/{SUMMARY}")):
        if path.parent.resolve() not in known:
            with contextlib.suppress(UsageError):  # a damaged record of a run that is not compared
                others.append(Run(path.parent, read_summary(path.parent)))
    return others


def latest(runs: Sequence[Run]) -> tuple[list[Run], list[Skipped]]:
    """The last run of each variant and seed, and the earlier ones as skipped."""
    last: dict[tuple[str, str, int], Run] = {}
    skipped = []
    for run in runs:
        summary = run.summary
        key = (summary.variant_hash, summary.execution, summary.seed)
        other = last.setdefault(key, run)
        if other is not run:
            # ISO times of one zone (UTC) sort as text
            earlier, last[key] = sorted((other, run), key=lambda r: r.summary.started_at)
            reason = f"{last[key].path} has the same variant and seed, and began later"
            skipped.append(Skipped(earlier.path, reason))
    return list(last.values()), skipped


class _FolderSearch:
    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.skipped: list[Skipped] = []
        self._seen: set[tuple[int, int]] = set()

    def skip(self, path: Path, reason: str) -> None:
        self.skipped.append(Skipped(path, reason))

    def visit(self, folder: Path) -> bool:
        """Take the runs at and below `folder`; False if the caller has to report it as empty."""
        try:
            status = folder.stat()
            entries = sorted(os.scandir(folder), key=lambda e: _natural(e.name))
        except OSError as error:
            self.skip(folder, f"cannot be read ({error.strerror})")
            return True
        if (status.st_dev, status.st_ino) in self._seen:  # named twice, or a loop of links
            return True
        self._seen.add((status.st_dev, status.st_ino))
        names = {entry.name for entry in entries}
        is_run = SUMMARY in names
        if is_run:
            self._read(folder)
        elif "metrics.jsonl" in names:  # written from the first step on
            self.skip(folder, f"a run that ended before it had a {SUMMARY}")
            is_run = True
        below = [
            Path(e.path)
            for e in entries
            if e.name not in NOT_SEARCHED and not e.name.startswith(".") and _is_folder(e.path)
        ]
        foreign = [path for path in below if not self.visit(path)]  # folders without any run
        if is_run:  # folders inside a run, a logger's for example, are not reported
            return True
        if len(foreign) == len(below):  # the caller reports this folder, once, not each one below
            return REPORT in names
        for path in foreign:
            self.skip(path, f"contains no run (no {SUMMARY})")
        return True

    def _read(self, folder: Path) -> None:
        try:
            summary = read_summary(folder)
        except UsageError as error:
            self.skip(folder, str(error).replace(f"{folder / SUMMARY}", SUMMARY, 1))
            return
        scored = summary.metric.name in ("loss", "accuracy", *summary.metrics)
        if summary.status == "completed" and not (scored or summary.observed):
            name = readable(summary.metric.name, 40)
            self.skip(folder, f"{SUMMARY} is damaged: metric.name is {name!r}")
        elif summary.status == "running":
            self.skip(folder, "still running, or killed")
        elif summary.status == "interrupted" or is_failed_by_machine(summary):
            how = "interrupted" if summary.status == "interrupted" else "ended by the machine"
            reason = f"{how} ({readable(summary.error or 'no reason given')})"
            resume = f"; mprun run.resume={folder} resumes it"
            where = " in a loop that mprun observed" if summary.observed else resume
            self.skip(folder, reason + where)
        else:
            self.runs.append(Run(folder, summary))


def _is_folder(path: str | Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 (False, not an error, behind a locked folder)


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts run10 behind run9."""
    # -1: text sorts before numbers, and a pair of one kind compares only with its like
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", name)]


# ---- by variant ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunGroup:
    """The runs of a variant."""

    label: str
    completed: tuple[Run, ...]  # By seed
    failed: tuple[Run, ...] = field(default=())

    @property
    def first(self) -> Run:
        """A run, for the fields that all have in common."""
        return (self.completed or self.failed)[0]

    @property
    def is_native(self) -> bool:
        """Whether times and memory are the hardware's."""
        return self.first.summary.execution == "native"

    @property
    def seeds(self) -> set[int]:
        """Those of all its runs, failed ones too."""
        return {run.summary.seed for run in (*self.completed, *self.failed)}

    def of(self, seeds: Collection[int]) -> RunGroup:
        """The runs with these seeds."""
        kept = (
            tuple(run for run in runs if run.summary.seed in seeds)
            for runs in (self.completed, self.failed)
        )
        return RunGroup(self.label, *kept)

    @cached_property
    def by_seed(self) -> dict[int, Summary]:
        """The completed runs' summaries."""
        return {run.summary.seed: run.summary for run in self.completed}


MAX_FIELDS = 3  # How many fields a label names
MAX_VALUE = 24  # Characters of a value in a label


def by_variant(runs: Sequence[Run]) -> list[RunGroup]:
    """Runs by variant, in the order of each variant's first run."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        # The hash is of the configuration, where `execution` may be "auto": machines choose
        groups.setdefault((run.summary.variant_hash, run.summary.execution), []).append(run)
    members = [sorted(group, key=lambda run: run.summary.seed) for group in groups.values()]
    names = [readable(group[0].summary.variant, 60) for group in members]
    if len({run.summary.recipe for run in runs}) > 1:
        recipes = (readable(group[0].summary.recipe, 60) for group in members)
        names = [f"{recipe} {name}" for recipe, name in zip(recipes, names, strict=True)]
    labels = distinguish(
        names,
        [group[0].summary.execution for group in members],
        [group[0].path for group in members],
    )
    return [
        RunGroup(
            label,
            tuple(run for run in group if has_result(run.summary)),
            tuple(run for run in group if not has_result(run.summary)),
        )
        for label, group in zip(labels, members, strict=True)
    ]


def distinguish(
    names: Sequence[str], executions: Sequence[str], folders: Sequence[Path]
) -> list[str]:
    """A label for each variant, no two alike; config.yaml is read where names are equal."""
    labels = list(names)
    # Of two learning rates, `bf16_mixed` becomes `bf16_mixed (train.lr=0.001)`, and so on
    for name in {x for x in names if names.count(x) > 1}:
        equal = [i for i, x in enumerate(names) if x == name]
        details = _differing([_fields(folders[i], executions[i]) for i in equal])
        for i, detail in zip(equal, details, strict=True):
            labels[i] = f"{name} ({detail})" if detail else name
    taken: set[str] = set()
    for i, label in enumerate(labels):
        number = 1
        while labels[i] in taken:  # its configuration cannot be read, or differs in more fields
            number += 1
            labels[i] = f"{label} #{number}"
        taken.add(labels[i])
    return labels


def _fields(folder: Path, execution: str) -> dict[str, str]:
    """The run's execution and the fields of its configuration that make a variant."""
    try:
        fields = config_fields(variant_config(read_config(folder)))
    except (UnreadableConfigError, ValueError, TypeError, AttributeError):
        fields = {}  # a number makes the label unique
    return {**fields, "execution": execution}  # the file may say "auto"


def _differing(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """`train.lr=0.002, batch.factor=2` for each row: the fields that are not the same in all."""
    differing = differing_keys(rows)
    more = f", {len(differing) - MAX_FIELDS} more" if len(differing) > MAX_FIELDS else ""
    return [
        ", ".join(f"{k}={readable(row[k], MAX_VALUE)}" for k in differing[:MAX_FIELDS] if k in row)
        + more
        for row in rows
    ]


def differing_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all rows, in the order of the rows."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if len({row.get(key) for row in rows}) > 1]


def hardware(summary: Summary) -> dict[str, Any]:
    """The hardware and threads that step times depend on."""
    row = summary.hardware
    names = {"device": row.device, "name": row.name, "cores": row.cores}
    return {**names, "threads": summary.backend.threads}


# ---- scores --------------------------------------------------------------------------------------

SPLITS = ("test", "validation", "train")  # The first that a run has is the one it is judged by


def score(summary: Summary, split: str, averaged: bool = False) -> float | None:
    """The metric over a split at the run's end, or of averaged weights; None if it has none."""
    last = summary.history[-1] if summary.history else None
    trained = Scores(loss=summary.train.loss, accuracy=None)  # loops without epochs have no history
    rows: dict[str, Scores | None] = {
        "test": summary.test,
        "validation": last.validation if last else None,
        "train": last.train if last else trained,
    }
    if averaged:
        rows = {"test": None, "validation": None, "train": None}
        if (mean := summary.averaged) is not None:
            rows |= {"test": mean.test, "validation": mean.validation}
    scores = rows[split]
    value = None if scores is None else scores.value(summary.metric.name)
    return None if value is None else float(value)


def is_partial(summary: Summary, split: str) -> bool:
    """Whether a time limit left a part of the split out of the metric."""
    last = summary.history[-1].validation if summary.history else None
    scores = {"test": summary.test, "validation": last}.get(split)
    return scores is not None and scores.samples is not None


def has_result(summary: Summary) -> bool:
    """Whether a run completed with a metric; without one, every step was skipped.

    An observed loop need not log any.
    """
    has_metric = any(score(summary, split) is not None for split in SPLITS)
    return summary.status == "completed" and (has_metric or summary.observed)


def scores(group: RunGroup, split: str, averaged: bool = False) -> dict[int, float]:
    """Seed to metric, NaN and infinities included, without the seeds that have no metric."""
    values = {seed: score(summary, split, averaged) for seed, summary in group.by_seed.items()}
    return {seed: value for seed, value in values.items() if value is not None}
