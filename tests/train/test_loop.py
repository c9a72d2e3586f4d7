"""The loop: limits, accumulation, what is timed and reported, broken losses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.errors import RunFailedError
from mprun.precision import NativeArithmetic
from mprun.precision.loss_scale import STATIC_PATIENCE, StaticLossScale
from mprun.train.callbacks import StepLine
from mprun.train.loop import Limits, StopRequestedError, Trainer
from tests.train.trainers import CPU, Tiny, samples, trainer


class Watched(NativeArithmetic):
    """Knows whether its region is entered."""

    inside = False

    @contextmanager
    def region(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False


@pytest.mark.parametrize("micro", [8, 4])
def test_losses_are_computed_with_the_mode_s_arithmetic(
    micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arithmetic, inside, plain = Watched(), [], Tiny.loss

    def loss(self: Tiny, output: Tensor, batch: Any) -> Tensor:
        inside.append(arithmetic.inside)
        return plain(self, output, batch)

    monkeypatch.setattr(Tiny, "loss", loss)
    training, _ = trainer(micro=micro, limits=Limits(1, None, None))
    training.parts.precision.arithmetic = arithmetic
    training.fit()  # which validates too
    training.evaluate(training.parts.test)
    assert len(inside) == (5 if micro == 4 else 3) + 2 * 4
    assert all(inside)


def test_epochs_steps_and_time_each_end_the_run() -> None:
    by_epochs, log = trainer(limits=Limits(2, None, None))
    by_epochs.fit()
    assert (by_epochs.step, by_epochs.epoch, len(log.epochs)) == (6, 2, 2)
    assert len(log.states) == 1  # at the end

    by_steps, log = trainer(limits=Limits(None, 4, None))
    by_steps.fit()
    assert (by_steps.step, by_steps.epoch) == (4, 2)
    assert [x.step for x in log.lines] == [1, 2, 3, 4]

    by_time, log = trainer(limits=Limits(None, None, 1e-9))
    by_time.fit()
    assert by_time.step == 0


@pytest.mark.parametrize(
    ("limits", "planned"),
    [
        (Limits(2, None, None), 6),
        (Limits(2, 4, None), 4),
        (Limits(2, 100, 1.0), 6),
        (Limits(None, 100, None), 100),
        (Limits(None, None, 1.0), None),
    ],
)
def test_planned_steps(limits: Limits, planned: int | None) -> None:
    assert limits.planned_steps(3) == planned


def test_a_partial_last_batch_trains_and_is_not_timed() -> None:
    ours, log = trainer(limits=Limits(1, None, None))
    ours.fit()
    assert [x.timed for x in log.lines] == [True, True, False]


def test_training_scores_are_means_over_samples() -> None:
    ours, log = trainer(n=20, batch=8, limits=Limits(1, None, None), lr=1e-30)
    ours.fit()
    data, model = samples(20), ours.parts.model
    with torch.no_grad():
        output = model(data.inputs)
        loss = nn.functional.cross_entropy(output, data.targets).item()
        accuracy = output.argmax(1).eq(data.targets).float().mean().item()
    train = log.epochs[0].train
    assert train.loss == pytest.approx(loss, rel=1e-5)  # float32 sums in another order
    assert train.accuracy == pytest.approx(accuracy, rel=1e-6)


def test_evaluation_weighs_the_partial_batch_and_leaves_no_gradients() -> None:
    ours, _ = trainer()
    found = ours.evaluate(ours.parts.test)
    data = samples(10)
    with torch.no_grad():
        exact = nn.functional.cross_entropy(ours.parts.model(data.inputs), data.targets).item()
    assert found.loss == pytest.approx(exact, rel=1e-5)  # float32 sums in another order
    assert all(p.grad is None for p in ours.parts.model.parameters())


def test_stopping_reports_every_step_taken() -> None:
    ours, log = trainer(limits=Limits(100, None, None), stop_at=5)
    with pytest.raises(StopRequestedError):
        ours.fit()
    assert len(log.lines) == ours.step > 0


def test_a_broken_loss_ends_the_run_after_it_was_reported() -> None:
    ours, log = trainer(limits=Limits(100, None, None), lr=1e38)
    with pytest.raises(RunFailedError, match=r"the loss became (nan|inf) at step \d+ .*train\.lr"):
        ours.fit()
    assert any(not math.isfinite(x.loss) for x in log.lines)
    assert log.lines[-1].step == ours.step


def test_skipped_steps_end_a_run_only_in_a_row() -> None:
    """Each step that is taken begins the count anew, however many were skipped before."""
    scale = StaticLossScale(1024.0, CPU)
    precision = SimpleNamespace(loss_scale=scale, policy=SimpleNamespace(name="fp16_mixed"))
    loop: Any = SimpleNamespace(parts=SimpleNamespace(precision=precision), _skipped_in_a_row=0)

    def check(step: int, skipped: bool) -> None:
        Trainer._check(loop, StepLine(step, 1, 1.0, 0.1, 1024.0, skipped, 1.0, 0.0, True))

    for step in range(3 * STATIC_PATIENCE):
        check(step, step % 3 < 2)
    for step in range(STATIC_PATIENCE - 1):
        check(step, True)
    with pytest.raises(RunFailedError, match=f"at step 7 .*{STATIC_PATIENCE} steps in a row"):
        check(7, True)
