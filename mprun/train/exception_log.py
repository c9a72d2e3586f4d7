"""A run's floating-point exceptions: on screen, in metrics.jsonl, in a file of their own."""

from __future__ import annotations

from collections.abc import Callable

from mprun.numerics.nonfinite import FpException, NonfiniteReport, StepOutcome, finding_lines
from mprun.records.run_folder import RunFolder
from mprun.records.run_record import Summary
from mprun.train.recorder import Journal

SCHEMA_VERSION = 1
EVENTS = 1000
"""Findings and expected exceptions after which no more events are written; counting continues."""


class ExceptionLog:
    """Records the exceptions of each step.

    Args:
        summary: its row of counts is updated; None there: the run inspects nothing.
        report: the exceptions so far.
        folder: the run's folder.
        journal: the run's journal.
        show: prints a line.
    """

    def __init__(
        self,
        summary: Summary,
        report: NonfiniteReport,
        folder: RunFolder,
        journal: Journal,
        show: Callable[[str], None],
    ) -> None:
        self._summary, self._report = summary, report
        self._folder, self._journal, self._show = folder, journal, show

    def on_step_end(self, outcome: StepOutcome) -> None:
        """Write events, and show new findings; an error that ends the run shows them itself."""
        counts = self._report.counts
        if counts["finding"] + counts["expected"] <= EVENTS:
            for exception in outcome.exceptions:
                if exception.verdict != "absorbed":
                    self._journal.event(event_row(exception))
        if outcome.new_findings and outcome.stop_reason is None:
            for line in finding_lines(outcome.new_findings):
                self._show(line)
            self.write()

    def write(self) -> None:
        """Update the summary and the file, if the run inspects its steps."""
        row = self._summary.fp_exceptions
        if row is not None:
            counts = self._report.counts
            row.finding, row.expected = counts["finding"], counts["expected"]
            row.absorbed, row.dropped_steps = counts["absorbed"], self._report.dropped_steps
            file = {"schema_version": SCHEMA_VERSION, **self._report.state_dict()}
            self._folder.fp_exceptions(file)


def event_row(exception: FpException) -> dict[str, object]:
    """An exception's line in metrics.jsonl; fp_exceptions.json has the rest."""
    return {
        "kind": "event",
        "event": "fp_exception",
        "step": exception.step,
        "verdict": exception.verdict,
        "what": exception.kind,
        "op": exception.op,
        "phase": exception.phase,
        "module": exception.module,
        "location": exception.location,
    }
