"""A study while it goes: a live table on a terminal, a line per run anywhere else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mprun.compare import substitutions
from mprun.console import duration
from mprun.records.run_record import Summary, number


class StudyView(Protocol):
    """Shows how far a study is."""

    def start(self) -> None:
        """The first run is about to begin."""

    def begin(self, variant: str, seed: int) -> None:
        """A run begins."""

    def moment(self, text: str, fraction: float) -> None:
        """Where the run stands; `fraction` of it is done."""

    def end(self, variant: str, summary: Summary | None, error: str | None) -> None:
        """The run ended."""

    def line(self, text: str) -> None:
        """Something worth keeping on screen."""

    def stop(self) -> None:
        """The last run ended, or the study was stopped."""


@dataclass
class _Row:
    """What is known of a variant."""

    step_ms: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    metric: str = ""
    mark: str = ""
    """What its times are marked with: EMULATED, or what was computed in float32."""
    ended: int = 0
    failed: int = 0

    def add(self, summary: Summary | None, error: str | None) -> None:
        self.ended += 1
        self.failed += error is not None
        if summary is None or error is not None:
            return
        emulated = summary.execution == "emulated"
        self.mark = "EMULATED" if emulated else substitutions.label([summary])
        if (ms := summary.step_time_ms.median) is not None:
            self.step_ms.append(ms)
        self.metric, score = score_of(summary)
        if score is not None:
            self.scores.append(score)

    def cells(self, seeds: int) -> list[str]:
        runs = f"{self.ended}/{seeds}" + (f", {self.failed} failed" if self.failed else "")
        ms = f"{median(self.step_ms):.2f} ms" if self.step_ms else "-"
        score = f"{self.metric} {fmean(self.scores):.4f}" if self.scores else "-"
        return [runs, f"{ms} {self.mark}".rstrip() if self.step_ms else ms, score]


def score_of(summary: Summary) -> tuple[str, float | None]:
    """What a run is judged by, and its value: of the test set, else validation, else training."""
    name = summary.metric.name
    last = summary.history[-1] if summary.history else None
    for scores in (summary.test, *((last.validation, last.train) if last else ())):
        value = scores.accuracy if name == "accuracy" else scores.loss
        if value is not None:
            return name, number(value)
    return name, None


class _Study:
    """What both views keep."""

    def __init__(self, console: Console, variants: Sequence[str], seeds: int) -> None:
        self._console, self._seeds = console, seeds
        self._rows = {name: _Row() for name in variants}
        self._began_s = time.monotonic()
        self._run_began_s = self._began_s
        self._run_s: list[float] = []
        self._now = ""
        self._fraction = 0.0

    def start(self) -> None:
        self._began_s = time.monotonic()

    def begin(self, variant: str, seed: int) -> None:
        self._now, self._fraction = f"{variant} seed {seed}", 0.0
        self._run_began_s = time.monotonic()

    def moment(self, text: str, fraction: float) -> None:
        self._fraction = fraction

    def _end(self, variant: str, summary: Summary | None, error: str | None) -> _Row:
        self._run_s.append(time.monotonic() - self._run_began_s)
        self._rows[variant].add(summary, error)
        return self._rows[variant]

    def _standing(self) -> str:
        """How many runs are done, and how long the rest may take."""
        done, total = sum(r.ended for r in self._rows.values()), len(self._rows) * self._seeds
        left = ""
        if self._run_s and done < total:
            left = f", about {duration(fmean(self._run_s) * (total - done - self._fraction))} left"
        return f"{done} of {total} runs{left}"


class LiveStudy(_Study):
    """A table that redraws itself."""

    def __init__(self, console: Console, variants: Sequence[str], seeds: int) -> None:
        super().__init__(console, variants, seeds)
        self._text = ""
        self._live = Live(console=console, get_renderable=self._drawn, refresh_per_second=1)

    def start(self) -> None:
        super().start()
        self._live.start()

    def begin(self, variant: str, seed: int) -> None:
        super().begin(variant, seed)
        self._text = ""

    def moment(self, text: str, fraction: float) -> None:
        super().moment(text, fraction)
        self._text = text

    def end(self, variant: str, summary: Summary | None, error: str | None) -> None:
        self._end(variant, summary, error)
        if error is not None:
            self.line(f"{self._now} failed: {error}")

    def line(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        self._live.stop()

    def _drawn(self) -> RenderableType:
        table = Table()
        for column in ("variant", "runs", "step time", "mean so far"):
            table.add_column(column)
        for name, row in self._rows.items():
            table.add_row(name, *row.cells(self._seeds))
        return Group(table, Text(f"{self._standing()}; now {self._now}  {self._text}"))


class QuietStudy(_Study):
    """A line for each run."""

    def end(self, variant: str, summary: Summary | None, error: str | None) -> None:
        row = self._end(variant, summary, error)
        if error is not None:
            self.line(f"{self._now} failed: {error}")
            return
        _, ms, score = row.cells(self._seeds)
        self.line(f"{self._now}: so far {ms}, {score}; {self._standing()}")

    def line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        pass


def study_view(console: Console, variants: Sequence[str], seeds: int) -> StudyView:
    """The live table on a terminal that can redraw it, lines elsewhere."""
    kind = LiveStudy if console.is_interactive else QuietStudy
    return kind(console, variants, seeds)
