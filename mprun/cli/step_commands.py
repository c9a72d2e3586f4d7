"""How the commands that look at a step begin: what they refuse, what has no effect, a header."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.errors import MprunError, RunFailedError, UsageError, first_line

if TYPE_CHECKING:
    from mprun.assemble import Plan
    from mprun.config import Composed
    from mprun.records.run_record import Summary


def refuse_resume(composed: Composed, command: str) -> None:
    """Raise `UsageError` where a run is to be gone on with."""
    if composed.config.run.resume is not None:
        raise UsageError(
            f"mprun {command} begins anew: leave out run.resume; train.init_from takes a run's "
            "weights"
        )


def without_effect(composed: Composed, command: str) -> Iterator[str]:
    """What the user set that only a run looks at, a sentence each."""
    for key in composed.given:
        if key.startswith("debug."):
            yield f"{key} has no effect: mprun {command} looks for no exceptions"


@contextmanager
def faults_explained(command: str, folder: Path) -> Iterator[None]:
    """Turn an exception of the model's code into one line, with the traceback in a file.

    Raises:
        RunFailedError: the line.
    """
    from mprun.experiments.recipe_trace import TraceFailedError
    from mprun.numerics.passes import NotMeasurableError
    from mprun.train.loop import StopRequestedError

    try:
        yield
    except (MprunError, StopRequestedError, NotMeasurableError, TraceFailedError):
        raise
    except Exception as error:
        path = folder / "traceback.txt"
        path.write_text(traceback.format_exc(), encoding="utf-8")
        raise RunFailedError(
            f"mprun {command} cannot run the model's step: {type(error).__name__}: "
            f"{first_line(error)} (the traceback is in {path})"
        ) from None


def introduce(composed: Composed, chosen: Plan, command: str) -> Summary:
    """Print warnings and what is about to be looked at; the summary of such a run."""
    from mprun.assemble.initial_summary import initial_summary
    from mprun.console import print_line, stdout_console, warn
    from mprun.report.tables import header

    warn((*chosen.warnings, *without_effect(composed, command)))
    summary = initial_summary(chosen, composed.resolved)
    for line in header(summary):
        print_line(stdout_console(), line)
    return summary
