"""The progress of a study: a live table on a terminal, a line for each run anywhere else."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from mprun.records.console import ProgressDisplay, duration
from mprun.records.console.fitted_table import FittedTable, text_column
from mprun.records.console.formatting import substitution_label
from mprun.records.run_record import Summary
from mprun.study.compare.load import SPLITS, score

FIGURES = re.compile(r"\d[\d.,]*")  # What differs between warnings that are alike


@dataclass
class _VariantProgress:
    """The results of a variant's runs so far."""

    step_ms: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    metric: str = ""
    planned: int = 0
    label: str = ""  # The label of its times: EMULATED, or the ops that were computed in float32
    ended: int = 0
    failed: int = 0

    def add(self, summary: Summary | None, error: str | None) -> None:
        self.ended += 1
        self.failed += error is not None
        if summary is None or error is not None:
            return
        emulated = summary.execution == "emulated"
        self.label = "EMULATED" if emulated else substitution_label([summary])
        if (ms := summary.step_time_ms.median) is not None:
            self.step_ms.append(ms)
        self.metric, score = score_of(summary)
        if score is not None:
            self.scores.append(score)

    def cells(self) -> list[str]:
        runs = f"{self.ended}/{self.planned}" + (f", {self.failed} failed" if self.failed else "")
        ms = f"{median(self.step_ms):.2f} ms {self.label}".rstrip() if self.step_ms else "-"
        score = f"{self.metric} {fmean(self.scores):.4f}" if self.scores else "-"
        return [runs, ms, score]


def score_of(summary: Summary) -> tuple[str, float | None]:
    """A run's metric and its value on test data, else on validation data, else on training data."""
    values = (score(summary, split) for split in SPLITS)
    return summary.metric.name, next((x for x in values if x is not None), None)


class StudyProgress(ProgressDisplay):
    """The progress of a study's runs.

    Args:
        console: where it is shown.
        variants: the names of the variants.
        seeds: how many runs each variant has.
        processes: how many processes run them at once.
        verbose: whether warnings and speeds are shown when a run begins, each once; else alike
            warnings are one line at the end, with their count.
    """

    def __init__(
        self,
        console: Console,
        variants: Sequence[str],
        seeds: int,
        processes: int = 1,
        verbose: bool = False,
    ) -> None:
        self._variants = {name: _VariantProgress(planned=seeds) for name in variants}
        self._run_s: list[float] = []
        self._ended: set[str] = set()
        self._processes = processes
        self._run, self._text, self._fraction = "", "", 0.0
        self._verbose, self._shown = verbose, set[str]()
        self._warnings: dict[str, list[str]] = {}
        self._failed: dict[str, str] = {}
        # Once a second: a redraw takes CPU time from the run that is measured
        live = Live(console=console, get_renderable=self._table, refresh_per_second=1)
        super().__init__(console, live)

    def begin(self, variant: str, seed: int) -> None:
        """A run starts."""
        self._run, self._text, self._fraction = f"{variant} seed {seed}", "", 0.0
        self._run_started_s = time.monotonic()

    def update(self, text: str, fraction: float) -> None:
        """The current run took steps; `fraction` of it is done."""
        self._text, self._fraction = text, fraction

    def end(self, variant: str, summary: Summary | None, error: str | None) -> None:
        """A run ended; only the first time counts."""
        if self._run in self._ended:
            return
        self._ended.add(self._run)
        elapsed_s = time.monotonic() - self._run_started_s  # short if an earlier process ran it
        self._run_s.append(max(elapsed_s, 0.0 if summary is None else summary.wall_time_s))
        self._fraction = 0.0  # the run counts as done now
        runs = self._variants[variant]
        runs.add(summary, error)
        if error is not None:
            # Often all runs of a mode fail alike: the reason is shown once
            first = self._failed.setdefault(FIGURES.sub("", error), self._run)
            why = f": {error}" if first == self._run else f", for the same reason as {first}"
            self.line(f"{self._run} failed{why}")
        elif self._live is None:  # no terminal: a line in place of the table
            _, ms, score = runs.cells()
            self.line(f"{self._run}: so far {ms}, {score}; {self._remaining()}")

    def notices(self, mode: str, warnings: Iterable[str], speed: str) -> None:
        """What is to be known of the run that begins: its warnings, how its speed was chosen."""
        texts = [f"warning: {text}" for text in warnings]
        if not self._verbose:
            for text in texts:
                alike = FIGURES.sub("", text.replace(mode, ""))
                self._warnings.setdefault(alike, []).append(text)
            return
        texts += [f"{mode}, {speed}"] if speed else []
        for text in dict.fromkeys(x for x in texts if x not in self._shown):
            self._shown.add(text)
            self.line(text)

    def stop(self) -> None:
        """End the live display, and show the warnings of runs."""
        super().stop()
        for first, *others in self._warnings.values():
            self.line(first + (f" (in {len(others) + 1} runs)" if others else ""))
        self._warnings.clear()

    def wait_for(self, runs: Sequence[str]) -> None:
        """Other processes are at these runs."""
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        self._run, self._text, self._fraction = f"{runs[0]}{more}, in other processes", "", 0.0
        self.status(f"{self._remaining()}; waiting for {self._run}")

    def drop(self, variants: Iterable[str]) -> None:
        """These variants have no further runs."""
        for name in variants:
            self._variants[name].planned = self._variants[name].ended  # else the time left is wrong

    def _remaining(self) -> str:
        """The number of runs that are done, and an estimate of the time left."""
        done = sum(runs.ended for runs in self._variants.values())
        total = sum(runs.planned for runs in self._variants.values())
        left = ""
        if self._run_s and done < total:
            run_s = fmean(self._run_s) / self._processes
            left = f", about {duration(run_s * (total - done - self._fraction))} left"
        return f"{done} of {total} runs{left}"

    def _table(self) -> RenderableType:
        table = FittedTable(
            "",
            text_column("variant"),
            text_column("runs"),
            text_column("step time", 1),
            text_column("mean so far"),
            elsewhere="the report at the end",
        )
        for name, runs in self._variants.items():
            table.add_row(name, *runs.cells())
        return Group(table, Text(f"{self._remaining()}; now {self._run}  {self._text}"))
