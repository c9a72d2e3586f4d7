"""`mprun ls`: the runs and studies below a folder, newest first.

    mprun ls                      (below outputs/)
    mprun ls outputs/DATE/TIME    (the runs of a study)
    mprun ls ls.sort=metric ls.limit=100

A study is one row. `last` names the newest where a command takes a run: mprun show last, mprun
run.resume=last, mprun export last FILE; the newest study: mprun compare last, mprun sweep
run.resume=last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import Annotated, Any

from mprun.cli.arguments import Command, parse_arguments
from mprun.errors import EXIT_OK, UsageError
from mprun.records.console.fitted_table import FittedTable, TableColumn, figure_column, text_column
from mprun.records.console.formatting import readable
from mprun.records.listing import OUTPUTS, ListedRecord, listed
from mprun.records.policy_columns import Count, Legal
from mprun.records.result import Result, show


@dataclass
class LsSettings:
    """What `mprun ls` lists."""

    sort: Annotated[str, Legal("when", "recipe", "mode", "metric", "status")] = "when"
    """when (newest first), recipe, mode, metric (best first, by recipe) or status."""
    limit: Count = 20
    """The most rows."""
    json: bool = False
    """Whether one JSON object is printed instead, with all of them."""


COMMAND = Command("ls", (LsSettings,), instead=())
NAMED = 5  # Damaged records that are named; of more, the rest are counted


def ls_command(args: Sequence[str]) -> int:
    """Run `mprun ls`; the exit status."""
    from mprun.config.settings import take

    settings, rest = take(parse_arguments(COMMAND, args).overrides, LsSettings)
    own = settings.own(LsSettings)
    folders = [Path(text) for text in rest]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}; write mprun ls FOLDER")
    records = [x for folder in folders or [OUTPUTS] if folder.is_dir() for x in listed(folder)]
    records.sort(key=lambda x: x.started_at, reverse=True)
    records.sort(key=SORTS[own.sort])  # a stable sort: equal ones stay newest first
    result = Result({"schema_version": 1, "records": records}, _parts(records, own.limit))
    if own.json:
        print(result.json, end="")
        return EXIT_OK
    return show(result)


def _parts(records: Sequence[ListedRecord], limit: int) -> list[FittedTable | str]:
    if not records:
        return ["there is no run; mprun recipe=mnist trains one below outputs/"]
    parts: list[FittedTable | str] = [_table(records[:limit])]
    if len(records) > limit:
        parts.append(f"{len(records) - limit:,} more; ls.limit={len(records)} lists all")
    damaged = [x for record in records for x in (record, *record.runs) if x.status == "damaged"]
    parts += [f"damaged: {x.path}: {x.error}" for x in damaged[:NAMED]]
    if len(damaged) > NAMED:
        parts.append(f"damaged: {len(damaged) - NAMED} more")
    studies = [x.path for x in records if x.runs]
    return [*parts, *(f"mprun ls {path} lists the runs of that study" for path in studies[:1])]


def _table(records: Sequence[ListedRecord]) -> FittedTable:
    return FittedTable(
        "",
        TableColumn("folder", is_text=False, cell=lambda x: x.path),  # to copy it as it is
        figure_column("started", 2, lambda x: f"{x.started_at.astimezone():%Y-%m-%d %H:%M}"),
        text_column("recipe", 3, cell=lambda x: readable(x.recipe, 60) or "-"),
        text_column("mode", cell=lambda x: readable(x.mode, 60) or "-"),
        figure_column("seed", 1, lambda x: "-" if x.seed is None else str(x.seed)),
        text_column("metric", cell=_metric),
        text_column("status", cell=_status),
        rows=records,
        elsewhere="ls.json=true",
    )


def _values(record: ListedRecord) -> list[float]:
    """The metric of a run, or of a study's runs, the best first; empty for several metrics."""
    runs = record.runs or (record,)
    if len({run.metric for run in runs if run.metric}) > 1:  # of several recipes
        return []
    values = [x.value for x in runs if x.value is not None and not isnan(x.value)]
    return sorted(values, reverse=record.higher_is_better)


def _metric(record: ListedRecord) -> str:
    values = _values(record)
    ends = dict.fromkeys(f"{x:.4f}" for x in (*values[:1], *values[-1:]))  # one if they are equal
    return f"{readable(record.metric, 24)} {' to '.join(ends)}" if ends else "-"


def _status(record: ListedRecord) -> str:
    if not record.runs:
        return "running, or killed" if record.status == "running" else record.status
    count = Counter(run.status for run in record.runs)
    done = f"{count.pop('completed', 0)} of {record.planned} completed"
    return f"{record.command}: {', '.join([done, *(f'{n} {x}' for x, n in count.items())])}"


def _by_metric(record: ListedRecord) -> tuple[str, str, float]:
    best = next(iter(_values(record)), inf)
    return record.recipe, record.metric, -best if record.higher_is_better else best


SORTS: dict[str, Callable[[ListedRecord], Any]] = {
    "when": lambda x: 0,  # the order in which they are listed
    "recipe": lambda x: x.recipe,
    "mode": lambda x: x.mode,
    "metric": _by_metric,
    "status": lambda x: x.status,
}
