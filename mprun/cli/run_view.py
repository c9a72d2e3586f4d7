"""What commands print of one run: its header, its progress, its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mprun.records.console import RunProgress, print_line, print_table
from mprun.records.run_record import Summary
from mprun.study.report import tables
from mprun.train.callbacks import Progress

if TYPE_CHECKING:
    from torch import nn

    from mprun.train.loop import Limits


class RunView(Progress):
    """Prints a header before the run, its progress and its messages.

    Args:
        console: where it is printed.
        limits: when the run ends.
        planned_steps: optimizer steps if time does not run out, or None.
        init_from: the source of the initial weights, or None if they are drawn.
        layer_rows: gives name, kind, stored and computing dtype of each layer of a prepared model;
            nothing if all layers are alike.
    """

    def __init__(
        self,
        console: Console,
        limits: Limits,
        planned_steps: int | None,
        init_from: str | None,
        layer_rows: Callable[[nn.Module], Iterable[tuple[str, str, str, str]]],
    ) -> None:
        progress = RunProgress(console, limits.epochs, planned_steps)
        super().__init__(progress, planned_steps, limits.max_time_s)
        self._console, self._init_from, self._layer_rows = console, init_from, layer_rows

    def on_start(self, summary: Summary, folder: Path) -> None:
        for line in (*tables.header(summary), f"record: {folder}"):
            print_line(self._console, line)
        if self._init_from is not None:
            print_line(self._console, f"weights: {self._init_from}")

    def on_train_start(self, model: nn.Module, elapsed_s: float) -> None:
        if rows := self._layer_rows(model):
            print_table(self._console, tables.layers(rows))
        super().on_train_start(model, elapsed_s)

    def on_message(self, text: str) -> None:
        print_line(self._console, text)
