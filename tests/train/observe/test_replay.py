"""Steps with a NaN that `mprun.observe` saves: what the file holds, and that it runs again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mprun
from mprun.inspect.replay import read_step
from mprun.watch.nonfinite.saved_step import SavedStep
from mprun.watch.nonfinite.step_replay import replay
from tests.watch.nonfinite.loops_with_nan import PLANTED


def saved_by(out: Path, model: nn.Module, loss: Callable[[], Tensor]) -> SavedStep:
    """The step in which the loss goes backward once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, out, on_nonfinite="save") as run:
        loss().backward()
        optimizer.step()
    assert run.nonfinite is not None
    assert run.nonfinite.file is not None
    return read_step(run.nonfinite.file)


class Logs(nn.Module):
    """Batch normalization, and a logarithm that is infinite where an input is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        out: Tensor = self.last(self.norm(x) + scale * torch.log(x))
        return out


def test_the_file_holds_the_state_before_the_step(tmp_path: Path) -> None:
    """The saved weights and statistics are those after 36 steps, not what step 37 made of them."""
    model = Logs()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with mprun.observe(model, optimizer, tmp_path / "run", on_nonfinite="save") as run:
        for number in range(1, 41):
            x = torch.rand(8, 4) + 0.1
            x[3, 2] *= number != PLANTED
            run.note_batch((x, 1))
            optimizer.zero_grad()
            model(x, scale=1.0).square().mean().backward()
            optimizer.step()
    assert run.nonfinite is not None
    assert run.nonfinite.step == PLANTED
    assert run.nonfinite.file == tmp_path / "run" / f"nonfinite_step_{PLANTED}.pt"
    step = read_step(run.nonfinite.file)
    assert all(x.isfinite().all() for x in step.parameters.values())
    assert step.buffers["norm.num_batches_tracked"] == PLANTED - 1
    [call] = step.calls
    assert call.kwargs == {"scale": 1.0}
    assert call.args[0][3, 2] == 0
    [batch] = step.batches
    assert torch.equal(batch[0], call.args[0])
    cause = replay(step, Logs()).cause
    assert cause is not None
    assert (cause.op, cause.phase, cause.step) == ("log", "forward", PLANTED)
    assert "test_replay.py" in (cause.location or "")


def test_a_nan_in_an_output_that_reaches_no_gradient_is_saved(tmp_path: Path) -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Any:
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
