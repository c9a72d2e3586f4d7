"""Losses: named parts, what is no loss, micro-batches weighted by what the loss averages over."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.errors import RunFailedError
from mprun.train.loop import Limits
from mprun.train.loss_terms import LossTerms
from tests.train.trainers import Base, Language, samples, sequences, trainer_of

LENGTHS = [6, 1, 1, 2, 6, 6, 1, 0]
"""Micro-batches of two have 7, 3, 12 and 1 tokens; of those of one the last has none."""


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_micro_batches_weighted_by_tokens_are_the_whole_batch(micro: int) -> None:
    data = sequences(LENGTHS)
    data = data.map(lambda x: x.double() if x.is_floating_point() else x)
    if micro == 1:  # the last one counts 0 and is left out
        assert LENGTHS[-1] == 0
    training, log = trainer_of(
        Language(), data, micro=micro, limits=Limits(1, 1, None), dtype=torch.float64
    )
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = data.content
    whole = Language().loss(model(x), (x, y))
    whole.backward()
    training.fit()
    (line,) = log.lines
    # The same terms in float64, summed in another order.
    assert line.loss == pytest.approx(whole.item(), rel=1e-14)
    for ours, theirs in zip(gradients(training.parts.model), gradients(model), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-15)


def test_means_over_an_epoch_and_a_set_are_over_tokens() -> None:
    data = sequences([6, 1, 2, 5, 1])
    training, log = trainer_of(
        Language(), data, batch=2, validation=data, limits=Limits(1, 1, None)
    )
    training.parts.optimizer.param_groups[0]["lr"] = 0.0
    training.fit()
    with torch.no_grad():
        x, y = data.content
        output = training.parts.model(x)
    (epoch,) = log.epochs
    expected = Language().loss(output, (x, y)).item()
    assert epoch.validation.loss == pytest.approx(expected, rel=1e-6)
    first = Language().loss(output[:2], (x[:2], y[:2])).item()
    assert epoch.train.loss == pytest.approx(first, rel=1e-6)
    assert epoch.train.samples == 2  # samples stay samples


def test_a_set_of_nothing_to_count_has_no_loss() -> None:
    training, log = trainer_of(Language(), sequences([3, 2]), validation=sequences([0, 0]))
    training.fit()
    assert all(epoch.validation.loss is None for epoch in log.epochs)
    assert all(epoch.train.loss is not None for epoch in log.epochs)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (lambda batch: 0, "count returned 0 for all samples of a step"),
        (lambda batch: -2, "count returned -2; legal is the number of items"),
        (lambda batch: float("nan"), "count returned nan; legal"),
        (lambda batch: batch[1].ne(-100), r"a tensor of shape \[2, 6\] \(bool\); legal"),
    ],
    ids=["zero", "negative", "nan", "mask"],
)
def test_a_count_that_is_none_is_one_line(count: Any, text: str) -> None:
    class Recipe(Language):
        def count(self, batch: Any) -> Any:
            return count(batch)

    training, _ = trainer_of(Recipe(), sequences([3, 2]))
    with pytest.raises(RunFailedError, match=text) as caught:
        training.fit()
    assert "\n" not in str(caught.value)


def test_a_count_may_be_a_scalar_tensor() -> None:
    class Recipe(Language):
        def count(self, batch: Any) -> Any:
            return batch[1].ne(-100).sum()

    losses = []
    for recipe in (Recipe(), Language()):
        training, log = trainer_of(recipe, sequences([6, 1, 3]), micro=1)
        training.fit()
        losses.append([line.loss for line in log.lines])
    assert losses[0] == losses[1]


# ---- named parts ---------------------------------------------------------------------------------


class Parted(Base):
    """Cross-entropy and a penalty on the outputs."""

    METRIC = ("loss.penalty", "min")

    def loss(self, output: Tensor, batch: Any) -> Any:
        return {"fit": super().loss(output, batch), "penalty": 0.1 * output.square().mean()}


class Summed(Parted):
    def loss(self, output: Tensor, batch: Any) -> Any:
        parts = super().loss(output, batch)
        return parts["fit"] + parts["penalty"]


@pytest.mark.parametrize("micro", [None, 2], ids=["whole", "micro"])
def test_the_sum_of_the_parts_is_trained_and_each_is_recorded(micro: int | None) -> None:
    data, trained = samples(10), {}
    for recipe in (Parted(), Summed()):
        training, log = trainer_of(recipe, data, batch=4, micro=micro, validation=samples(5, 3))
        training.fit()
        trained[type(recipe)] = [p.detach().clone() for p in training.parts.model.parameters()]
        if isinstance(recipe, Summed):
            continue
        for line in log.lines:
            assert set(line.parts) == {"fit", "penalty"}
            assert sum(line.parts.values()) == pytest.approx(line.loss, rel=1e-6)
        for epoch in log.epochs:
            for scores in (epoch.train, epoch.validation):
                assert scores.metrics is not None
                assert set(scores.metrics) == {"loss.fit", "loss.penalty"}
                total = sum(float(x or 0) for x in scores.metrics.values())
                assert total == pytest.approx(scores.loss, rel=1e-6)
        first = [line for line in log.lines if line.epoch == 1]
        sizes = (4, 4, 2)
        mean = sum(n * x.parts["fit"] for n, x in zip(sizes, first, strict=True)) / 10
        assert log.epochs[0].train.value("loss.fit") == pytest.approx(mean, rel=1e-6)
    for ours, theirs in zip(trained[Parted], trained[Summed], strict=True):
        assert torch.equal(ours, theirs)


# ---- what is no loss -----------------------------------------------------------------------------


@dataclass
class Odd(Base):
    """Its loss is whatever the test wants."""

    value: Any

    def loss(self, output: Any, batch: Any) -> Any:
        return self.value(output)


PART = "legal is a scalar tensor of a floating dtype, or a dict of named ones"
CASES = {
    "None": (lambda out: None, "loss returned None"),
    "number": (lambda out: 0.5, r"loss returned 0.5 \(float\): it is no tensor"),
    "vector": (lambda out: out[:, 0], r"a tensor of shape \[4\] \(float32\): .* take its mean"),
    "detached": (lambda out: out.mean().detach(), "no gradient leads from it to the model"),
    "empty dict": (lambda out: {}, "loss returned an empty dict"),
    "part": (lambda out: {"a": out.mean(), "b": out}, r"shape \[4, 3\] \(float32\) as 'b'"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_loss_is_one_line_with_what_was_returned(case: str) -> None:
    value, text = CASES[case]
    training, _ = trainer_of(Odd(value), samples(4))
    with pytest.raises(RunFailedError, match=text) as caught:
        training.fit()
    message = str(caught.value)
    assert "\n" not in message
    assert PART in message


def test_a_part_that_metric_names_must_be_there() -> None:
    recipe = Parted()
    terms = LossTerms(recipe)
    output = torch.zeros(2, 3, requires_grad=True)
    terms(output, samples(2).content)
    recipe.loss = lambda output, batch: {"fit": output.mean()}  # type: ignore[method-assign]
    with pytest.raises(RunFailedError, match=r"METRIC names 'loss\.penalty', but .* with 'fit'"):
        LossTerms(recipe)(output, None)


# ---- a loss that the output brings ---------------------------------------------------------------


class Brought(Base):
    """A recipe without a loss."""

    loss = Base.__mro__[1].loss  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_the_loss_of_an_output_is_taken(kind: Any) -> None:
    value = torch.ones((), requires_grad=True)
    assert LossTerms(Brought())(kind(loss=value, logits=torch.zeros(2)), None) is value


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (torch.zeros(2, 3), r"a tensor of shape \[2, 3\] \(float32\)"),
        ({"logits": torch.zeros(2)}, "a dict with 'logits'"),
        ((1, 2), "a tuple"),
    ],
)
def test_an_output_without_one_names_both_remedies(output: Any, shown: str) -> None:
    with pytest.raises(RunFailedError, match=shown) as caught:
        LossTerms(Brought())(output, None)
    assert "write loss(output, batch), or return an output with output.loss" in str(caught.value)


@pytest.mark.parametrize("kind", [Brought, lambda: Odd(lambda out: None)])
def test_an_evaluation_needs_no_loss_if_a_metric_judges(kind: Any) -> None:
    recipe = kind()
    with torch.no_grad():
        with pytest.raises(RunFailedError, match="in evaluation, and METRIC names 'loss'"):
            LossTerms(recipe)(torch.zeros(2), None)
        recipe.METRIC = ("f1", "max")
        assert LossTerms(recipe)(torch.zeros(2), None) is None
