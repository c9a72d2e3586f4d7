"""Means over the samples of an epoch or a data set."""

from __future__ import annotations

from mprun.readings import Reading
from mprun.record import Scores

NO_SCORES: Scores = {"loss": None, "accuracy": None}


class Sums:
    """Sums over the samples of an epoch that become means; epoch 0 is none."""

    def __init__(self) -> None:
        self.epoch = 0
        self.loss = 0.0
        self.correct: int | None = None
        self.samples = 0

    def add_all(self, readings: list[Reading], sizes: list[int]) -> None:
        """Add the readings of batches of these sizes; empties `sizes`."""
        for reading, size in zip(readings, sizes, strict=True):
            self.add(reading, size)
        sizes.clear()

    def add(self, reading: Reading, size: int) -> None:
        """Add a batch; one whose step was skipped trained nothing and does not count."""
        if reading.skipped:
            return
        self.loss += reading.loss * size
        self.samples += size
        if reading.correct is not None:
            self.correct = (self.correct or 0) + reading.correct

    def scores(self) -> Scores:
        """The means."""
        if not self.samples:
            return NO_SCORES
        accuracy = None if self.correct is None else self.correct / self.samples
        return {"loss": self.loss / self.samples, "accuracy": accuracy}
