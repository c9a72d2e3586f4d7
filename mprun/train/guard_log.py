"""Records what the guard of matrix products found: lines, the summary, guard_layers.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mprun.precision.gemm_guard import GemmFinding, GemmGuard
from mprun.records.guard_layers import guard_layers
from mprun.records.run_folder import RunFolder
from mprun.records.run_record import Status, Summary
from mprun.train.callbacks import Callback, StepLine

EVENTS = 1000
"""Findings after which no more events are written; counting continues."""


class GuardLog(Callback):
    """Records the products of each step that passed a threshold.

    Its state is part of every checkpoint, so a resumed run has the record of an uninterrupted one.

    Args:
        guard: the run's.
        summary: its `guard` is updated; nothing is recorded where that is None.
        folder: the run's folder.
        recorder: gets an event for each product of a step; it is notified after this.
    """

    def __init__(
        self, guard: GemmGuard, summary: Summary, folder: RunFolder, recorder: Callback
    ) -> None:
        self._guard, self._summary = guard, summary
        self._folder, self._recorder = folder, recorder
        self._heard: list[GemmFinding] = []
        """Of steps whose lines are not written yet."""
        self._count = 0
        guard.listen(self._hear)

    def _hear(self, finding: GemmFinding) -> None:
        self._count += 1
        if self._count <= EVENTS:
            self._heard.append(finding)

    def on_steps(self, lines: list[StepLine]) -> None:
        epochs = {line.step: line.epoch for line in lines}
        for finding in self._heard:
            if finding.step in epochs:
                self._recorder.on_event(self._event(finding, epochs[finding.step]))
        self._heard = [x for x in self._heard if x.step not in epochs]

    def _event(self, finding: GemmFinding, epoch: int) -> dict[str, Any]:
        """A finding's line in metrics.jsonl."""
        row = {**finding._asdict(), "factors": [*finding.factors], "epoch": epoch}
        return {"kind": "event", "event": "guard", "action": self._guard.action, **row}

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        self._write()

    def on_end(self, status: Status) -> None:
        self._write()

    def _write(self) -> None:
        """Update the summary and the file."""
        if self._summary.guard is not None:
            self._summary.guard.gemms = self._guard.rows
            self._folder.guard_layers(guard_layers(self._summary))

    def state_dict(self) -> dict[str, Any]:
        """Plain values for `load_state_dict`."""
        return {"events": self._count, **self._guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; an empty one is that of a run without a guard."""
        self._count = int(state.get("events", 0))
        self._guard.load_state_dict(state)
