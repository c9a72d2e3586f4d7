"""A run that is planned but not trained: the commands that inspect a step use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mprun.assemble import Plan, make_plan
from mprun.assemble.initial_summary import initial_summary
from mprun.assemble.speed_trial import with_fastest
from mprun.config import Composed
from mprun.errors import MprunError, RunFailedError, UsageError
from mprun.numerics.passes import NotMeasurableError
from mprun.records.run_record import Summary
from mprun.train import checkpoint
from mprun.train.loop import StopRequestedError
from mprun.train.signals import SignalReceivedError
from mprun.train.user_code import described


@dataclass(frozen=True)
class PlannedRun:
    """A plan with the configuration it is made from."""

    command: str
    composed: Composed
    plan: Plan

    @cached_property
    def summary(self) -> Summary:
        """The summary that a record of the run would start with."""
        return initial_summary(self.plan, self.composed.resolved)

    @property
    def warnings(self) -> list[str]:
        """Those of the plan, and one for each field that only a run uses."""
        return [*self.plan.warnings, *unused_fields(self.composed, self.command)]

    def described(self, *names: str) -> dict[str, Any]:
        """Fields of the summary as plain values."""
        return {key: value for key, value in asdict(self.summary).items() if key in names}

    @contextmanager
    def executing(self) -> Iterator[None]:
        """Inside, the plan's steps can run: with its backend flags, and errors in one sentence.

        Raises:
            RunFailedError: the model's code raised something else; `__cause__` is that error.
            UsageError: the model cannot be measured.
            SignalReceivedError: a signal stopped the steps.
        """
        try:
            with self.plan.backend_flags():
                yield
        except MprunError:
            raise
        except StopRequestedError:
            raise SignalReceivedError from None
        except NotMeasurableError as error:
            raise UsageError(f"the model cannot be measured: {error}") from None
        except Exception as error:
            reason = described(error, self.plan.policy.name)
            raise RunFailedError(
                f"mprun {self.command} cannot run the model's step: {reason}"
            ) from error


def unused_fields(composed: Composed, command: str) -> list[str]:
    """A warning for each field that the user set and that only a run uses."""
    reason = f"has no effect: mprun {command} does not detect exceptions"
    return [f"{key} {reason}" for key in composed.given if key.startswith("debug.")]


def plan_or_resume(composed: Composed) -> tuple[Plan, dict[str, Any] | None]:
    """The plan of a run, and the checkpoint that it resumes from, or None.

    Raises:
        UsageError: the run cannot be planned.
    """
    folder = composed.config.run.resume
    saved = None if folder is None else checkpoint.load(Path(folder))
    plan = make_plan(composed.config, composed.given, saved["choices"] if saved else None)
    return (plan if saved else with_fastest(plan)), saved


def plan_run(composed: Composed, command: str) -> PlannedRun:
    """Plan a run for a command that inspects it.

    Raises:
        UsageError: the run cannot be planned, or is one to resume.
    """
    if composed.config.run.resume is not None:
        raise UsageError(
            f"mprun {command} starts a new run: leave out run.resume; train.init_from takes a "
            "run's weights"
        )
    return PlannedRun(command, composed, make_plan(composed.config, composed.given))
