"""Commands that read records alone: `ls` and `show`."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

import msgspec

from mprun.cli.arguments import Command, parse_arguments, questions
from mprun.cli.compare_command import compared, report, with_open_runs
from mprun.cli.train_command import show_sweep
from mprun.errors import EXIT_OK, UsageError
from mprun.inspect.question import SavedResult
from mprun.records.console import print_line, stdout_console
from mprun.records.console.fitted_table import FittedTable, TableColumn, figure_column, text_column
from mprun.records.console.formatting import readable
from mprun.records.listing import (
    MULTIRUN_FILE,
    OUTPUTS,
    RUN_FILES,
    RUNS,
    STUDIES,
    ListedRecord,
    listed,
)
from mprun.records.policy_columns import Count
from mprun.records.reader import read_json
from mprun.records.result import Result, show
from mprun.records.run_folder import FILE as STUDY_FILE
from mprun.records.run_folder import read_study_plan
from mprun.records.run_record import Summary, read_summary
from mprun.study.report.tables import closing

# ---- ls ------------------------------------------------------------------------------------------


@dataclass
class LsSettings:
    """What `mprun ls` lists."""

    limit: Count = 20
    """The most rows."""
    json: bool = False
    """Whether one JSON object is printed instead, with all of them."""


NAMED = 5  # Damaged records that are named; of more, the rest are counted


def ls_command(args: Sequence[str]) -> int:
    """Run `mprun ls`; the exit status."""
    from mprun.config.settings import take

    settings, rest = take(parse_arguments(LS, args).overrides, LsSettings)
    own = settings.own(LsSettings)
    folders = [Path(text) for text in rest]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}; write mprun ls FOLDER")
    records = [x for folder in folders or [OUTPUTS] if folder.is_dir() for x in listed(folder)]
    records.sort(key=lambda x: x.started_at, reverse=True)
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


LS = Command(
    "ls",
    ls_command,
    """`mprun ls`: the runs and studies below a folder, newest first.

        mprun ls                      (below outputs/)
        mprun ls outputs/DATE/TIME    (the runs of a study)
        mprun ls ls.limit=100

    A study is one row. `last` names the newest where a command takes a run: mprun show last, mprun
    run.resume=last, mprun export last FILE; the newest study: mprun compare last, mprun sweep
    run.resume=last.
    """,
    (LsSettings,),
    takes_run=False,
)


# ---- show ----------------------------------------------------------------------------------------

USAGE = "write mprun show RUN, such as mprun show outputs/DATE/TIME"


def show_command(args: Sequence[str]) -> int:
    """Run `mprun show`; the exit status."""
    known = parse_arguments(SHOW, args)
    given = known.overrides
    if len(given) != 1:
        raise UsageError(f"mprun show takes one folder, not {len(given)}; {USAGE}")
    folder = Path(given[0])
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; {USAGE}")
    names = {path.name for path in folder.iterdir()}
    saved = {x.saved.name: x.saved for _, x in questions() if x.saved}
    measured = saved.keys() & names
    if names & RUN_FILES:
        summary = read_summary(folder)
        show(Result(summary, [*_closing(summary, folder)]))
    elif STUDY_FILE in names:
        _show_study(folder, known.verbose)
    elif MULTIRUN_FILE in names:
        show_sweep(folder)
    elif not any(name.endswith(".json") for name in names):
        raise UsageError(f"{folder} has no run, no study and no result; {USAGE}")
    for name in sorted(measured):
        show(_measurement(folder / name, saved[name], known.verbose))
    pages = sorted(name for name in names if name.endswith(".html"))
    others = sorted(x for x in names - measured - {"summary.json"} if x.endswith(".json"))
    for kind, files in (("page", pages), ("record", others)):
        for name in files:
            print_line(stdout_console(), f"{kind}: {folder / name}")
    return EXIT_OK


def _closing(summary: Summary, folder: Path) -> Iterator[FittedTable | str]:
    """What the run printed at its end, and how it goes on if it did not complete."""
    yield from closing(summary)
    if summary.error is not None:
        yield f"{summary.status}: {readable(summary.error, 500)}"
    if summary.status != "completed" and not summary.observed:
        what = "still running, or killed" if summary.status == "running" else summary.status
        yield f"{what}; resume with: mprun {shlex.quote(f'run.resume={folder}')}"


class _ComparedRun(msgspec.Struct):
    path: str


class _ComparedVariant(msgspec.Struct):
    runs: list[_ComparedRun]
    failed: list[_ComparedRun]


class _Report(msgspec.Struct):
    """What is read of a study's comparison.json: which runs it compared, and by what terms."""

    margin: float
    is_relative: bool
    baseline: str
    split: str
    variants: list[_ComparedVariant]
    weights: str = "last"
    notes: tuple[str, ...] = ()
    advice: dict[str, Any] | None = None
    not_run: dict[str, list[int]] = {}


def _show_study(folder: Path, verbose: bool) -> None:
    """Compare a study's runs again, in the terms of its report; without one, all of them."""
    from mprun.config.settings import CompareSettings
    from mprun.study.compare.comparison import Advice
    from mprun.study.report.answer import advice_lines

    settings, command = CompareSettings(report=False), read_study_plan(folder).command
    try:
        earlier = read_json(folder / "comparison.json", _Report, 1)
    except FileNotFoundError:  # it was stopped before
        comparison = with_open_runs(compared([folder], settings), [folder])
    else:
        margin = "relative_margin" if earlier.is_relative else "margin"
        terms: dict[str, Any] = {margin: earlier.margin, "split": earlier.split}
        terms |= {"baseline": earlier.baseline, "weights": earlier.weights}
        settings = replace(settings, **terms)
        # Only the names: the study's folder may have been moved since
        runs = (Path(x.path).name for v in earlier.variants for x in (*v.runs, *v.failed))
        comparison = replace(
            compared([folder / name for name in runs], settings),
            notes=earlier.notes,  # with what its budget left out, which the runs do not tell
            advice=msgspec.convert(earlier.advice, Advice | None),
            not_run=earlier.not_run,
        )
    answer = ""
    if command == "double":
        from mprun.study.double import double

        doubling = double(comparison)
        answer = f"{doubling.answer}: {doubling.reason}"
    report(comparison, settings, folder, verbose, answer)
    if verbose:
        show(Result(comparison, advice_lines(comparison)[1:]))


def _measurement(path: Path, saved: SavedResult, verbose: bool) -> Result:
    """A measurement from its file; a sentence that names the file where it cannot be shown."""
    try:
        content = read_json(path, dict[str, Any], saved.newest)
        # not strict: files have "inf" for an infinite number
        record: Any = msgspec.convert(content, saved.record, strict=False)
        if verbose or saved.short is None:
            return Result(record, list(saved.parts(record)))
        return Result(record, [*saved.short(record), "all figures with --verbose"])
    except (UsageError, msgspec.ValidationError) as error:
        return Result(None, [f"the result is in {path}, and cannot be shown again: {error}"])


SHOW = Command(
    "show",
    show_command,
    """`mprun show`: the result of a run, a study or a measurement again, as its command printed it.

        mprun show outputs/DATE/TIME
        mprun show last --verbose

    Reads records alone: nothing is measured, written or opened. Of a study the comparison is made
    again from its runs, with the margin and baseline of its report. Names the pages in the folder.
    """,
    takes_run=False,
    folders_of=(*RUNS, "observe", *STUDIES),
)
