"""Means over the samples of an epoch or a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from mprun.data import Batch
from mprun.errors import RunFailedError
from mprun.recipe import Recipe
from mprun.records.run_record import Scores
from mprun.train.metric_readback import StepMetrics

NO_SCORES = Scores(loss=None, accuracy=None)


def count_correct(recipe: Recipe, outputs: Sequence[Any], batch: Batch) -> Tensor | None:
    """The samples of a batch that `recipe.correct` counts as right; None for a regression.

    Raises:
        RunFailedError: it is something else. The range of the number is checked when it is read
            (`Sums.add`), so that nothing waits for the device here.
    """
    counts = [
        _checked(recipe.correct(output, part.content), part.size)
        for output, part in zip(outputs, batch.parts, strict=True)
    ]
    known = [count for count in counts if count is not None]
    return sum(known[1:], known[0]) if known else None


def _checked(correct: Any, size: int) -> Tensor | None:
    """A user's code may return anything."""
    if correct is None:
        return None
    is_scalar = isinstance(correct, Tensor) and correct.numel() == 1
    if is_scalar and not (correct.is_floating_point() or correct.is_complex()):
        return cast(Tensor, correct)
    raise RunFailedError(not_a_count(_shown(correct), size))


def _shown(value: object) -> str:
    """A short text for a value: a scalar's number, a tensor's shape."""
    if not isinstance(value, Tensor):
        return f"{value!r} ({type(value).__name__})"
    dtype = str(value.dtype).removeprefix("torch.")
    if value.numel() == 1:
        return f"{value.item():g} ({dtype})"
    return f"a tensor of shape {list(value.shape)} ({dtype})"


def not_a_count(received: str, size: int) -> str:
    """The message for a recipe whose `correct` does not count the `size` samples of a batch."""
    return (
        f"accuracy: the recipe's correct returned {received} for a batch of {size:,} samples; it "
        f"must return the number of samples that are right, an integer scalar from 0 to {size:,}: "
        "count a sample with several targets once, or judge by the loss (METRIC = "
        '("loss", "min"), and correct returns None)'
    )


class Sums:
    """Sums over the samples of an epoch, for their means; epoch 0 means none."""

    def __init__(self) -> None:
        self.epoch = 0
        self.loss = 0.0
        self.correct: int | None = None
        self.samples = 0

    def add_all(self, metrics: list[StepMetrics], sizes: list[int]) -> None:
        """Add batches of these sizes; empties `sizes`."""
        for batch, size in zip(metrics, sizes, strict=True):
            self.add(batch, size)
        sizes.clear()

    def add(self, metrics: StepMetrics, size: int) -> None:
        """Add a batch, unless its step was skipped.

        Raises:
            RunFailedError: the number of right samples is not from 0 to `size`.
        """
        if metrics.skipped:
            return
        self.loss += metrics.loss * size
        self.samples += size
        if metrics.correct is not None:
            if not 0 <= metrics.correct <= size:
                raise RunFailedError(not_a_count(f"{metrics.correct:,}", size))
            self.correct = (self.correct or 0) + metrics.correct

    def scores(self) -> Scores:
        """The means."""
        if not self.samples:
            return NO_SCORES
        accuracy = None if self.correct is None else self.correct / self.samples
        return Scores(loss=self.loss / self.samples, accuracy=accuracy)
