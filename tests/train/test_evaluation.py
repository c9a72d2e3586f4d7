"""Evaluation of a whole set or a part of it, and timing it without a trace."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from mprun.precision import Precision
from mprun.train.data import Batches, BatchForm, TensorBatches
from mprun.train.evaluation import TRIAL_BATCHES, Evaluator
from tests.train.trainers import CPU, Tiny, samples


class Restless(nn.Linear):
    """Draws random numbers, changes a buffer and takes 10 ms (50 the first time)."""

    def __init__(self, now: list[float]) -> None:
        super().__init__(4, 3)
        self.now = now
        self.register_buffer("calls", torch.zeros(1))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        torch.rand(3)
        self.now[0] += 0.05 if self.seen == 1 else 0.01
        return super().forward(x)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the evaluation, which passes in `Restless` alone."""
    found = [50.0]
    fake = SimpleNamespace(perf_counter=lambda: found[0])
    monkeypatch.setattr("mprun.train.evaluation.time", fake)
    return found


def evaluator(model: nn.Module, stops: list[int]) -> Evaluator:
    return Evaluator(Tiny(), model, Precision("fp32", device=CPU), lambda: stops.append(1))


def batches(n: int) -> Batches:
    """The first of forty samples, in batches of four."""
    return TensorBatches(samples(40).first(n), 4, BatchForm(), CPU)


def test_a_time_that_is_up_leaves_one_batch() -> None:
    stops: list[int] = []
    model = Tiny().model()
    part = evaluator(model, stops).scores(batches(10), until=time.perf_counter())
    first = evaluator(model, []).scores(batches(4))
    assert part.samples == 4
    assert (part.loss, part.accuracy) == (first.loss, first.accuracy)
    assert len(stops) == 1


def test_timing_leaves_no_trace(now: list[float]) -> None:
    model = Restless(now)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    seconds = evaluator(model, []).seconds_per_sample(batches(10), at_most_s=1e6)
    assert model.seen == TRIAL_BATCHES
    assert seconds == pytest.approx(0.01 / 4)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


def test_timing_ends_early_where_a_batch_is_slow_and_goes_round_a_small_set(
    now: list[float],
) -> None:
    slow, small = Restless(now), Restless(now)
    found = evaluator(slow, []).seconds_per_sample(batches(40), at_most_s=1e-3)
    assert found == pytest.approx(0.05 / 4)
    assert slow.seen == 1
    warm = Restless(now)
    found = evaluator(warm, []).seconds_per_sample(batches(40), at_most_s=0.055)
    assert found == pytest.approx(0.01 / 4)
    assert warm.seen == 2
    found = evaluator(small, []).seconds_per_sample(batches(2), at_most_s=1e6)
    assert found == pytest.approx(0.01 / 2)
    assert small.seen == TRIAL_BATCHES
    assert evaluator(small, []).seconds_per_sample(batches(0), at_most_s=1e6) == 0
