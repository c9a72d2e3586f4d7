"""The epochs of a summary: a choice of bounded size, as `summary.json` is replaced often.

A run of 500 epochs or fewer keeps all of them. A longer one keeps an even choice (every second,
fourth, eighth ... epoch), and beside it the first, the last and the best epoch, the first one with
a loss that is not finite, and those that were validated in part. `metrics.jsonl` has a line for
every epoch.
"""

from __future__ import annotations

import math

from mprun.records.run_record import Epoch, Metric, number

MOST_EPOCHS = 500
"""Of the even choice."""


class EpochHistory:
    """Chooses the epochs that a summary shows.

    Args:
        metric: decides which epoch is the best: by its validation, else by its training.
        most: epochs of the even choice.
    """

    def __init__(self, metric: Metric, most: int = MOST_EPOCHS) -> None:
        self._metric, self._most = metric, most
        self._even: list[Epoch] = []
        self._stride = 1
        self._special: list[Epoch] = []
        """The first one with a loss that is not finite, and those validated in part."""
        self._best: Epoch | None = None
        self._best_score = -math.inf
        self.last: Epoch | None = None

    def add(self, epoch: Epoch) -> None:
        """The next epoch; one that was added before is ignored."""
        if self.last is not None and epoch.epoch <= self.last.epoch:
            return
        self.last = epoch
        if (epoch.epoch - 1) % self._stride == 0:
            self._even.append(epoch)
        if len(self._even) > self._most:
            self._stride *= 2
            self._even = [x for x in self._even if (x.epoch - 1) % self._stride == 0]
        if epoch.validation.samples is not None or self._is_first_broken(epoch):
            self._special.append(epoch)
        if (score := self._score(epoch)) > self._best_score:
            self._best, self._best_score = epoch, score

    def epochs(self) -> list[Epoch]:
        """Those kept, in order."""
        single = [x for x in (self._best, self.last) if x is not None]
        kept = {x.epoch: x for x in (*self._even, *self._special, *single)}
        return [kept[epoch] for epoch in sorted(kept)]

    def _is_first_broken(self, epoch: Epoch) -> bool:
        return _is_broken(epoch) and not any(map(_is_broken, self._special))

    def _score(self, epoch: Epoch) -> float:
        """The metric, signed so that more is better; minus infinity if there is none."""
        for scores in (epoch.validation, epoch.train):
            value = scores.value(self._metric.name)
            if value is not None:
                score = number(value) if self._metric.higher_is_better else -number(value)
                return score if math.isfinite(score) else -math.inf
        return -math.inf


def _is_broken(epoch: Epoch) -> bool:
    """Whether one of its losses is not finite."""
    losses = (epoch.train.loss, epoch.validation.loss)
    return any(x is not None and not math.isfinite(number(x)) for x in losses)
