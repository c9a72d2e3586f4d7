"""The replay of a saved step: the same bits, and the op that is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.inspect.replay import read_step
from mprun.watch.nonfinite.fp_exception import FpException
from mprun.watch.nonfinite.step_replay import ReplayedStep, StepMisfitError, replay
from tests.watch.nonfinite import capturing

FILE = Path("step.pt")


class Classifier(nn.Module):
    """Returns a loss and the logits that it is made of, as models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.drop, self.out = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(self.drop(self.norm(self.hidden(x))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Recurrent(nn.Module):
    """Is called with what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(self.cell(x) + state)


def of_classifier(model: nn.Module, x: Tensor) -> None:
    output = model(x, labels=torch.arange(6) % 3)
    (output["loss"] / 2 + 0.1 * output["logits"].square().mean()).backward()


def of_classifier_twice(model: nn.Module, x: Tensor) -> None:
    for part in (x, 2 * x):
        of_classifier(model, part)


def of_recurrent(model: nn.Module, x: Tensor) -> None:
    state = torch.zeros(6, 4)
    for _ in range(3):
        state = model(x, state)
    (state**2).sum().backward()


def of_autocast(model: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x, labels=torch.arange(6) % 3)["logits"]
    output.float().square().sum().backward()


def of_a_sum(model: nn.Module, x: Tensor) -> None:
    output = model(x, labels=torch.arange(6) % 3)["logits"]
    output.sum().backward(retain_graph=True)
    (2 * output).sum().backward()


LOOPS: list[tuple[type[nn.Module], Callable[[nn.Module, Tensor], None]]] = [
    (Classifier, of_classifier),
    (Classifier, of_classifier_twice),
    (Recurrent, of_recurrent),
    (Classifier, of_autocast),
    (Classifier, of_a_sum),
]


def saved_by(
    model: nn.Module, loop: Callable[[nn.Module, Tensor], Any], batch: Any = None, x: Any = None
) -> None:
    with capturing(model, torch.optim.SGD(model.parameters())) as capture:
        if batch is not None:
            capture.note_batch(batch)
        loop(model, torch.randn(6, 4) if x is None else x)
        capture.save(FILE, 7, "x")


def cause_of(done: ReplayedStep) -> FpException:
    assert done.cause is not None
    return done.cause


def text_of(done: ReplayedStep) -> str:
    return "\n".join(done.lines())


@pytest.mark.parametrize(("kind", "loop"), LOOPS)
def test_a_replay_has_the_gradients_and_buffers_of_the_step(
    kind: type[nn.Module], loop: Callable[[nn.Module, Tensor], None]
) -> None:
    """Where two backward passes are one in the replay, sums round elsewhere, by 1e-6 of values
    near 1; all else repeats the same ops."""
    model, other = kind(), kind()
    saved_by(model, loop)
    torch.manual_seed(99)
    done = replay(read_step(FILE), other)
    assert done.cause is None
    assert not done.report.findings
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-5), name  # type: ignore[arg-type]
        if loop in (of_classifier, of_autocast):
            assert torch.equal(a.grad, b.grad), name  # type: ignore[arg-type]
    for a, b in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)
    assert text_of(done).startswith("step 7: every number is finite in the replay\npossible reason")


class Bare(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(size, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out


def of_squares(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def test_a_bad_weight_and_a_bad_input_are_from_outside() -> None:
    model = Bare()
    x = torch.randn(6, 4)
    with torch.no_grad():
        model.fc.weight[0, 0] = float("nan")
    saved_by(model, of_squares, x=x)
    done = replay(read_step(FILE), Bare())
    assert cause_of(done).kind == "outside"
    text = text_of(done)
    assert "parameter fc.weight holds 1 NaN" in text
    assert "the weight was bad before this step: SGD wrote it, or it was loaded" in text

    x[0, 0] = float("inf")
    saved_by(Bare(), of_squares, x=x)
    assert "the model's input holds 1 inf, first read by addmm in fc (Linear)" in text_of(
        replay(read_step(FILE), Bare())
    )


def test_a_loss_that_made_it_is_blamed_and_named_with_a_step() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) * torch.log(batch.abs().min() * 0)).sum()

    saved_by(
        Bare(), lambda model, x: loss(model, x).backward(), batch=(x := torch.randn(6, 4)), x=x
    )
    saved = read_step(FILE)
    done = replay(saved, Bare())
    assert "the gradient that the loss sends to output 0 of call 1 holds 12 inf" in text_of(done)
    assert "the model's own numbers are finite: the loss made it" in text_of(done)
    named = replay(saved, Bare(), loss)
    cause = cause_of(named)
    assert (cause.op, cause.phase, cause.kind) == ("log", "other", "infinite")
    saved.batches.clear()
    without = replay(saved, Bare(), loss)
    assert cause_of(without).op == "log"
    assert any("step got what the model was called with" in note for note in without.notes)


def test_a_step_may_go_backward_itself() -> None:
    def step(model: nn.Module, batch: Tensor) -> None:
        (model(batch) / 0).sum().backward()

    saved_by(Bare(), of_squares, batch=torch.randn(6, 4))
    done = replay(read_step(FILE), Bare(), step)
    assert cause_of(done).op == "div"


def test_weights_that_do_not_fit_are_named() -> None:
    saved_by(Bare(), of_squares)
    saved = read_step(FILE)
    with pytest.raises(StepMisfitError, match=r"fc\.weight is 2 x 4 in the file, 2 x 5 in the mo"):
        replay(saved, Bare(5))
    with pytest.raises(
        StepMisfitError,
        match=r"\(Bare\) do not fit this model \(Linear\): the file lacks weight, bias; the model "
        r"has no fc\.weight, fc\.bias",
    ):
        replay(saved, nn.Linear(4, 2))


def test_weights_in_another_dtype_are_loaded_as_they_were() -> None:
    model = Bare().bfloat16()
    saved_by(model, of_squares, x=torch.randn(6, 4, dtype=torch.bfloat16))
    other = Bare()
    assert replay(read_step(FILE), other).cause is None
    assert torch.equal(other.fc.weight, model.fc.weight)
    assert torch.equal(other.fc.weight.grad, model.fc.weight.grad)  # type: ignore[arg-type]


def test_frozen_parameters_and_modes_are_restored() -> None:
    model = Classifier()
    model.hidden.requires_grad_(False)
    model.drop.eval()
    saved_by(model, of_classifier)
    other = Classifier()
    replay(read_step(FILE), other)
    assert other.hidden.weight.grad is None
    assert (other.training, other.drop.training) == (True, False)
    assert torch.equal(other.out.weight.grad, model.out.weight.grad)  # type: ignore[arg-type]


def test_an_input_that_could_not_be_saved_is_named() -> None:
    class WithObject(Bare):
        def forward(self, x: Any) -> Tensor:
            out: Tensor = self.fc(x["x"].value)
            return out

    class Box:
        value = torch.ones(1, 4)

    saved_by(WithObject(), of_squares, x={"x": Box()})
    with pytest.raises(StepMisfitError, match="the model had a Box, which could not be saved"):
        replay(read_step(FILE), WithObject())


def test_the_gradient_of_an_input_is_taken_as_in_the_step() -> None:
    """sqrt has no backward op where its input needs no gradient."""

    class Root(Bare):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sqrt())

    x = torch.zeros(6, 4, requires_grad=True)
    saved_by(Root(), of_squares, x=x)
    done = replay(read_step(FILE), Root())
    assert cause_of(done).phase == "backward"
