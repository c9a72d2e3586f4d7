"""A run's floating-point exceptions: on screen, in metrics.jsonl, in a file of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mprun.numerics.exceptions import Found, FpException, Outcome
from mprun.numerics.exceptions.found import told
from mprun.records.run_record import RunFolder, Summary
from mprun.train.recorder import Journal

SCHEMA_VERSION = 1
EVENTS = 1000
"""Findings and expected ones after which no more lines are written; the counts go on."""


class ExceptionLog:
    """Is told after each step that had any.

    Args:
        summary: its row of counts is kept true; None there: nothing is looked for.
        found: what there was so far.
        folder: the run's folder.
        journal: the run's journal.
        say: shows a line.
    """

    def __init__(
        self,
        summary: Summary,
        found: Found,
        folder: RunFolder,
        journal: Journal,
        say: Callable[[str], None],
    ) -> None:
        self._summary, self._found = summary, found
        self._folder, self._journal, self._say = folder, journal, say

    def tell(self, outcome: Outcome, news: Sequence[FpException]) -> None:
        """A step had exceptions; `news` are those of its findings that are the first of a kind."""
        counts = self._found.counts
        if counts["finding"] + counts["expected"] <= EVENTS:
            for exception in outcome.exceptions:
                if exception.verdict != "absorbed":
                    self._journal.event(event_row(exception))
        for line in told(news):
            self._say(line)
        if news:
            self.write()

    def write(self) -> None:
        """Bring the summary and the file up to date, where something is looked for."""
        row = self._summary.fp_exceptions
        if row is not None:
            counts = self._found.counts
            row.finding, row.expected = counts["finding"], counts["expected"]
            row.absorbed, row.dropped_steps = counts["absorbed"], self._found.dropped_steps
            self._folder.fp_exceptions(
                {"schema_version": SCHEMA_VERSION, **self._found.state_dict()}
            )


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
