"""`mprun show`: the result of a run, a study or a measurement again, as its command printed it.

    mprun show outputs/DATE/TIME
    mprun show last --verbose

Reads records alone: nothing is measured, written or opened. Of a study the comparison is made again
from its runs, with the margin and baseline of its report. Names the pages in the folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from mprun.cli.arguments import Command, parse_arguments
from mprun.cli.questions import questions
from mprun.errors import EXIT_OK, UsageError
from mprun.inspect.question import SavedResult
from mprun.records.console import print_line, stdout_console
from mprun.records.console.fitted_table import FittedTable
from mprun.records.console.formatting import readable
from mprun.records.listing import MULTIRUN_FILE, RUN_FILES, RUNS, STUDIES
from mprun.records.reader import read_json
from mprun.records.result import Result, show
from mprun.records.run_folder import FILE as STUDY_FILE
from mprun.records.run_folder import read_study_plan
from mprun.records.run_record import Summary, read_summary

COMMAND = Command("show", instead=(), folders_of=(*RUNS, "observe", *STUDIES))
USAGE = "write mprun show RUN, such as mprun show outputs/DATE/TIME"


def show_command(args: Sequence[str]) -> int:
    """Run `mprun show`; the exit status."""
    known = parse_arguments(COMMAND, args)
    given = known.overrides
    if len(given) != 1:
        raise UsageError(f"mprun show takes one folder, not {len(given)}; {USAGE}")
    folder = Path(given[0])
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; {USAGE}")
    names = {path.name for path in folder.iterdir()}
    saved = {x.question.saved.name: x.question.saved for x in questions() if x.question.saved}
    measured = saved.keys() & names
    if names & RUN_FILES:
        summary = read_summary(folder)
        show(Result(summary, [*_closing(summary, folder)]))
    elif STUDY_FILE in names:
        _show_study(folder, known.verbose)
    elif MULTIRUN_FILE in names:
        from mprun.cli.train_command import show_sweep

        show_sweep(folder)
    elif not any(name.endswith(".json") for name in names):
        raise UsageError(f"{folder} has no run, no study and no result; {USAGE}")
    for name in sorted(measured):
        show(_measurement(folder / name, saved[name]))
    pages = sorted(name for name in names if name.endswith(".html"))
    others = sorted(x for x in names - measured - {"summary.json"} if x.endswith(".json"))
    for kind, files in (("page", pages), ("record", others)):
        for name in files:
            print_line(stdout_console(), f"{kind}: {folder / name}")
    return EXIT_OK


def _closing(summary: Summary, folder: Path) -> Iterator[FittedTable | str]:
    """What the run printed at its end, and how it goes on if it did not complete."""
    from mprun.study.report.tables import closing

    yield from closing(summary, folder)
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
    notes: tuple[str, ...] = ()
    advice: dict[str, Any] | None = None
    not_run: dict[str, list[int]] = {}


def _show_study(folder: Path, verbose: bool) -> None:
    """Compare a study's runs again, in the terms of its report; without one, all of them."""
    from mprun.cli.compare_command import compared, report, with_open_runs
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
        settings = replace(settings, baseline=earlier.baseline, **terms)
        runs = (Path(x.path).name for v in earlier.variants for x in (*v.runs, *v.failed))
        comparison = replace(
            compared([folder / name for name in runs], settings),
            notes=earlier.notes,
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


def _measurement(path: Path, saved: SavedResult) -> Result:
    """A measurement from its file; a sentence that names the file where it cannot be shown."""
    try:
        content = read_json(path, dict[str, Any], saved.newest)
        # not strict: files have "inf" for an infinite number
        record: Any = msgspec.convert(content, saved.record, strict=False)
        return Result(record, list(saved.parts(record)))
    except (UsageError, msgspec.ValidationError) as error:
        return Result(None, [f"the result is in {path}, and cannot be shown again: {error}"])
