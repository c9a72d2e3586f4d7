"""Steps with a NaN are saved, run again, and their op is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mprun
from mprun.inspect.replay import read_step
from mprun.numerics.nonfinite.saved_step import SavedStep
from mprun.numerics.nonfinite.step_replay import replay
from tests.integrations.stranger import STEP, Net, train


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "run"
    _, run = train(out)
    assert run.nonfinite.file == out / f"nonfinite_step_{STEP}.pt"
    return out / f"nonfinite_step_{STEP}.pt"


@pytest.mark.parametrize(
    ("kind", "options", "op", "phase"),
    [
        ("log", {"micro": 2, "bf16": True}, "log", "forward"),
        ("root", {}, "div", "backward"),
        ("power", {}, "pow", "forward"),
    ],
    ids=["micro-batches in bf16", "backward only", "overflow"],
)
def test_the_planted_op_is_named(
    kind: str, options: dict[str, Any], op: str, phase: str, tmp_path: Path
) -> None:
    _, run = train(tmp_path / "run", kind, **options)
    assert run.nonfinite is not None
    assert run.nonfinite.step == STEP
    result = replay(read_step(run.nonfinite.file), Net(kind))
    assert result.cause is not None
    assert (result.cause.module, result.cause.phase, result.cause.step) == ("part", phase, STEP)
    assert result.cause.op.startswith(op)
    assert result.cause.inputs
    assert "stranger.py" in (result.cause.location or "")


@pytest.mark.parametrize("options", [{}, {"micro": 2, "bf16": True}], ids=str)
def test_no_bit_of_the_training_changes(options: dict[str, Any], tmp_path: Path) -> None:
    expected, _ = train(None, "dropout", fault=False, **options)
    got, _ = train(tmp_path / "run", "dropout", fault=False, **options)
    pairs = zip(expected, got, strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def test_the_file_holds_the_state_before_the_step(saved: Path) -> None:
    """The saved weights and statistics are those after 36 steps, not what step 37 made of them."""
    step = read_step(saved)
    assert all(x.isfinite().all() for x in step.parameters.values())
    assert step.buffers["norm.num_batches_tracked"] == STEP - 1
    [call] = step.calls
    assert call.kwargs == {"scale": 1.0}
    assert call.args[0][3, 4] == 0
    [batch] = step.batches
    assert torch.equal(batch[0], call.args[0])


def saved_by(out: Path, model: nn.Module, loss: Callable[[], torch.Tensor]) -> SavedStep:
    """The step in which the loss goes backward once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, out, on_nonfinite="save") as run:
        loss().backward()
        optimizer.step()
    assert run.nonfinite is not None
    assert run.nonfinite.file is not None
    return read_step(run.nonfinite.file)


def test_arguments_of_any_nesting(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, batch: Any) -> Any:
            return {"out": [self.layer(batch["x"][0]).log()]}

    model = Odd()
    nn.init.constant_(model.layer.bias, -9.0)  # the logarithm of a negative number
    x = {"x": (torch.ones(2, 4), "name")}
    step = saved_by(tmp_path / "run", model, lambda: model(x)["out"][0].sum())
    result = replay(step, Odd())
    assert result.cause is not None
    assert result.cause.op == "log"


def test_a_nan_in_an_output_that_reaches_no_gradient_is_saved(tmp_path: Path) -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return y.sum(), (y * 0).log() * 0

    model = Masked(4, 1)
    step = saved_by(tmp_path / "run", model, lambda: model(torch.ones(2, 4))[0])
    assert step.reason == "output 1 of the model is not finite"


def test_a_compiled_model_is_saved_with_its_own_names(tmp_path: Path) -> None:
    model = torch.compile(nn.Linear(4, 1), backend="eager")
    step = saved_by(tmp_path / "run", model, lambda: model(torch.full((2, 4), torch.nan)).sum())
    assert step.parameters.keys() == {"weight", "bias"}
    result = replay(step, nn.Linear(4, 1))
    assert result.cause is not None
    assert result.cause.kind == "outside"
