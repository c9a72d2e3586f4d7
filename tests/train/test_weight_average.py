"""The scores of averaged weights, against a loop and a mean written by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mprun.records.run_record import Scores
from mprun.train.loop import Limits
from mprun.train.parallel.layouts import Layout
from mprun.train.weight_average import TOO_EARLY, WeightAverage, average_places
from tests.train.trainers import Tiny, samples, trainer_of

STEPS, BATCH = 60, 8
TRAIN, HELD_OUT, TESTED = samples(20), samples(10, 2), samples(11, 3)


class Normed(Tiny):
    """With statistics, a mask of -inf that is no part of the state, and a frozen weight."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0].to(next(model.parameters()).dtype))

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        model.register_buffer("mask", torch.tensor([0.1, -torch.inf, 0.7]), persistent=False)
        model[3].weight.requires_grad_(False)
        return model


def test_places() -> None:
    assert average_places(30, 5) == (26, 27, 28, 29, 30)
    assert average_places(1000, 5) == (920, 940, 960, 980, 1000)
    assert average_places(64, 4) == (59, 61, 62, 64)  # 6.4 steps, rounded
    assert average_places(3, 5) == (1, 2, 3)
    assert average_places(1000, 1) == (1000,)


@given(planned=st.integers(1, 5000), places=st.integers(1, 100))
def test_places_are_distinct_and_even(planned: int, places: int) -> None:
    found = average_places(planned, places)
    assert len(set(found)) == len(found) == min(planned, places)
    assert found[-1] == planned
    assert found[0] > planned - max(planned / 10, places) >= -places
    gaps = {b - a for a, b in pairwise(found)}
    assert len(gaps) <= 3
    assert max(gaps, default=0) - min(gaps, default=0) <= 2


def batches(data: Any, size: int) -> list[tuple[Tensor, Tensor]]:
    inputs, classes = data.content
    return list(zip(inputs.split(size), classes.split(size), strict=True))


def score(model: nn.Module, data: Any) -> Scores:
    """The mean loss and the share of right samples, in batches of three."""
    loss, right = 0.0, 0
    with torch.no_grad():
        for x, y in batches(data, 3):
            output = model(x.to(next(model.parameters()).dtype))
            loss += nn.functional.cross_entropy(output, y).item() * len(y)
            right += int(output.argmax(1).eq(y).sum())
    return Scores(loss=loss / len(data), accuracy=right / len(data))


def by_hand(recipe: Tiny, dtype: torch.dtype, places: tuple[int, ...]) -> tuple[Scores, Scores]:
    """The scores of the float64 mean of the states after these steps, rounded to the dtype."""
    torch.manual_seed(0)
    model = recipe.model().to(dtype)
    optimizer, taken, states = torch.optim.SGD(model.parameters(), lr=0.1), 0, []
    while taken < STEPS:
        for x, y in batches(TRAIN, BATCH):
            taken += 1
            if taken > STEPS:
                break
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
            optimizer.step()
            if taken in places:
                states.append({k: v.clone() for k, v in model.state_dict().items()})
    mean = {
        name: sum(state[name].double() for state in states) / len(states)
        for name, last in model.state_dict().items()
        if last.is_floating_point()
    }
    model.load_state_dict({**model.state_dict(), **mean})
    model.eval()
    return score(model, HELD_OUT), score(model, TESTED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("places", [1, 5, 13])
def test_the_scores_are_those_of_the_mean_bit_for_bit(places: int, dtype: torch.dtype) -> None:
    recipe = Normed()
    trainer, log = trainer_of(
        recipe,
        TRAIN,
        batch=BATCH,
        validation=HELD_OUT,
        test=TESTED,
        limits=Limits(None, STEPS, None),
        dtype=dtype,
        average_weights=places,
    )
    trainer.fit()
    model = trainer.parts.model
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trainer.test()
    assert log.averaged is not None
    assert trainer.not_averaged is None
    assert log.averaged.places == places
    expected = by_hand(recipe, dtype, average_places(STEPS, places))
    assert (log.averaged.validation, log.averaged.test) == expected
    if places == 1:
        assert log.averaged.validation == trainer.evaluate(trainer.parts.validation)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_what_is_constant_stays_bit_for_bit() -> None:
    model = Normed().model()
    average = WeightAverage(Layout(), 100, 7)
    for step in average_places(100, 7):
        assert average.is_due(step)
        average.add(model)
    before = {k: x.clone() for k, x in (*model.named_parameters(), *model.named_buffers())}
    with average.applied(model) as places:
        assert places == 7
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            assert torch.equal(x, before[name]), name


def test_an_error_in_the_evaluation_leaves_the_model_its_weights() -> None:
    model = nn.Linear(4, 3)
    average = WeightAverage(Layout(), 10, 2)
    average.add(model)
    with torch.no_grad():
        model.weight.add_(1)
    average.add(model)
    before = model.weight.clone()
    inside = []

    def fail() -> None:
        with average.applied(model):
            inside.append(model.weight.clone())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.allclose(inside[0], before - 0.5)
    assert torch.equal(model.weight, before)


def test_what_has_no_mean_is_said() -> None:
    model = nn.Linear(4, 3)
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    average = WeightAverage(Layout(), 10, 2)
    assert average.problem == TOO_EARLY
    average.add(model)
    assert average.problem is not None
    assert average.problem.startswith("the parameter codes is stored as Tensor of torch.uint8")
    with average.applied(model) as places:
        assert places == 0


def test_a_state_of_other_places_is_dropped_and_one_of_another_model_refused() -> None:
    model = nn.Linear(4, 3)
    average = WeightAverage(Layout(), 10, 2)
    average.add(model)
    state = average.state_dict(model)
    again = WeightAverage(Layout(), 10, 2)
    again.load_state_dict(model, state)
    assert again.state_dict(model)["average"]["count"] == 1
    longer = WeightAverage(Layout(), 20, 2)
    longer.load_state_dict(model, state)
    assert longer.state_dict(model) == {}
    longer.load_state_dict(model, {})  # of an earlier version
    with pytest.raises(RuntimeError, match="shape"):
        again.load_state_dict(nn.Linear(5, 3), state)
