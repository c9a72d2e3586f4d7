"""What `mprun [train]` prints of one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mprun.console import RunProgress, print_line
from mprun.records.run_record import Summary
from mprun.report import tables
from mprun.train.progress import Progress

if TYPE_CHECKING:
    from torch import nn

    from mprun.assemble import Plan


class RunView(Progress):
    """Prints what is about to run, how far it is, and messages."""

    def __init__(self, console: Console, plan: Plan) -> None:
        limits = plan.limits
        progress = RunProgress(console, limits.epochs, plan.planned_steps)
        super().__init__(progress, plan.planned_steps, limits.max_time_s)
        self._console, self._plan = console, plan

    def on_start(self, summary: Summary, folder: Path) -> None:
        for line in (*tables.header(summary), f"record: {folder}"):
            print_line(self._console, line)
        if self._plan.weights.state:
            print_line(self._console, f"weights: {self._plan.config.train.init_from}")

    def on_train_start(self, model: nn.Module, elapsed_s: float) -> None:
        if rows := self._plan.layer_rows(model):
            self._console.print(tables.layers(rows), highlight=False)
        super().on_train_start(model, elapsed_s)

    def on_message(self, text: str) -> None:
        print_line(self._console, text)
