"""`mprun compare`: what many runs say together.

    mprun compare outputs/2026-11-21/10-00-00 [compare.margin=0.01 ...]

Takes folders of runs, folders with runs below and globs. Prints a row for each variant, and leaves
a report in a folder. A word that is a path or matches some is never read as a setting. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.errors import EXIT_OK, ConditionMetError, UsageError, nearest, printable

if TYPE_CHECKING:
    from mprun.compare.rows import Comparison
    from mprun.config.settings import CompareSettings

EXAMPLE = "mprun compare outputs/DATE/TIME"
PASSES = {
    "worse": ("equivalent", "better", "inconclusive"),
    "not_equivalent": ("equivalent", "better"),
}
"""The verdicts with which each `compare.fail_if` is content."""


def compare_command(words: Sequence[str]) -> int:
    """Run `mprun compare` with what follows these words; the exit status.

    Raises:
        UsageError: a word or a value that is not legal, or runs that cannot be compared.
        ConditionMetError: a variant is what `compare.fail_if` names (status 3).
    """
    paths, settings = parse(words)
    conclude(compared(paths, settings), settings, default_folder(paths))
    return EXIT_OK


def compared(paths: Sequence[Path], settings: CompareSettings) -> Comparison:
    """What the runs in these folders say.

    Raises:
        UsageError: there is none, or they cannot be compared.
    """
    from mprun.compare.evaluate import compare
    from mprun.compare.load import find_runs

    return compare(
        *find_runs(paths),
        margin=settings.margin,
        relative_margin=settings.relative_margin,
        baseline=settings.baseline,
        split=settings.split.value,
        mix=[aspect.value for aspect in settings.mix],
    )


def conclude(comparison: Comparison, settings: CompareSettings, folder: Path) -> None:
    """Print a comparison, leave its report in `compare.dir` or `folder`, check `compare.fail_if`.

    Raises:
        UsageError: the report cannot be written.
        ConditionMetError: a variant is what `compare.fail_if` names (status 3).
    """
    report(comparison, settings, folder)
    check(comparison, settings.fail_if.value)


def report(comparison: Comparison, settings: CompareSettings, folder: Path) -> None:
    """Print a comparison, and leave its report in `compare.dir` or `folder`."""
    _show(comparison)
    if settings.report:
        _write(comparison, Path(settings.dir) if settings.dir else folder)


def parse(words: Sequence[str]) -> tuple[list[Path], CompareSettings]:
    """Separate the runs from the settings.

    Raises:
        UsageError: a word is neither, or there is no run.
    """
    from mprun.compare.load import expand
    from mprun.config.settings import fields, take

    paths, rest = [], []
    for word in words:
        found = expand(word)
        paths += found
        if not found:
            rest.append(word)
    legal = fields(["compare"])
    for word in rest:
        name, is_setting, _ = word.partition("=")
        if not is_setting:
            said = (
                f"there is no option '{word}'"
                if word.startswith("-")
                else f"there is no folder '{word}', nor one that it matches"
            )
            raise UsageError(f"{said}; write {EXAMPLE}, see mprun --help")
        if name.lstrip("+").partition(".")[0] != "compare":
            near = nearest(f"compare.{name}", legal)
            meant = f"; did you mean '{near}=...'?" if near else ""
            raise UsageError(
                f"'{word}' is neither a path nor a setting; legal: {', '.join(legal)}{meant}"
            )
    settings = take(rest, "compare")[0].compare
    if settings.dir is not None and (not settings.dir.strip() or "\0" in settings.dir):
        raise UsageError(f"compare.dir={settings.dir!r}: the name of a folder, or null")
    if not paths:
        raise UsageError(f"mprun compare needs folders of runs: {EXAMPLE}")
    return paths, settings


def default_folder(paths: Sequence[Path]) -> Path:
    """Where the report goes: to the one folder named, if it is no run, else `comparison`."""
    if len(paths) == 1 and paths[0].is_dir() and not (paths[0] / "summary.json").exists():
        return paths[0]
    return Path("comparison")


def _show(comparison: Comparison) -> None:
    from mprun.console import print_line, stdout_console
    from mprun.report.comparison_report import comparison_table, footer

    console = stdout_console()
    console.print(comparison_table(comparison), highlight=False)
    for line in footer(comparison):  # names of folders among it, which may hold anything
        print_line(console, printable(line))


def _write(comparison: Comparison, folder: Path) -> None:
    from mprun.console import print_line, stdout_console
    from mprun.report.comparison_report import write_report

    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = write_report(comparison, folder)
    except OSError as error:
        raise UsageError(
            f"the report cannot be written to {folder} ({error.strerror}): name another folder "
            "with compare.dir=FOLDER, or leave it out with compare.report=false"
        ) from None
    names = ", ".join(os.path.relpath(path, folder) for path in written)
    print_line(stdout_console(), f"written to {folder}: {names}")


def check(comparison: Comparison, condition: str) -> None:
    """Raise `ConditionMetError` for variants whose verdict `compare.fail_if` does not accept."""
    if condition == "none":
        return
    others = comparison.variants[1:]
    if not others:
        raise UsageError(
            f"compare.fail_if={condition}: all runs are of one variant, {comparison.baseline}; "
            "name the runs of another"
        )
    met = [v for v in others if v.verdict.word not in PASSES[condition]]
    if met:
        listed = "; ".join(f"{v.label} is {v.verdict} ({v.verdict.reason})" for v in met)
        raise ConditionMetError(f"compare.fail_if={condition}: {listed}")
