"""The runs behind the names on a command line: found, read, and sorted from what is none.

A name is a run's folder, a folder with runs somewhere below (a sweep, `outputs/`), or a glob.
Folders that hold no run, or one that cannot count, are named with the reason and never end a
comparison: the disk of someone who trains has all of them. Only `summary.json` is read here.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mprun.compare.rows import Run, Skipped
from mprun.errors import UsageError, printable
from mprun.records.run_record import Scores, read_summary

SUMMARY = "summary.json"
NOT_SEARCHED = "checkpoints"
OURS = "comparison.json"
"""Lies in a folder that an earlier comparison wrote, which is not worth a word."""


class Found(NamedTuple):
    """Runs that ended by themselves, completed or failed, and what was passed over."""

    runs: tuple[Run, ...]
    skipped: tuple[Skipped, ...]


def expand(name: str) -> list[Path]:
    """The path of this name, else what it matches as a glob, else nothing."""
    if os.path.lexists(name):  # unlike Path.exists not upset by a name that is too long
        return [Path(name)]
    return [Path(p) for p in sorted(_matches(name), key=_natural)]


def _matches(pattern: str) -> list[str]:
    return glob.glob(pattern, recursive=True)  # noqa: PTH207 (takes absolute patterns, too)


def find_runs(paths: Iterable[Path]) -> Found:
    """Every run at or below the paths, in their order; folders by name, numbers by size.

    A folder that is reached twice counts once.
    """
    search = _Search()
    for path in paths:
        if path.name == SUMMARY and not _is_folder(path):
            search.visit(path.parent)
        elif not _is_folder(path):
            search.skip(path, "is no folder")
        elif not search.visit(path):
            search.skip(path, f"holds no run (no {SUMMARY})")
    return Found(tuple(search.runs), tuple(search.skipped))


def latest(runs: Sequence[Run]) -> tuple[list[Run], list[Skipped]]:
    """Of several runs of one variant and seed the one that began last, and the others skipped."""
    kept: dict[tuple[str, str, int], Run] = {}
    skipped = []
    for run in runs:
        summary = run.summary
        key = (summary.variant_hash, summary.execution, summary.seed)
        other = kept.setdefault(key, run)
        if other is not run:
            earlier, kept[key] = sorted((other, run), key=lambda r: r.summary.started_at)
            reason = f"{kept[key].path} is of the same variant and seed, and began later"
            skipped.append(Skipped(earlier.path, reason))
    return list(kept.values()), skipped


def readable(text: str, length: int = 120) -> str:
    """The first line of a record's text, cut to `length`, that cannot steer a terminal."""
    shown = printable(next(iter(text.strip().splitlines()), ""))
    return shown if len(shown) <= length else f"{shown[: length - 3]}..."


class _Search:
    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.skipped: list[Skipped] = []
        self._seen: set[tuple[int, int]] = set()

    def skip(self, path: Path, reason: str) -> None:
        self.skipped.append(Skipped(path, reason))

    def visit(self, folder: Path) -> bool:
        """Take the runs at and below `folder`; whether it could be told what it is."""
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
        elif "metrics.jsonl" in names:
            self.skip(folder, f"a run that ended before it had a {SUMMARY}")
            is_run = True
        searched = (e for e in entries if _is_searched(e.name))
        below = [Path(e.path) for e in searched if _is_folder(e.path)]
        foreign = [path for path in below if not self.visit(path)]
        if is_run:  # a logger's folder in it needs no word
            return True
        if len(foreign) == len(below):
            return OURS in names
        for path in foreign:
            self.skip(path, f"holds no run (no {SUMMARY})")
        return True

    def _read(self, folder: Path) -> None:
        try:
            summary = read_summary(folder)
        except UsageError as error:
            self.skip(folder, str(error).replace(f"{folder / SUMMARY}", SUMMARY, 1))
            return
        if summary.metric.name not in Scores.__annotations__:
            name = readable(summary.metric.name, 40)
            self.skip(folder, f"{SUMMARY} is damaged: metric.name is {name!r}")
        elif summary.status == "running":
            self.skip(folder, "still running, or killed")
        elif summary.status == "interrupted":
            how = readable(summary.error or "no reason given")
            self.skip(folder, f"interrupted ({how}); mprun run.resume={folder} goes on")
        else:
            self.runs.append(Run(folder, summary))


def _is_folder(path: str | Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 (False, not an error, behind a locked folder)


def _is_searched(name: str) -> bool:
    return name != NOT_SEARCHED and not name.startswith(".")


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts run10 behind run9."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"(\d+)", name)]
