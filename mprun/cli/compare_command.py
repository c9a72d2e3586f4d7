"""`mprun compare`, and the comparison and report that the studies have as well."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mprun.cli.arguments import Command, parse_arguments
from mprun.errors import EXIT_OK, EXIT_OPEN, ConditionMetError, UsageError, printable
from mprun.records.console import print_line, stdout_console
from mprun.records.console.formatting import counted
from mprun.records.files import write_files
from mprun.records.listing import STUDIES
from mprun.records.result import Result, show
from mprun.records.run_folder import FILE, StudyPlan, read_study_plan

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
    # into the argument, if it is a single folder and no run
    is_study = len(paths) == 1 and paths[0].is_dir() and not (paths[0] / "summary.json").exists()
    folder = paths[0] if is_study else Path("comparison")
    if settings.json is not None:
        return _decide(paths, settings, folder, known.verbose)
    comparison = with_open_runs(compared(paths, settings), paths)
    report(comparison, settings, folder, known.verbose)
    check(comparison, settings.fail_if)
    return EXIT_OK


def _decide(paths: Sequence[Path], settings: CompareSettings, folder: Path, verbose: bool) -> int:
    """Write the decision on one variant, alone or into a file beside the table; the status."""
    from mprun.study.compare.decision import Claim, decide, decide_in_stream

    wants_gain = settings.keep == "better" or (settings.keep == "auto" and settings.stream)
    claim: Claim = "better" if wants_gain else "unharmed"
    if settings.stream:
        at_level = partial(compared, paths, settings)
        comparison, decision = decide_in_stream(Path(settings.stream), claim, at_level)
    else:
        comparison = compared(paths, settings)
        decision = decide(comparison, claim)
    line, file = msgspec.json.encode(decision).decode(), Path(settings.json or "")
    if settings.json == "-":
        print_line(stdout_console(), line)
    else:
        write_files(file.parent, {file.name: f"{line}\n"})
        report(comparison, settings, folder, verbose)
    return {True: EXIT_OK, False: ConditionMetError.status, None: EXIT_OPEN}[decision.keep]


COMPARE = Command(
    "compare",
    compare_command,
    """`mprun compare`: what many runs show together.

        mprun compare outputs/DATE/TIME [compare.margin=0.01 ...] [--verbose]

    Takes folders of runs, folders that contain such folders, and globs. Prints the answer in words,
    a line for each variant and at most five notes (--verbose or -v: all figures and notes), and
    writes a report into a folder. An argument that is a path, or that matches one, is never a
    setting.

        mprun compare BEFORE AFTER compare.json=- [compare.stream=changes.jsonl]

    One line of JSON for a program, and no report: may AFTER be kept? BEFORE is the baseline; both
    may have one configuration, with other code. Status 0: it may be kept, 3: not, 4: not settled.
    """,
    ("compare",),
    False,
    STUDIES,
)


def compared(
    paths: Sequence[Path], settings: CompareSettings, alpha: float | None = None
) -> Comparison:
    """As `mprun.study.settling.compared`, which takes a while to import."""
    from mprun.study import settling

    return settling.compared(paths, settings, alpha)


def with_open_runs(comparison: Comparison, paths: Sequence[Path]) -> Comparison:
    """The comparison of the runs in `paths`; of a stopped sweep, with a note of how much there is.

    A plan that cannot be read is a note too: the runs can be compared without it.
    """
    if len(paths) != 1 or not (paths[0] / FILE).exists():
        return comparison
    try:
        plan = read_study_plan(paths[0])
    except UsageError as error:
        unknown = f"{error}; it is unknown whether all runs of this sweep have ended"
        return replace(comparison, notes=(unknown, *comparison.notes))
    text = _open_text(comparison, plan)
    if plan.command != "sweep" or not text:  # the others leave out runs on purpose
        return comparison
    again = f"mprun sweep {shlex.quote(f'run.resume={paths[0]}')}"
    return replace(comparison, notes=(f"{text}; continue it with: {again}", *comparison.notes))


def _open_text(comparison: Comparison, plan: StudyPlan) -> str:
    """What of a sweep is left to run; empty if nothing is."""
    if plan.looks is not None:
        if not comparison.planned_pairs:  # another baseline: the looks were for the study's own
            return ""
        is_open = [v.label for v in comparison.variants[1:] if not v.verdict.closed]
        missing = len(plan.variants) - len(comparison.variants)
        is_open += [f"{missing} without a run"] if missing else []
        return f"open in this sweep: {', '.join(is_open)}" if is_open else ""
    ended = sum(len(variant.runs) + len(variant.failed) for variant in comparison.variants)
    planned = len(plan.variants) * len(plan.seeds)
    return f"{ended} of {planned} runs of this sweep have ended" if ended < planned else ""


def report(
    comparison: Comparison,
    settings: CompareSettings,
    folder: Path,
    verbose: bool,
    answer: str = "",
    again: str = "with",
) -> None:
    """Print the answer and the table, and write the report into `compare.dir` or `folder`.

    `answer` is printed first, by default the comparison's own; `again` is the command that shows
    all of it, without `--verbose` (`with`: the same one). Raises `UsageError` where the report
    cannot be written.
    """
    from mprun.study.report import comparison_report as shown
    from mprun.study.report.answer import headline, quantity_sentences

    said = [answer] if answer else headline(comparison)
    sentences = map(printable, [*said, *quantity_sentences(comparison)])
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
    show(Result(comparison, [*sentences, table, *shown.quantities_table(comparison), *below]))
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
    if settings.json is None and (settings.stream is not None or settings.keep != "auto"):
        raise UsageError("compare.keep and compare.stream need compare.json; add compare.json=-")
    if settings.json is not None and settings.fail_if != "none":
        raise UsageError("compare.json has its own exit status; leave compare.fail_if out")
    check_name("compare.dir", settings.dir, "a folder")
    check_name("compare.json", settings.json, "a file, or -")
    check_name("compare.stream", settings.stream, "a file")
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
