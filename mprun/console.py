"""Progress of a run: a live line on a terminal, a quiet line now and then anywhere else."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

QUIET_EVERY_S = 10.0


@dataclass(frozen=True)
class Moment:
    """Where a run stands."""

    epoch: int
    step: int
    loss: float
    step_time_ms: float
    fraction: float
    """How much of the run is done, 0 to 1, by steps or by time, whichever ends it first."""
    elapsed_s: float

    @property
    def eta_s(self) -> float | None:
        """Seconds left if the run goes on as it went, or None at its start."""
        if self.fraction <= 0:
            return None
        return self.elapsed_s * (1 - self.fraction) / self.fraction

    def text(self, epochs: int | None, steps: int | None) -> str:
        """The moment in a line."""
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
    """Shows where a run stands."""

    def start(self) -> None:
        """The loop begins."""

    def update(self, moment: Moment) -> None:
        """Steps were taken."""

    def line(self, text: str) -> None:
        """Something worth keeping on screen."""

    def stop(self) -> None:
        """The loop ended."""


class LiveProgress:
    """A bar that redraws itself."""

    def __init__(self, console: Console, epochs: int | None, steps: int | None) -> None:
        self._epochs, self._steps = epochs, steps
        self._bar = Progress(
            BarColumn(bar_width=24), TextColumn("{task.description}"), console=console
        )
        self._task = self._bar.add_task("starting", total=1.0)

    def start(self) -> None:
        self._bar.start()

    def update(self, moment: Moment) -> None:
        text = moment.text(self._epochs, self._steps)
        self._bar.update(self._task, completed=moment.fraction, description=text)

    def line(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        self._bar.stop()


class QuietProgress:
    """Plain lines, at most one every ten seconds beside those worth keeping."""

    def __init__(self, console: Console, epochs: int | None, steps: int | None) -> None:
        self._console, self._epochs, self._steps = console, epochs, steps
        self._shown_at = time.monotonic()

    def start(self) -> None:
        self._shown_at = time.monotonic()

    def update(self, moment: Moment) -> None:
        self.now(moment.text(self._epochs, self._steps))

    def now(self, text: str) -> None:
        """Where things stand, unless that was shown a moment ago."""
        if time.monotonic() - self._shown_at >= QUIET_EVERY_S:
            self.line(text)

    def line(self, text: str) -> None:
        self._shown_at = time.monotonic()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        pass


def view_for(console: Console, epochs: int | None, steps: int | None) -> ProgressView:
    """The live bar on a terminal that can redraw a line, quiet lines elsewhere."""
    kind = LiveProgress if console.is_interactive else QuietProgress
    return kind(console, epochs, steps)
