"""The figures of steps over processes, and when they are added up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mprun.train import sums as module
from mprun.train.parallel.ranks import Ranks
from mprun.train.sums import GROWTH, ProcessStepSums, StepMetrics, StepSums, step_sums


class TwoRanks(Ranks):
    """This process beside one whose answers are given."""

    size = 2

    def __init__(self, *others: Any) -> None:
        self.others = [*others]

    def gather(self, value: Any) -> list[Any]:
        return [value, self.others.pop(0)]


def step(loss: float, correct: int | None = None, **parts: float) -> StepMetrics:
    return StepMetrics(loss, correct, loss_scale=8.0, skipped=True, parts=parts)


def test_one_process_keeps_its_figures() -> None:
    own = [step(0.1, 3, kl=2.0), step(math.nan)]
    sums = step_sums(Ranks())
    assert type(sums) is StepSums
    assert sums.over_processes(own, True) == (own, True)
    assert sums.is_due(True)
    assert not sums.is_due(False)


def test_losses_and_counts_are_added_up() -> None:
    ours, theirs = (torch.tensor(x).item() for x in (0.1, 0.2))  # float32's numbers
    sums = ProcessStepSums(TwoRanks((False, 1.0, [(theirs, 5, {}), (math.inf, 0, {})])))
    both, stops = sums.over_processes([step(ours, 3), step(1.0, 2)], stop=False)
    assert not stops
    total = torch.tensor(ours, dtype=torch.float64) + theirs
    assert both == [
        StepMetrics(total.float().item(), 8, 8.0, True),
        StepMetrics(math.inf, 2, 8.0, True),
    ]


def test_losses_of_float64_keep_their_digits() -> None:
    sums = ProcessStepSums(TwoRanks((False, 1.0, [(0.2, 5, {"a": 0.2})])))
    (both,), _ = sums.over_processes([step(0.1, 3, a=0.1)], stop=False)
    assert (both.loss, both.parts) == (0.1 + 0.2, {"a": 0.1 + 0.2})


def test_all_stop_where_one_is_asked_to() -> None:
    assert ProcessStepSums(TwoRanks((True, 1.0, []))).over_processes([], stop=False) == ([], True)


def test_parts_that_another_process_has_are_learnt() -> None:
    """This process has a part `a`, the other one a part `b`."""
    sums = ProcessStepSums(TwoRanks((False, 1.0, [(0.5, None, {"b": 0.25})])))
    (both,), _ = sums.over_processes([step(0.5, a=2.0)], stop=False)
    assert both.parts == {"a": 2.0, "b": 0.25}
    assert both.loss == 1.0


def test_processes_meet_after_steps_that_take_a_quarter_of_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    ranks = TwoRanks()
    sums = ProcessStepSums(ranks)
    lengths = []
    for _ in range(6):
        steps = 0
        while True:
            now[0] += 2**-7  # a step
            steps += 1
            if sums.is_due(False):
                break
        lengths.append(steps)
        # the other process proposes as many steps as this one
        wanted = steps * min(GROWTH, 0.25 / (now[0] - sums._met_at))
        ranks.others = [(False, wanted, [])]
        sums.over_processes([], stop=False)
    assert lengths == [1, 4, 16, 32, 32, 32]
