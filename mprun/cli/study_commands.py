"""What the commands that run studies share: their words, their folder, their way out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from mprun.cli.train_command import Arguments, parse
from mprun.errors import EXIT_FAILED, RunFailedError, UsageError

if TYPE_CHECKING:
    from mprun.assemble import DataCache
    from mprun.config import Composed
    from mprun.config.settings import CompareSettings, Settings
    from mprun.experiments.sweep import Drop, Sweep
    from mprun.experiments.trials import Outcome


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


def request(command: str, words: list[str], *sections: str, refused: Sequence[str] = ()) -> Request:
    """Take a study's words apart.

    Args:
        command: its name.
        words: what follows it.
        sections: settings it knows, beside those of the comparison and of seeds.
        refused: settings it decides itself.

    Raises:
        UsageError: an option that has no meaning here, or a setting that is not legal.
    """
    from mprun.config.compose import parse as parse_override
    from mprun.config.compose import quoted
    from mprun.config.settings import take
    from mprun.config.validate import PATHS

    arguments: Arguments = parse(words)
    if arguments.multirun or arguments.show_config:
        raise UsageError(f"mprun {command} takes lists of values by itself; leave out the option")
    settings, rest = take(arguments.overrides, "compare", "seeds", "first_seed", *sections)
    _refuse(arguments.overrides, refused, f"mprun {command} decides this itself")
    own: dict[str, str] = {}
    others = []
    for word in rest:
        override = parse_override(word)
        key = override.key_or_group
        if key in ("run.dir", "run.resume"):
            own[key] = str(override.value())
        elif key in PATHS and isinstance(path := override.value(), str):
            others.append(f"{key}={quoted(Path(path).absolute())}")
        else:
            others.append(word)
    resume = own.get("run.resume")
    if resume is not None:
        _check_resume(arguments, others)
    return Request(
        command,
        settings,
        others,
        arguments.config_dir,
        own.get("run.dir"),
        None if resume is None else Path(resume),
    )


def _refuse(words: Sequence[str], keys: Sequence[str], why: str) -> None:
    for word in words:
        if word.lstrip("+").partition("=")[0] in keys:
            raise UsageError(f"'{word}': {why}; leave it out")


def _check_resume(arguments: Arguments, others: Sequence[str]) -> None:
    why = "what goes on keeps its plan"
    if others:
        raise UsageError(f"'{others[0]}': {why}; leave it out")
    if arguments.config_dir is not None:
        raise UsageError(f"--config-dir {arguments.config_dir}: {why}; leave it out")
    _refuse(arguments.overrides, ("seeds", "first_seed", "advise.max_steps", "run.dir"), why)


def seeds_of(asked: Request, default: int) -> range:
    """The seeds a new study runs."""
    first = asked.settings.first_seed
    return range(first, first + (asked.settings.seeds or default))


def tell(text: str, error: bool = False) -> None:
    """Print a line as it is."""
    from mprun.console import print_line, stderr_console, stdout_console

    print_line(stderr_console() if error else stdout_console(), text)


def carry_out(
    sweep: Sweep, command: str, drop: Drop | None = None, load: DataCache | None = None
) -> tuple[list[Outcome], int | None]:
    """Run a study's trials; their outcomes, and an exit status where it ends here."""
    from mprun.assemble import DataCache
    from mprun.console import stdout_console
    from mprun.experiments.study_progress import StudyProgress
    from mprun.experiments.trials import StudyStoppedError, Trials
    from mprun.train.signals import SignalReceivedError, StopSignals

    view = StudyProgress(stdout_console(), list(sweep.variants), len(sweep.seeds))
    view.line(f"{command}: {len(sweep.trials)} runs in {sweep.folder}")
    with _alone(sweep.folder), StopSignals() as stop:
        trials = Trials(sweep.folder, sweep.config_dir, stop, view, load or DataCache())
        view.start()
        try:
            outcomes = sweep.run(trials, drop)
        except (StudyStoppedError, SignalReceivedError):
            again = shlex.quote(f"run.resume={sweep.folder}")
            view.line(f"stopped by {stop.name}; go on with: mprun {command} {again}")
            return [], stop.exit_status
        finally:
            view.stop()
    unbegun = [o for o in outcomes if o.summary is None]
    if unbegun:
        view.line(f"{len(unbegun)} of {len(outcomes)} runs could not begin: {unbegun[0].error}")
    if all(outcome.error is not None for outcome in outcomes):
        view.line("no run was completed")
        return outcomes, EXIT_FAILED
    return outcomes, None


def held_out(composed: Composed, load: DataCache) -> list[str]:
    """Overrides that let a study choose without the test set: validation data, and no test.

    Raises:
        UsageError: the run cannot be planned.
    """
    from mprun.assemble import plan

    chosen = plan(composed.config, composed.given, load=load)
    words = ["data.test=false"] if len(chosen.splits.test) else []
    takes_share = "data.validation_fraction" not in chosen.recipe.ignores
    if not len(chosen.splits.validation) and takes_share:
        words.append("data.validation_fraction=0.1")
    return words


def judged(asked: Request, sweep: Sweep, outcomes: Sequence[Outcome]) -> CompareSettings:
    """How a choice is compared: against the plan's first variant, never on test samples.

    Raises:
        RunFailedError: the first variant has no completed run.
    """
    from mprun.config.settings import Split

    first = next(iter(sweep.variants))
    done = (o.summary for o in outcomes if o.trial.variant == first and o.error is None)
    summary = next((s for s in done if s is not None), None)
    if summary is None:
        raise RunFailedError(f"{first}, which the others are set against, failed in every run")
    split = Split.validation if summary.data.validation_samples else Split.train
    return replace(asked.settings.compare, baseline=summary.variant_hash, split=split)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While no other process runs the study."""
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError(f"{folder}: another mprun is running this study; wait for it") from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror})") from None
    try:
        yield
    finally:
        lock.release()
