"""What the commands that run studies share: their words, their folder, their way out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.commands.train import Arguments, parse
from mprun.errors import EXIT_FAILED, UsageError

if TYPE_CHECKING:
    from mprun.build import DataCache
    from mprun.config import Composed
    from mprun.config.settings import Settings
    from mprun.study.sweep import Drop, Sweep
    from mprun.study.trials import Outcome


@dataclass(frozen=True)
class Request:
    """A study's words, taken apart."""

    command: str
    settings: Settings
    words: list[str]
    """Overrides of the runs."""
    config_dir: Path | None
    folder: str | None
    """`run.dir`."""
    resume: Path | None
    """`run.resume`."""


def request(command: str, words: list[str], *sections: str) -> Request:
    """Take a study's words apart.

    Args:
        command: its name.
        words: what follows it.
        sections: settings it knows, beside those of the comparison and `seeds`.

    Raises:
        UsageError: an option that has no meaning here, or a setting that is not legal.
    """
    from mprun.config.compose import parse as parse_override
    from mprun.config.settings import take

    arguments: Arguments = parse(words)
    if arguments.multirun or arguments.show_config:
        raise UsageError(f"mprun {command} takes lists of values by itself; leave out the option")
    settings, rest = take(arguments.overrides, "compare", "seeds", *sections)
    own: dict[str, str] = {}
    others = []
    for word in rest:
        override = parse_override(word)
        if override.key_or_group in ("run.dir", "run.resume"):
            own[override.key_or_group] = str(override.value())
        else:
            others.append(word)
    resume = own.get("run.resume")
    if resume is not None and others:
        raise UsageError(f"'{others[0]}': what goes on keeps its plan; leave it out")
    return Request(
        command,
        settings,
        others,
        arguments.config_dir,
        own.get("run.dir"),
        None if resume is None else Path(resume),
    )


def tell(text: str, error: bool = False) -> None:
    """Print a line as it is."""
    from mprun.report.tables import stderr_console, stdout_console

    console = stderr_console() if error else stdout_console()
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def carry_out(
    sweep: Sweep, command: str, drop: Drop | None = None, load: DataCache | None = None
) -> tuple[list[Outcome], int | None]:
    """Run a study's trials; their outcomes, and an exit status where it ends here."""
    from mprun.build import DataCache
    from mprun.report.study import study_view
    from mprun.report.tables import stdout_console
    from mprun.stop import SignalReceivedError, StopSignals
    from mprun.study.trials import StudyStoppedError, Trials

    view = study_view(stdout_console(), list(sweep.variants), len(sweep.seeds))
    view.line(f"{command}: {len(sweep.trials)} runs in {sweep.folder}")
    with StopSignals() as stop:
        trials = Trials(sweep.folder, sweep.config_dir, stop, view, load or DataCache())
        view.start()
        try:
            outcomes = sweep.run(trials, drop)
        except (StudyStoppedError, SignalReceivedError):
            view.line(
                f"stopped by {stop.name}; go on with: mprun {command} run.resume={sweep.folder}"
            )
            return [], stop.exit_status
        finally:
            view.stop()
    if all(outcome.error is not None for outcome in outcomes):
        view.line("no run was completed")
        return outcomes, EXIT_FAILED
    return outcomes, None


def held_out(composed: Composed, load: DataCache) -> list[str]:
    """Overrides that let a study choose without the test set: validation data, and no test.

    Raises:
        UsageError: the run cannot be planned.
    """
    from mprun.build import plan

    chosen = plan(composed.config, composed.given, load=load)
    if "data.validation_fraction" in chosen.recipe.ignores:
        return []  # there is no test set to keep from looking at
    words = ["data.test=false"]
    if not len(chosen.splits.validation):
        words.append("data.validation_fraction=0.1")
    return words
