"""The terminal: consoles for results and warnings, tables that fit it, progress of runs.

Progress is a display that redraws itself on a terminal, and now and then a plain line anywhere else
(a file, a pipe, a CI log).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from mprun.records.console.fitted_table import FittedTable, broken, without_controls

QUIET_EVERY_S = 10.0  # A plain line at most so often: a log stays readable
REDRAW_EVERY_S = 0.2  # Parts of a job may take milliseconds


# ---- consoles ------------------------------------------------------------------------------------


def stdout_console() -> Console:
    """Where results go; colour, width and NO_COLOR are rich's."""
    return Console()


def stderr_console() -> Console:
    """Where warnings and errors go."""
    return Console(stderr=True)


def print_line(console: Console, text: str) -> None:
    """Print a line as it is: no wrapping, no colour, no markup, no control characters."""
    console.print(without_controls(text), highlight=False, markup=False, soft_wrap=True)


def note(text: str) -> None:
    """Print what the user has to know on standard error, as one line."""
    print_line(stderr_console(), f"note: {text}")


def print_text(console: Console, text: str) -> None:
    """Print sentences; on a terminal, their lines are broken at blanks."""
    for line in broken(text, console.width if console.is_terminal else None):
        print_line(console, line)


def print_table(console: Console, table: FittedTable) -> None:
    """Print a table; where it cannot be made narrow enough, its lines are not cut."""
    console.print(table, highlight=False, soft_wrap=True)


def warn(warnings: Iterable[str]) -> None:
    """Print warnings on standard error; of several about one field without effect, the last."""
    console = stderr_console()
    # the plan, which knows the recipe, may name a field again after the configuration
    for warning in {text.partition(" has no effect")[0]: text for text in warnings}.values():
        print_line(console, f"warning: {warning}")


# ---- progress ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """The state of a run in progress."""

    epoch: int
    step: int
    loss: float
    step_time_ms: float
    fraction: float
    """The share of the run that is done, 0 to 1, by steps or by time, whichever ends it first."""
    elapsed_s: float

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the same rate, or None at the start."""
        if self.fraction <= 0:
            return None
        return self.elapsed_s * (1 - self.fraction) / self.fraction

    def text(self, epochs: int | None, steps: int | None) -> str:
        """The moment in a line, with the planned epochs and steps where they are known."""
        eta = "" if self.eta_s is None else f"  ETA {duration(self.eta_s)}"
        return (
            f"epoch {_of(self.epoch, epochs)}  step {_of(self.step, steps)}  "
            f"loss {self.loss:.4f}  {self.step_time_ms:.2f} ms/step{eta}"
        )


def _of(value: int, total: int | None) -> str:
    return f"{value}" if total is None else f"{value}/{total}"


def duration(seconds: float) -> str:
    """45 s, 2:05 or 1:02:05."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressView:
    """Shows the progress of a run. Every method does nothing until a subclass overrides it."""

    def start(self) -> None:
        """The loop starts."""

    def update(self, moment: Moment) -> None:
        """Steps were taken."""

    def line(self, text: str) -> None:
        """Print a line that stays on the screen."""

    def stop(self) -> None:
        """The loop ended."""


class ProgressDisplay:
    """Lines and, on a terminal that can redraw a line, a live display (if any) below them."""

    def __init__(self, console: Console, live: Live | Progress | None = None) -> None:
        self._console = console
        self._live = live if console.is_interactive else None
        self._printed_at = time.monotonic()

    def start(self) -> None:
        """Show the live display."""
        self._printed_at = time.monotonic()
        if self._live is not None:
            self._live.start()

    def line(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._printed_at = time.monotonic()
        print_line(self._console, text)

    def status(self, text: str) -> None:
        """Print a line if there is no live display and nothing was printed for ten seconds."""
        if self._live is None and time.monotonic() - self._printed_at >= QUIET_EVERY_S:
            self.line(text)

    def stop(self) -> None:
        """End the live display."""
        if self._live is not None:
            self._live.stop()


class RunProgress(ProgressDisplay, ProgressView):
    """The progress of a run of these epochs and steps, if known: a bar, or a line now and then."""

    def __init__(self, console: Console, epochs: int | None, steps: int | None) -> None:
        self._epochs, self._steps = epochs, steps
        self._bar = Progress(
            BarColumn(bar_width=24), TextColumn("{task.description}"), console=console
        )
        self._task = self._bar.add_task("starting", total=1.0)
        super().__init__(console, self._bar)

    def update(self, moment: Moment) -> None:
        """Steps were taken."""
        text = moment.text(self._epochs, self._steps)
        self._bar.update(self._task, completed=moment.fraction, description=text)
        self.status(text)


class ReportPart(Protocol):
    """Called when a part of a job begins; may raise to end the job there."""

    def __call__(self, text: str, done: int = 0, total: int | None = None) -> None:
        """A part begins, of `total` of its kind, if known; `done=0` begins a new kind."""


def report_nothing(text: str, done: int = 0, total: int | None = None) -> None:
    """The `ReportPart` of a job that nobody watches."""


class JobProgress(ProgressDisplay):
    """The progress of a job in parts: what it does, `3 of 12`, and the time left."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn(
                "{task.description}",
                markup=False,  # names of layers may have brackets
                table_column=Column(no_wrap=True, overflow="ellipsis"),
            ),
            console=console,
            transient=True,
            auto_refresh=False,  # a thread that redraws inside a part would disturb measurements
        )
        self._task = self._bar.add_task("starting", total=None)
        self._kind_began_s = self._drawn_at_s = 0.0
        super().__init__(console, self._bar)

    def __enter__(self) -> JobProgress:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def begin(self, text: str, done: int = 0, total: int | None = None) -> None:
        """A part begins: a `ReportPart`."""
        now = time.monotonic()
        if done == 0:
            self._kind_began_s = now
        shown = text
        if total is not None:  # ` (4 of 12, about 40 s left)`, with the estimate from the second on
            each_s = (now - self._kind_began_s) / max(1, done)
            left = f", about {duration(each_s * (total - done))} left" if done else ""
            shown += f" ({done + 1} of {total}{left})"
        if done == 0:
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(shown, total=total)
        self._bar.update(self._task, description=shown, completed=done)
        is_due = done == 0 or now - self._drawn_at_s >= REDRAW_EVERY_S
        if self._live is not None and is_due:
            self._drawn_at_s = now
            self._bar.refresh()
        self.status(shown)
