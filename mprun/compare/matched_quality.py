"""Time and samples to equal quality: whether a faster step buys anything.

A mode that is 1.2 times as fast per step and needs 1.2 times the steps buys nothing. So each pair
of runs of equal seed is compared at the lowest validation loss that *both* reach: the higher one of
their two lowest. Neither run is then cut off before it, and exchanging the two inverts the ratio,
so equal variants have a mean ratio of 1.

    best so far     the lowest validation loss up to a number of samples; between two validations
                    it is interpolated linearly
    samples         at which the best so far reaches the common loss
    ratio           the variant's samples over the baseline's; of the time: the ratio of samples
                    over the ratio of samples per second (evaluation is no part of that)

Ratios are geometric means over pairs with a 95 % interval. A run with fewer than `FEWEST`
validations has no curve; neither has one on a stream, whose epochs have no known size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from mprun.compare.comparison import Estimate
from mprun.compare.statistics import geometric_mean
from mprun.records.run_record import Summary, number

FEWEST = 4


class LossPoint(NamedTuple):
    """A validation."""

    samples: float
    """That were trained on before it, repeated ones counted."""
    best_loss: float
    """The lowest validation loss so far."""


class EqualLoss(NamedTuple):
    """A variant at the validation loss that it and the baseline reach, over the baseline."""

    samples: Estimate | None
    time: Estimate | None


def equal_loss(pairs: Sequence[tuple[Summary, Summary]], no_interval: bool) -> EqualLoss:
    """Samples and time to equal validation loss.

    Args:
        pairs: the summaries of the variant and of the baseline, of each seed in common.
        no_interval: whether the spread of times is no measure of the ratio's error.
    """
    samples, times = [], []
    for own, base in pairs:
        ratio = samples_ratio(curve(own), curve(base))
        if ratio is None:
            continue
        samples.append(ratio)
        if own.samples_per_second and base.samples_per_second:
            times.append(ratio * base.samples_per_second / own.samples_per_second)
    time = geometric_mean(times) if times else None
    if time is not None and no_interval:
        time = time._replace(interval=None)
    return EqualLoss(geometric_mean(samples) if samples else None, time)


def curve(summary: Summary) -> list[LossPoint]:
    """The validations of a run on all samples; empty where there are too few."""
    of_epoch, trained = summary.data.train_samples, summary.steps * summary.batch_size
    points: list[LossPoint] = []
    for epoch in summary.history:
        loss = epoch.validation.loss
        whole = loss is not None and epoch.validation.samples is None
        if not whole or not of_epoch or not math.isfinite(value := number(loss)):  # type: ignore[arg-type]
            continue
        best = min(value, points[-1].best_loss) if points else value
        points.append(LossPoint(min(epoch.epoch * of_epoch, trained or math.inf), best))
    return points if len(points) >= FEWEST else []


def samples_ratio(own: Sequence[LossPoint], base: Sequence[LossPoint]) -> float | None:
    """The samples of a run over the baseline's, to the lowest loss that both reach."""
    if not own or not base:
        return None
    loss = max(own[-1].best_loss, base[-1].best_loss)
    return samples_to(own, loss) / samples_to(base, loss)


def samples_to(points: Sequence[LossPoint], loss: float) -> float:
    """The samples at which the best loss so far reaches `loss`, which it does."""
    if points[0].best_loss <= loss:
        return points[0].samples
    for before, after in pairwise(points):
        if after.best_loss <= loss:
            share = (before.best_loss - loss) / (before.best_loss - after.best_loss)
            return before.samples + share * (after.samples - before.samples)
    return points[-1].samples
