"""Dead models, losses that rise late, steps whose loss is NaN, and copies of observed models."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mprun
from mprun.cli.main import main
from mprun.inspect.replay import read_step
from mprun.records.run_record import read_summary
from mprun.train.observe.observed_record import LastPart
from mprun.watch.nonfinite.step_replay import replay

pytestmark = pytest.mark.usefixtures("quick_runs")

BROKEN_AT = 31


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=generator)
    return x, x.sum(1, keepdim=True)


def times_log(loss: Tensor) -> Tensor:
    return loss * torch.log(-loss)


def plus_log(loss: Tensor) -> Tensor:
    """The logarithm of a negative number is NaN, and its gradient finite."""
    return loss + torch.log(-loss)


def train(
    out: Path,
    spoil: Callable[[Tensor], Tensor] = times_log,
    steps: int = 60,
    scaler: bool = True,
    **options: Any,
) -> Any:
    """A loop whose loss is spoiled from step 31 on."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scale = torch.amp.GradScaler("cpu", enabled=scaler)
    with mprun.observe(model, optimizer, out, **options) as run:
        for step in range(1, steps + 1):
            x, y = batch_of(step)
            run.note_batch((x, y))
            with torch.autocast("cpu", torch.float16, enabled=scaler):
                output = model(x)
            loss = nn.functional.mse_loss(output.float(), y)
            loss = spoil(loss) if step >= BROKEN_AT else loss
            optimizer.zero_grad()
            scale.scale(loss).backward()
            scale.step(optimizer)
            scale.update()
            run.log(loss=loss)
    return run


@pytest.mark.parametrize("spoil", [times_log, plus_log])
@pytest.mark.parametrize("scaler", [True, False])
def test_a_model_that_is_dead_at_the_end_has_failed(
    spoil: Callable[[Tensor], Tensor],
    scaler: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its loss is NaN from step 31 on; beside a sound loop it is worse, not equivalent."""
    run = train(tmp_path / "dead", spoil, scaler=scaler, name="dead", seed=0)
    train(tmp_path / "sound", lambda loss: loss, scaler=scaler, name="sound", seed=0)
    summary = read_summary(tmp_path / "dead")
    assert (summary.status, summary.failed_by) == ("failed", "run")
    assert summary.error is not None
    assert summary.error.startswith("the loss is nan from step 31 to the last step, 60")
    assert str(run).startswith(f"FAILED: {summary.error}")
    assert read_summary(tmp_path / "sound").status == "completed"
    main(["compare", str(tmp_path), "compare.baseline=sound"])
    content = json.loads((tmp_path / "comparison.json").read_text())
    [verdict] = [v["verdict"] for v in content["variants"] if v["label"] == "dead"]
    assert verdict["word"] == "worse"
    assert "the loss is nan" in verdict["reason"]
    assert "equivalent" not in capsys.readouterr().out


def test_a_loss_scale_that_skips_every_step_has_failed(tmp_path: Path) -> None:
    """The loss is finite, its gradient is not: the root of 0."""
    train(tmp_path / "run", lambda loss: (loss * 0).sqrt() + loss)
    summary = read_summary(tmp_path / "run")
    assert summary.status == "failed"
    assert summary.error is not None
    assert summary.error.startswith("no step was taken from step 31 to the last one, 60")


@pytest.mark.parametrize(
    ("losses", "skipped", "fails"),
    [
        ([1.0] * 40, [], False),
        ([1.0] * 39 + [float("nan")], [], True),
        ([1.0] * 39 + [float("inf")], [40], False),  # one overflow, as any loss scale has
        ([1.0] * 21 + [float("nan")] * 19, range(22, 41), False),
        ([1.0] * 20 + [float("nan")] * 20, range(21, 41), True),
        ([1.0] * 40, range(21, 41), True),
        ([1.0] * 40, range(21, 40), False),
        ([1.0] * 4, range(1, 5), True),
        ([float("nan"), 1.0], [], False),
        ([1.0, float("nan"), None, None], [], True),  # not logged in every step
    ],
)
def test_what_counts_as_dead(losses: list[float | None], skipped: Any, fails: bool) -> None:
    last = LastPart()
    for step, loss in enumerate(losses, start=1):
        last.add(step, loss, step in skipped)
    assert bool(last.failure()) == fails


def test_a_loss_that_rises_late_is_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 % more in the last 40 of 300 steps; over the whole run it would be 1.6 %."""
    for name in ("base", "late"):
        for seed in range(3):
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            out = tmp_path / f"{name}{seed}"
            with mprun.observe(model, optimizer, out, name=name, seed=seed) as run:
                for step in range(300):
                    model(torch.ones(1, 1)).sum().backward()
                    optimizer.step()
                    factor = 1.12 if name == "late" and step >= 260 else 1.0
                    run.log(loss=(1 + seed / 1000) * factor)
    summary = read_summary(tmp_path / "late0")
    assert (summary.train.loss, summary.train.last_steps) == (pytest.approx(1.12), 30)
    assert main(["compare", str(tmp_path), "compare.baseline=base"]) == 0
    content = json.loads((tmp_path / "comparison.json").read_text())
    [late] = [v for v in content["variants"] if v["label"] == "late"]
    assert late["verdict"]["word"] == "worse"
    assert late["difference"]["value"] == pytest.approx(0.12, abs=1e-6)
    assert "the mean of the last 30 of 300 steps" in capsys.readouterr().out


def test_a_logged_validation_wins_over_the_last_part(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with mprun.observe(model, optimizer, tmp_path / "run") as run:
        for step in range(40):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            run.log(loss=float(step))
        run.log(validation_loss=0.5)
    summary = read_summary(tmp_path / "run")
    assert summary.history[-1].validation.loss == 0.5
    assert (summary.train.loss, summary.train.last_steps) == (pytest.approx(19.5), None)


def spoiled_step(spoil: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return spoil(nn.functional.mse_loss(model(x).float(), y))

    return step


@pytest.mark.parametrize("spoil", [times_log, plus_log])
@pytest.mark.parametrize("scaler", [True, False])
def test_a_loss_that_is_nan_is_saved_and_replayed(
    spoil: Callable[[Tensor], Tensor], scaler: bool, tmp_path: Path
) -> None:
    """No loss scale helps it: the step is saved, whether a scaler skips it or not."""
    run = train(tmp_path / "run", spoil, scaler=scaler, on_nonfinite="save")
    assert run.nonfinite is not None
    assert (run.nonfinite.step, run.nonfinite.names) == (BROKEN_AT, ("the loss",))
    assert run.nonfinite.file is not None
    step = read_step(run.nonfinite.file)
    assert all(x.isfinite().all() for x in step.parameters.values())
    result = replay(step, model_of(), spoiled_step(spoil))
    assert result.cause is not None
    assert result.cause.op == "log"
    assert "test_last_part.py" in (result.cause.location or "")


def test_an_overflow_of_scaled_gradients_is_no_loss_that_is_nan(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    with mprun.observe(model, optimizer, tmp_path / "run", on_nonfinite="save") as run:
        for step in range(30):
            optimizer.zero_grad()
            x, y = batch_of(step)
            scaler.scale(nn.functional.mse_loss(model(x), y) * 1e3).backward()
            scaler.step(optimizer)
            scaler.update()
    assert read_summary(tmp_path / "run").skipped_steps > 0
    assert run.nonfinite is None


def users_hook(module: nn.Module, args: Any, output: Tensor) -> None:
    """A hook that the user registered."""


@pytest.mark.parametrize("options", [{}, {"memory": True, "on_nonfinite": "save"}], ids=str)
def test_the_model_is_pickled_and_copied_without_hooks(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """In every step, as scripts that save their best model do; the user's own hooks stay."""
    model = model_of()
    model.register_forward_hook(users_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with mprun.observe(model, optimizer, tmp_path / "run", **options):
        for step in range(6):
            x, y = batch_of(step)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            torch.save(model, tmp_path / "model.pt")
            loaded = torch.load(tmp_path / "model.pt", weights_only=False)
            content = pickle.dumps(model)
            assert b"mprun" not in content  # it loads where mprun is not installed
            for other in (loaded, pickle.loads(content), copy.deepcopy(model)):
                for module in other.modules():
                    assert len(module._forward_pre_hooks) == 0
                    assert not module._forward_pre_hooks_with_kwargs
                    assert len(module._forward_hooks) == (module is other)
                    assert "__reduce_ex__" not in vars(module)
                assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert read_summary(tmp_path / "run").steps == 6


def test_a_data_set_in_memory_is_no_activation(tmp_path: Path) -> None:
    """10 MiB of images that are read one by one, in every way that a loop reads them."""
    images = torch.zeros(10, 2**20, dtype=torch.uint8)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, tmp_path / "run", memory=True):
        for step in range(5):
            samples = [images[i][:4] for i in range(step, step + 4)]
            batch = torch.stack(samples).float() + images.view(-1)[:4]
            model(batch).sum().backward()
            model(images[step, :4].float()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    row = read_summary(tmp_path / "run").memory_bytes
    assert row.activations is not None
    assert 64 <= row.activations < 2**16
    assert row.peak is not None
    assert row.peak < 2**16


@pytest.mark.parametrize("last", [1023, 1024], ids=["all tokens but the last", "all"])
def test_a_batch_is_an_activation_and_sparse_tensors_are_no_fault(
    last: int, tmp_path: Path
) -> None:
    """Its memory comes from a worker: no op of the step made it."""
    model = nn.Linear(last, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.ones(64, 1024) for _ in range(5)]
    sparse = torch.eye(64).to_sparse()
    with mprun.observe(model, optimizer, tmp_path / "run", memory=True):
        for batch in batches:
            torch.sparse.mm(sparse, model(batch[:, :last])).sum().backward()
            optimizer.step()
    summary = read_summary(tmp_path / "run")
    assert summary.status == "completed"
    assert (summary.memory_bytes.activations or 0) >= 64 * 1024 * 4
