"""Records a run's floating-point exceptions: counts, lines of metrics.jsonl, fp_exceptions.json."""

from __future__ import annotations

from collections.abc import Callable

from mprun.numerics.nonfinite import FpException, RunExceptions, StepOutcome, finding_lines
from mprun.records.run_folder import RunFolder
from mprun.records.run_record import FpExceptionsRow, Status
from mprun.train.callbacks import Callback

SCHEMA_VERSION = 1
EVENTS = 1000
"""Findings and expected exceptions after which no more events are written; counting continues."""


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
            self._folder.fp_exceptions(file)


def event_row(exception: FpException) -> dict[str, object]:
    """An exception's line in metrics.jsonl; fp_exceptions.json has the rest."""
    columns = ("step", "verdict", "kind", "op", "phase", "module", "location", "process")
    row = {name: getattr(exception, name) for name in columns}
    if exception.process is None:
        del row["process"]
    return {"what": row.pop("kind"), "kind": "event", "event": "fp_exception", **row}
