"""Means over the samples of an epoch or a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from mprun.data import Batch
from mprun.errors import RunFailedError
from mprun.parallel.ranks import Ranks
from mprun.recipe import Recipe
from mprun.records.run_record import Number, Scores, number
from mprun.train.loss_terms import PREFIX
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


def with_metrics(scores: Scores, values: Mapping[str, Number | None]) -> Scores:
    """`scores` with the values of the recipe's metrics; one called accuracy is the accuracy."""
    if not values:
        return scores
    accuracy = scores.accuracy
    if (own := values.get("accuracy")) is not None and 0 <= number(own) <= 1:
        accuracy = number(own)
    return replace(scores, accuracy=accuracy, metrics={**(scores.metrics or {}), **values})


class Sums:
    """Sums over the samples of an epoch, for their means; epoch 0 means none.

    A mean loss is weighted by what the recipe counts, an accuracy by samples.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.loss = 0.0
        self.correct: int | None = None
        self.samples = 0
        self.weight = 0.0
        self.parts: dict[str, float] = {}

    def add_all(self, metrics: list[StepMetrics], sizes: list[tuple[int, float]]) -> None:
        """Add batches of these samples and weights; empties `sizes`."""
        for batch, (size, weight) in zip(metrics, sizes, strict=True):
            self.add(batch, size, weight)
        sizes.clear()

    def add(self, metrics: StepMetrics, size: int, weight: float | None = None) -> None:
        """Add a batch, unless its step was skipped.

        Args:
            metrics: of the batch.
            size: its samples.
            weight: how much its loss counts; None: its samples.

        Raises:
            RunFailedError: the number of right samples is not from 0 to `size`.
        """
        if metrics.skipped:
            return
        weight = size if weight is None else weight
        self.samples += size
        if metrics.loss is not None and weight:  # a mean over nothing is NaN
            self.loss += metrics.loss * weight
            self.weight += weight
            for name, part in metrics.parts.items():
                self.parts[name] = self.parts.get(name, 0.0) + part * weight
        if metrics.correct is not None:
            if not 0 <= metrics.correct <= size:
                raise RunFailedError(not_a_count(f"{metrics.correct:,}", size))
            self.correct = (self.correct or 0) + metrics.correct

    def add_up(self, ranks: Ranks) -> None:
        """Add the sums of all processes up; each has seen other samples."""
        if ranks.size == 1:
            return
        names = sorted({name for names in ranks.gather([*self.parts]) for name in names})
        counts = self.correct is not None
        own = [self.loss, self.weight, self.samples, counts, self.correct or 0]
        totals = ranks.totals([*own, *(self.parts.get(name, 0.0) for name in names)])
        self.loss, self.weight, samples, counted, correct, *parts = totals
        self.samples, self.correct = round(samples), round(correct) if counted else None
        self.parts = dict(zip(names, parts, strict=True))

    def scores(self) -> Scores:
        """The means."""
        if not self.samples:
            return NO_SCORES
        accuracy = None if self.correct is None else self.correct / self.samples
        if not self.weight:
            return Scores(loss=None, accuracy=accuracy)
        parts: dict[str, Number | None] | None = None
        if self.parts:
            parts = {f"{PREFIX}{name}": part / self.weight for name, part in self.parts.items()}
        return Scores(loss=self.loss / self.weight, accuracy=accuracy, metrics=parts)

    def state_dict(self) -> dict[str, Any]:
        """The sums, as part of a checkpoint; the parts only where the loss has some."""
        return {k: v for k, v in vars(self).items() if k != "parts" or v}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the sums of a checkpoint; one of 0.1 weighted by samples."""
        vars(self).update({"weight": float(state["samples"]), "parts": {}, **state})
        self.parts = dict(self.parts)
