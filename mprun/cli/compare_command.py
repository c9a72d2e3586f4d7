"""`mprun compare`, and the comparison and report that the studies have as well."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.arguments import Command, parse_arguments
from mprun.errors import EXIT_OK, ConditionMetError, UsageError, printable
from mprun.records.console import print_line, stdout_console
from mprun.records.console.formatting import counted
from mprun.records.listing import STUDIES
from mprun.records.result import Result, show
from mprun.records.run_folder import FILE, read_study_plan

if TYPE_CHECKING:
    from mprun.config.settings import CompareSettings
    from mprun.study.compare.comparison import Comparison

EXAMPLE = "mprun compare outputs/DATE/TIME"
# The verdicts that each `compare.fail_if` accepts
ACCEPTED = {
    "worse": ("equivalent", "better", "inconclusive"),
    "not_equivalent": ("equivalent", "better"),
}


def compare_command(args: Sequence[str]) -> int:
    """Run `mprun compare`; the exit status."""
    known = parse_arguments(COMPARE, args)
    paths, settings = parse(known.overrides)
    comparison = with_open_runs(compared(paths, settings), paths)
    # into the argument, if it is a single folder and no run
    is_study = len(paths) == 1 and paths[0].is_dir() and not (paths[0] / "summary.json").exists()
    folder = paths[0] if is_study else Path("comparison")
    report(comparison, settings, folder, known.verbose)
    check(comparison, settings.fail_if)
    return EXIT_OK


COMPARE = Command(
    "compare",
    compare_command,
    """`mprun compare`: what many runs show together.

        mprun compare outputs/DATE/TIME [compare.margin=0.01 ...] [--verbose]

    Takes folders of runs, folders that contain such folders, and globs. Prints the answer in words,
    a line for each variant and at most five notes (--verbose or -v: all figures and notes), and
    writes a report into a folder. An argument that is a path, or that matches one, is never a
    setting.
    """,
    ("compare",),
    False,
    STUDIES,
)


def compared(paths: Sequence[Path], settings: CompareSettings) -> Comparison:
    """The comparison of the runs in these folders; those of one study may be of several machines.

    Raises:
        UsageError: there is no run, or the runs cannot be compared.
    """
    from mprun.records.run_folder import study_of_runs
    from mprun.study.compare.load import find_runs, others_in
    from mprun.study.compare.verdicts import compare

    runs, skipped = find_runs(paths)
    study = study_of_runs([run.path for run in runs])
    return compare(
        runs,
        skipped,
        margin=settings.margin,
        relative_margin=settings.relative_margin,
        baseline=settings.baseline,
        split=settings.split,
        # several machines may work on one study: that is no mistake of the user's
        mix=settings.mix if study is None else [*settings.mix, "hardware"],
        beside=() if study is None else others_in(study, runs),
    )


def with_open_runs(comparison: Comparison, paths: Sequence[Path]) -> Comparison:
    """The comparison; of a sweep that was stopped, with a note that says how much of it there is.

    A plan that cannot be read is a note too: the runs can be compared without it.

    Args:
        comparison: of the runs in `paths`.
        paths: folders.
    """
    if len(paths) != 1 or not (paths[0] / FILE).exists():
        return comparison
    try:
        plan = read_study_plan(paths[0])
    except UsageError as error:
        unknown = f"{error}; it is unknown whether all runs of this sweep have ended"
        return replace(comparison, notes=(unknown, *comparison.notes))
    ended = sum(len(variant.runs) + len(variant.failed) for variant in comparison.variants)
    planned = len(plan.variants) * len(plan.seeds)
    if plan.command != "sweep" or ended >= planned:  # the others leave out runs on purpose
        return comparison
    again = f"mprun sweep {shlex.quote(f'run.resume={paths[0]}')}"
    text = f"{ended} of {planned} runs of this sweep have ended; continue it with: {again}"
    return replace(comparison, notes=(text, *comparison.notes))


def report(
    comparison: Comparison,
    settings: CompareSettings,
    folder: Path,
    verbose: bool,
    answer: str = "",
    again: str = "with",
) -> None:
    """Print the answer and the table, and write the report into `compare.dir` or `folder`.

    Args:
        comparison: of runs.
        settings: of the command.
        folder: the default folder.
        verbose: whether all figures and notes are printed.
        answer: printed first; by default the comparison's own.
        again: the command that shows all of it, without `--verbose`; `with`: the same one.

    Raises:
        UsageError: the report cannot be written.
    """
    from mprun.study.report import comparison_report as shown
    from mprun.study.report.answer import headline

    sentences = map(printable, [answer] if answer else headline(comparison))
    table = shown.comparison_table(comparison) if verbose else shown.short_table(comparison)
    notes = (
        [
            *shown.footer(comparison),
            # without those of single epochs, which the files have
            *(shown.published_line(x) for x in shown.published(comparison) if x.epoch is None),
        ]
        if verbose
        else shown.short_notes(comparison)
    )
    most = len(notes) if verbose else shown.MOST_NOTES
    below = map(printable, notes[:most])  # names of folders in it may have any characters
    show(Result(comparison, [*sentences, table, *below]))
    more = f"{counted(len(notes) - most, 'more note')} and " if len(notes) > most else ""
    if not verbose:
        print_line(stdout_console(), f"{more}all figures {again} --verbose")
    if not settings.report:
        return
    from mprun.study.report.exports import write_report  # imports matplotlib

    folder = Path(settings.dir) if settings.dir else folder
    written = write_report(comparison, folder)
    names = ", ".join(x.name for x in written) if verbose else written[0].name
    print_line(stdout_console(), f"written to {folder}: {names}")


def parse(args: Sequence[str]) -> tuple[list[Path], CompareSettings]:
    """Separate the runs from the settings.

    Raises:
        UsageError: an argument is neither, or there is no run.
    """
    from mprun.config.settings import fields, take
    from mprun.config.validate import check_name
    from mprun.study.compare.load import expand

    paths, words = [], []
    for text in args:
        matches = expand(text)  # first: a folder's name may look like a setting
        paths += matches
        if not matches and "=" not in text:
            raise UsageError(
                f"there is no folder '{text}', and no folder matches it; write {EXAMPLE}, see "
                "mprun compare --help"
            )
        words += [] if matches else [text]
    taken, others = take(words, "compare")
    settings = taken.compare
    if others:
        legal = ", ".join(fields(["compare"]))
        raise UsageError(f"'{others[0]}' is neither a path nor a setting; legal: {legal}")
    check_name("compare.dir", settings.dir, "a folder")
    if not paths:
        raise UsageError(f"mprun compare needs folders of runs: {EXAMPLE}")
    return paths, settings


def check(comparison: Comparison, condition: str) -> None:
    """Compare the verdicts with `compare.fail_if`.

    Raises:
        ConditionMetError: a variant has a verdict that `condition` does not accept (status 3).
        UsageError: there is only one variant.
    """
    if condition == "none":
        return
    others = comparison.variants[1:]  # the first is the baseline
    if not others:
        raise UsageError(
            f"compare.fail_if={condition}: all runs are of one variant, {comparison.baseline}; "
            "name runs of another one"
        )
    failing = [v for v in others if v.verdict.word not in ACCEPTED[condition]]
    if failing:
        listed = "; ".join(f"{v.label} is {v.verdict} ({v.verdict.reason})" for v in failing)
        raise ConditionMetError(f"compare.fail_if={condition}: {listed}")
