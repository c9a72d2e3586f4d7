"""`MprunCallback` in Lightning's Trainer: the record, and no bit of the training changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.records.run_record import read_lines, read_summary

lightning: Any = pytest.importorskip("lightning.pytorch", reason="mprun[lightning]")

from mprun.inspect.replay import read_step  # noqa: E402
from mprun.integrations.lightning import MprunCallback  # noqa: E402
from mprun.watch.nonfinite.step_replay import replay  # noqa: E402

STEPS = 12


class Net(lightning.LightningModule):  # type: ignore[misc]
    """A classifier; `training_step` calls a part of it, or all of it by its own forward pass."""

    def __init__(self, own_forward: bool = False, lr: float = 1e-2) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 3)
        )
        self.own_forward, self.lr = own_forward, lr

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self(x) if self.own_forward else self.net(x)
        return nn.functional.cross_entropy(logits.float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("val_accuracy", torch.tensor(0.5))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Manual(Net):
    """Steps by itself, and returns nothing."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss)


class Failing(Net):
    error: type[BaseException] = RuntimeError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5:
            raise self.error("no more")
        return super().training_step(batch, batch_idx)


def loader() -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * STEPS, 8, generator=generator)
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4
    )


def fit(module: Any, watch: Any, out: Path, **options: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=out,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if watch is None else [watch],
        **options,
    )
    trainer.fit(module, loader(), loader())
    return trainer


def trained(kind: type[Net], watch: Any, out: Path, **options: Any) -> list[Tensor]:
    lightning.seed_everything(3, verbose=False)
    module = kind(own_forward=options.pop("own_forward", False))
    trainer = fit(module, watch, out, **options)
    states = [x for o in trainer.optimizers for s in o.state.values() for x in s.values()]
    return [*module.parameters(), *states, torch.get_rng_state()]


CASES: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "fp32": (Net, {"val_check_interval": 6}),
    "bf16-mixed": (Net, {"precision": "bf16-mixed", "own_forward": True}),
    "bf16-true": (Net, {"precision": "bf16-true"}),
    "accumulated": (Net, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "manual": (Manual, {}),
    "manual mixed": (Manual, {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("name", CASES)
def test_no_bit_of_the_training_changes(name: str, tmp_path: Path) -> None:
    kind, options = CASES[name]
    plain = trained(kind, None, tmp_path, **options)
    watch = MprunCallback(tmp_path / "record")
    watched = trained(kind, watch, tmp_path, **options)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    summary = read_summary(tmp_path / "record")
    accumulate = options.get("accumulate_grad_batches", 1)
    assert (summary.status, summary.steps, summary.seed) == ("completed", STEPS // accumulate, 3)
    assert (summary.batch.micro, summary.batch.accumulate) == (4, accumulate)
    low = "bf16" in name or "mixed" in name
    assert summary.effective.compute_dtype == ("bfloat16" if low else "float32")
    assert summary.effective.casting == ("autocast" if "mixed" in name else "none")
    assert isinstance(summary.train.loss, float)
    assert len(summary.history) == (2 if name == "fp32" else 1)
    assert summary.history[-1].validation.accuracy == 0.5


def test_losses_are_those_of_the_steps(tmp_path: Path) -> None:
    """Lightning divides the losses of micro-batches; the record has their mean."""
    seen: list[Tensor] = []

    class Noted(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(super().training_step(batch, batch_idx))
            return seen[-1]

    trained(Noted, MprunCallback(tmp_path / "record"), tmp_path, accumulate_grad_batches=2)
    lines = [x for x in read_lines(tmp_path / "record") if x["kind"] == "step"]
    means = torch.stack(seen).detach().view(-1, 2).mean(1)
    got = torch.tensor([line["loss"] for line in lines])
    assert torch.allclose(got, means, rtol=1e-6)  # two roundings of float32


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError, "failed"), (KeyboardInterrupt, "interrupted")]
)
def test_a_training_that_ends_early(
    error: type[BaseException], status: str, tmp_path: Path
) -> None:
    module = Failing()
    module.error = error
    with pytest.raises((RuntimeError, SystemExit)):
        fit(module, MprunCallback(tmp_path / "record"), tmp_path)
    summary = read_summary(tmp_path / "record")
    assert (summary.status, summary.steps) == (status, 5)
    assert not module._forward_pre_hooks


@pytest.mark.parametrize("own_forward", [True, False])
def test_the_first_nan_is_saved_and_replayed(own_forward: bool, tmp_path: Path) -> None:
    """A log of 0 in step 3, in a module that `training_step` calls by itself or by `forward`."""
    broken = [False]

    class Logs(Net):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.net[1].register_forward_hook(lambda m, a, y: y + (y * 0).log() if broken[0] else y)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            broken[0] = batch_idx == 2
            return super().training_step(batch, batch_idx)

    watch = MprunCallback(tmp_path / "record", on_nonfinite="save")
    trained(Logs, watch, tmp_path, own_forward=own_forward)
    assert watch.run is not None
    assert watch.run.nonfinite is not None
    assert watch.run.nonfinite.step == 3
    assert watch.run.nonfinite.file is not None
    broken[0] = True
    saved = read_step(watch.run.nonfinite.file)
    first = replay(saved, Logs(own_forward=own_forward), Logs.loss).cause
    assert first is not None
    assert (first.op, first.module) == ("log", "net.1")
