"""The conditions that the runs of a comparison share: recipe, data, hardware and code.

A difference between two variants is an effect of precision only if all else is equal. Runs may
differ in these four if the user allows it; a note then reports how they differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

from mprun.compare.comparison import Run
from mprun.console.formatting import counted, readable
from mprun.errors import UsageError
from mprun.records.run_record import Summary

MAX_KINDS = 4
"""How many kinds of one thing a message lists."""


def hardware(summary: Summary) -> dict[str, Any]:
    """The hardware and threads that step times depend on."""
    row = summary.hardware
    names = {"device": row.device, "name": row.name, "cores": row.cores}
    return {**names, "threads": summary.backend.threads}


def _code(summary: Summary) -> dict[str, Any]:
    own = {"mprun": summary.mprun_version, "commit": summary.git_commit}
    return {**own, **summary.versions}


ASPECTS: dict[str, Callable[[Summary], dict[str, Any]]] = {
    "recipes": lambda summary: {"recipe": summary.recipe},
    "data": lambda summary: asdict(summary.data),
    "hardware": hardware,
    "code": _code,
}


def check_mixing(runs: Sequence[Run], mix: Collection[str]) -> list[str]:
    """Notes on permitted differences.

    Args:
        runs: every run that counts.
        mix: names of `ASPECTS` in which they may differ.

    Raises:
        UsageError: they differ in something else.
    """
    _check_metric(runs)
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


def _check_metric(runs: Sequence[Run]) -> None:
    """Refuse runs with different metrics, whatever `mix` allows."""
    kinds = Counter(readable(run.summary.metric.name, 40) for run in runs)
    directions = {run.summary.metric.higher_is_better for run in runs}
    if len(kinds) > 1 or len(directions) > 1:
        text = ", ".join(f"{name} in {counted(n)}" for name, n in kinds.items())
        raise UsageError(f"the runs are judged by different metrics ({text}): name fewer folders")


def _difference(runs: Sequence[Run], aspect: Callable[[Summary], dict[str, Any]]) -> str:
    """`threads=1 in 3 runs; threads=2 in 2 runs`; empty if all are of one kind."""
    rows = [aspect(run.summary) for run in runs]
    keys = dict.fromkeys(key for row in rows for key in row)
    differing = [key for key in keys if len({row.get(key) for row in rows}) > 1]
    kinds = Counter(", ".join(f"{k}={row.get(k)}" for k in differing) for row in rows)
    if len(kinds) < 2:
        return ""
    listed = [f"{readable(kind)} in {counted(n)}" for kind, n in kinds.most_common(MAX_KINDS)]
    more = len(kinds) - len(listed)
    return "; ".join(listed) + (f"; and {more} more kinds" if more else "")


def recipe_text(runs: Sequence[Run]) -> str:
    """The recipe's name."""
    return _each(runs, lambda s: s.recipe)


def data_text(runs: Sequence[Run]) -> str:
    """Name and source: `mnist (local)`."""
    return _each(runs, lambda s: f"{s.data.name} ({s.data.source})")


def hardware_text(runs: Sequence[Run]) -> str:
    """Device, name, cores and threads."""

    def text(summary: Summary) -> str:
        row, threads = summary.hardware, summary.backend.threads
        counts = f"{counted(row.cores, 'core')}, {counted(threads, 'thread')}"
        return f"{row.device}, {row.name}, {counts}"

    return _each(runs, text)


def code_text(runs: Sequence[Run]) -> str:
    """Versions and commit."""
    return _each(runs, _versions)


def _versions(summary: Summary) -> str:
    commit, dirty, _ = (summary.git_commit or "").partition("-dirty")
    own = f"mprun {summary.mprun_version}" + (f" ({commit[:12]}{dirty})" if commit else "")
    versions = summary.versions
    return ", ".join([own, *(f"{k} {versions[k]}" for k in ("torch", "python") if k in versions)])


def _each(runs: Sequence[Run], text: Callable[[Summary], str]) -> str:
    return " / ".join(dict.fromkeys(readable(text(run.summary)) for run in runs))
