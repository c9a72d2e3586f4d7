"""The terminal: consoles for results and warnings, tables in one style, progress of runs.

Progress is a display that redraws itself on a terminal. Anywhere else (a file, a pipe, a CI log) it
is a plain line at most every ten seconds, so that a log stays readable.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table

from mprun.errors import printable

QUIET_EVERY_S = 10.0


# ---- consoles ------------------------------------------------------------------------------------


def stdout_console() -> Console:
    """Where results go; colour, width and NO_COLOR are rich's."""
    return Console()


def stderr_console() -> Console:
    """Where warnings and errors go."""
    return Console(stderr=True)


def print_line(console: Console, text: str) -> None:
    """Print a line as it is: no wrapping, no colour, no markup, no control characters."""
    text = "\n".join(printable(line) for line in text.split("\n"))
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def note(text: str) -> None:
    """Print what the user has to know on standard error, as one line."""
    print_line(stderr_console(), f"note: {text}")


def warn(warnings: Iterable[str]) -> None:
    """Print warnings on standard error; of several about one field without effect, the last."""
    console = stderr_console()
    for warning in {text.partition(" has no effect")[0]: text for text in warnings}.values():
        print_line(console, f"warning: {warning}")


# ---- tables --------------------------------------------------------------------------------------


def new_table(title: str, *columns: Column | str) -> Table:
    """An empty table without a frame, for rows of figures."""
    return Table(
        *columns,
        title=title,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def framed_table(title: str, *columns: str) -> Table:
    """An empty table with a frame, for rows of text."""
    return Table(*(text_column(heading) for heading in columns), title=title, title_justify="left")


def text_column(heading: str, **options: Any) -> Column:
    """A column that folds long text; `options` are those of rich's `Column`."""
    return Column(heading, overflow="fold", **options)


def figure_column(heading: str) -> Column:
    """A column of figures: right-justified, never wrapped."""
    return Column(heading, justify="right", no_wrap=True)


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
        """The moment in a line.

        Args:
            epochs: the planned epochs, or None if they are not known.
            steps: the planned steps, or None.
        """
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


class ProgressView(Protocol):
    """Shows the progress of a run."""

    def start(self) -> None:
        """The loop starts."""

    def update(self, moment: Moment) -> None:
        """Steps were taken."""

    def line(self, text: str) -> None:
        """Print a line that stays on the screen."""

    def stop(self) -> None:
        """The loop ended."""


class ProgressDisplay:
    """Lines and, on a terminal that can redraw a line, a live display below them.

    Args:
        console: where it is shown.
        live: the live display, or None for lines only.
    """

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


class RunProgress(ProgressDisplay):
    """The progress of a run: a bar, or a line now and then.

    Args:
        console: where it is shown.
        epochs: the planned epochs, or None if they are not known.
        steps: the planned steps, or None.
    """

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
