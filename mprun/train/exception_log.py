"""Records a run's floating-point exceptions, and what the guard of products found.

Both leave lines of metrics.jsonl, a row of the summary and a file: fp_exceptions.json,
guard_layers.yaml. Of several processes, each knows all exceptions, and all respond alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from mprun.precision.gemm_guard import GemmFinding, GemmGuard
from mprun.records.files import write_json
from mprun.records.layer_values import guard_layers
from mprun.records.run_folder import GUARD_LAYERS, RunFolder
from mprun.records.run_record import FpExceptionsRow, Status, Summary
from mprun.train.callbacks import Callback, StepLine
from mprun.train.parallel.ranks import Ranks
from mprun.watch.nonfinite import FpException, RunExceptions, StepOutcome, finding_lines

SCHEMA_VERSION = 1
# Findings and expected exceptions after which no more events are written; counting continues
EVENTS = 1000


class ExceptionLog(Callback):
    """Records the exceptions of each step.

    Args:
        exceptions: the run's; its report has all of them so far.
        row: the summary's counts, which are updated; None if the run does not detect exceptions.
        folder: the run's folder.
        recorder: gets an event for each exception.
        show: prints a line.
    """

    def __init__(
        self,
        exceptions: RunExceptions,
        row: FpExceptionsRow | None,
        folder: RunFolder,
        recorder: Callback,
        show: Callable[[str], None],
    ) -> None:
        self._report, self._row = exceptions.report, row
        self._folder, self._recorder, self._show = folder, recorder, show

    def on_step_end(self, outcome: StepOutcome) -> None:
        """Write events and show new findings, unless the error that ends the run shows them."""
        counts = self._report.counts
        if counts["finding"] + counts["expected"] <= EVENTS:
            for exception in outcome.exceptions:
                if exception.verdict != "absorbed":
                    self._recorder.on_event(event_row(exception))
        if outcome.new_findings and outcome.stop_reason is None:
            for line in finding_lines(outcome.new_findings):
                self._show(line)
            self._write()

    def on_end(self, status: Status) -> None:
        self._write()

    def _write(self) -> None:
        """Update the summary and the file."""
        if self._row is not None:
            vars(self._row).update(self._report.counts, dropped_steps=self._report.dropped_steps)
            file = {"schema_version": SCHEMA_VERSION, **self._report.state_dict()}
            write_json(self._folder.path / "fp_exceptions.json", file)


def event_row(exception: FpException) -> dict[str, object]:
    """An exception's line in metrics.jsonl; fp_exceptions.json has the rest."""
    columns = ("step", "verdict", "kind", "op", "phase", "module", "location", "process")
    row = {name: getattr(exception, name) for name in columns}
    if exception.process is None:
        del row["process"]
    return {"what": row.pop("kind"), "kind": "event", "event": "fp_exception", **row}


def of_all_processes(ranks: Ranks, own: Iterable[FpException]) -> tuple[FpException, ...]:
    """The exceptions of a step in all processes, each with the number of its process.

    Gradients are summed, so a NaN of one process appears in the others from nowhere. Where one
    process has seen an op, what came from nowhere is left out.
    """
    if ranks.size == 1:
        return tuple(own)
    every = [
        replace(exception, process=number)
        for number, exceptions in enumerate(ranks.gather([*own]))
        for exception in exceptions
    ]
    known = [exception for exception in every if exception.has_op]
    return tuple(known or every)


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
            self._folder.write(GUARD_LAYERS, guard_layers(self._summary))

    def state_dict(self) -> dict[str, Any]:
        """Plain values for `load_state_dict`."""
        return {"events": self._count, **self._guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._count = int(state["events"])
        self._guard.load_state_dict(state)
