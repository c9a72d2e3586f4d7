"""What `correct` returns counts samples, and means are over them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from mprun.errors import RunFailedError
from mprun.train.sums import StepMetrics, Sums
from tests.train.trainers import Base, samples, trainer_of


class Counted(Base):
    """Judged by the accuracy; the test says what `correct` makes of the right samples [B]."""

    METRIC = ("accuracy", "max")

    def __init__(self, count: Any) -> None:
        self._count = count

    def correct(self, output: Tensor, batch: Any) -> Any:
        return self._count(output.argmax(1).eq(batch[1]))


def test_a_count_of_samples_is_an_accuracy() -> None:
    training, log = trainer_of(Counted(Tensor.sum), samples(4), validation=samples(4, 3))
    training.fit()
    for epoch in log.epochs:
        for scores in (epoch.train, epoch.validation):
            assert scores.accuracy in (0, 0.25, 0.5, 0.75, 1)


@pytest.mark.parametrize(
    ("count", "received"),
    [
        (lambda right: right.sum() + 5, ""),  # above 4, however many are right
        (lambda right: -right.sum() - 1, "-"),
        (lambda right: right.float().mean(), r"\(float32\)"),
        (lambda right: right, r"a tensor of shape \[4\] \(bool\)"),
    ],
    ids=["more", "negative", "mean", "vector"],
)
def test_what_is_no_count_of_samples_is_refused_by_name(count: Any, received: str) -> None:
    training, _ = trainer_of(Counted(count), samples(4))
    text = f"the recipe's correct returned .*{received}.* for a batch of 4 samples; it must return"
    with pytest.raises(RunFailedError, match=text) as caught:
        training.fit()
    assert "an integer scalar from 0 to 4" in str(caught.value)
    assert 'metrics() that returns {"accuracy": mprun.metrics.Accuracy()}' in str(caught.value)


def test_skipped_steps_do_not_count_and_losses_are_weighted() -> None:
    sums = Sums()
    sums.add(StepMetrics(2.0, 1), 4, weight=1.0)
    sums.add(StepMetrics(4.0, 3, parts={"a": 4.0}), 4, weight=3.0)
    sums.add(StepMetrics(9.0, 4, skipped=True), 4)
    scores = sums.scores()
    assert (scores.loss, scores.accuracy) == (3.5, 0.5)
    assert scores.metrics == {"loss.a": 3.0}
    assert sums.samples == 8
