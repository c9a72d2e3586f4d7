"""Means over the samples of an epoch or a data set."""

from __future__ import annotations

from mprun.errors import RunFailedError
from mprun.records.run_record import Scores
from mprun.train.metric_readback import Reading

NO_SCORES: Scores = Scores(loss=None, accuracy=None)


def not_a_count(received: str, size: int) -> str:
    """The message about a recipe's `correct` that does not count samples.

    Args:
        received: what it returned.
        size: samples in the batch.
    """
    return (
        f"accuracy: the recipe's correct returned {received} for a batch of {size:,} samples; it "
        f"must return how many of these samples are right, an integer scalar from 0 to {size:,}: "
        'count a sample with several targets once, or judge by the loss (metric = "loss", and '
        "correct returns None)"
    )


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
        """Add a batch; one whose step was skipped trained nothing and does not count.

        Raises:
            RunFailedError: more samples are right than there are, or fewer than none.
        """
        if reading.skipped:
            return
        self.loss += reading.loss * size
        self.samples += size
        if reading.correct is not None:
            if not 0 <= reading.correct <= size:
                raise RunFailedError(not_a_count(f"{reading.correct:,}", size))
            self.correct = (self.correct or 0) + reading.correct

    def scores(self) -> Scores:
        """The means."""
        if not self.samples:
            return NO_SCORES
        accuracy = None if self.correct is None else self.correct / self.samples
        return Scores(loss=self.loss / self.samples, accuracy=accuracy)
