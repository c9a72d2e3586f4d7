"""The epochs of a summary: all of a short run, a bounded choice of a long one."""

from __future__ import annotations

from typing import Any

from mprun.records.run_record import Epoch, Metric, Scores
from mprun.train.recorder import EpochHistory

LOSS = Metric(name="loss", higher_is_better=False)
ACCURACY = Metric(name="accuracy", higher_is_better=True)


def epoch(n: int, training: float = 1.0, **validation: Any) -> Epoch:
    scores = {"loss": None, "accuracy": None, **validation}
    train = Scores(loss=training, accuracy=0.5)
    return Epoch(epoch=n, train=train, validation=Scores(**scores))


def chosen(metric: Metric, epochs: list[Epoch], most: int = 8) -> list[int]:
    history = EpochHistory(metric, most)
    for one in epochs:
        history.add(one)
    return [x.epoch for x in history.epochs()]


def test_a_short_run_keeps_every_epoch() -> None:
    assert chosen(LOSS, [epoch(n) for n in range(1, 9)]) == list(range(1, 9))


def test_a_long_run_keeps_an_even_choice_with_its_ends() -> None:
    epochs = [epoch(n) for n in range(1, 1001)]
    assert chosen(LOSS, epochs[:9]) == [1, 3, 5, 7, 9]
    assert chosen(LOSS, epochs[:16]) == [1, 3, 5, 7, 9, 11, 13, 15, 16]
    assert chosen(LOSS, epochs) == [1, 129, 257, 385, 513, 641, 769, 897, 1000]


def test_the_best_epoch_stays_however_long_the_run_is() -> None:
    by_validation = [epoch(n, 1.0, accuracy=0.9 if n == 78 else 0.1) for n in range(1, 1001)]
    assert 78 in chosen(ACCURACY, by_validation)
    by_training = [epoch(n, 0.25 if n == 78 else 1.0) for n in range(1, 1001)]
    assert 78 in chosen(LOSS, by_training)
    # Validation counts where there is any, and no number is better than NaN.
    both = [epoch(n, 1.0 / n, loss=0.5 if n == 78 else float("nan")) for n in range(1, 1001)]
    assert 78 in chosen(LOSS, both)


def test_the_first_loss_that_is_not_finite_stays_as_an_alarm() -> None:
    losses = {n: "nan" if n in (78, 80, 82) else 1.0 for n in range(1, 1001)}
    found = chosen(LOSS, [epoch(n, 1.0, loss=loss) for n, loss in losses.items()])
    assert 78 in found
    assert not {80, 82} & {*found}


def test_an_epoch_counts_once() -> None:
    epochs = [epoch(n) for n in (1, 2, 2, 1, 3)]
    assert chosen(LOSS, epochs) == [1, 2, 3]
