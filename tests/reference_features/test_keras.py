"""Keras mixed precision on MNIST: policies (rows C1 to C10)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from mprun.config import compose
from mprun.recipes.mnist import Mnist
from mprun.records.run_record import read_lines
from mprun.train.data import DataRequest
from mprun.train.loop import Trainer
from tests.reference_features.runs import MNIST, mnist_compared, recipes_page, run, weights, written

pytestmark = pytest.mark.usefixtures("native_is_fast", "one_traced_step", "quick_runs")


def test_c1_the_two_dtypes_of_a_policy_are_recorded_and_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    effective = run("precision=bf16_mixed").effective
    assert (effective.compute_dtype, effective.param_dtype) == ("bfloat16", "float32")
    assert "policy: parameters float32, compute bfloat16" in capsys.readouterr().out
    assert {x.dtype for x in weights().values()} == {torch.float32}


def test_c2_layers_have_policies_of_their_own_by_name() -> None:
    """Keras' guide keeps the last softmax in float32; here a ReLU has a policy, too."""
    words = ["precision=fp32", "precision.layers={2: bf16_true, 3: fp16}"]
    run(*words)
    stored = {name: str(x.dtype) for name, x in weights().items()}
    assert stored == {
        name: "torch.bfloat16" if name.startswith("2.") else "torch.float32" for name in stored
    }
    rows = written("trace", *MNIST, *words, file="trace.json", name="traced")["rows"]
    forward = {
        row["module"]: row["dtypes_out"]
        for row in rows
        if row["phase"] == "forward" and row["op"] in ("linear", "addmm", "relu")
    }
    low, high = ["float16"], ["float32"]
    assert forward == {"0": high, "1": high, "2": ["bfloat16"], "3": low, "4": high}


def test_c2_a_layer_without_parameters_is_in_float32_in_a_16_bit_model() -> None:
    words = [*MNIST, "precision=half_sr", "precision.layers={3: fp32}"]
    rows = written("trace", *words, file="trace.json")["rows"]
    relu = {
        row["module"]: row["dtypes_out"]
        for row in rows
        if row["phase"] == "forward" and row["op"] == "relu"
    }
    assert relu == {"1": ["float16"], "3": ["float32"]}


@dataclass
class Seen:
    """What a run trains on."""

    dtypes: set[tuple[torch.dtype, torch.dtype]]
    """Of outputs and losses."""
    begun: list[torch.Tensor]
    """The parameters before the first step, in float32."""
    targets: list[int]


@cache
def seen(mode: str) -> Seen:
    """What a run in a mode trained on."""
    found = Seen(set(), [], [])
    plain_loss, plain_step = Mnist.loss, Trainer.optimizer_step

    def loss(
        self: Mnist, output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        made = plain_loss(self, output, batch)
        found.dtypes.add((output.dtype, made.dtype))
        return made

    def step(self: Trainer, batch):  # type: ignore[no-untyped-def]
        targets = batch.parts[0].content[1]
        if type(targets) is torch.Tensor:  # not the planned step on fake tensors
            if not found.begun:
                found.begun += [p.detach().float().clone() for p in self.parts.model.parameters()]
            found.targets += targets.tolist()
        return plain_step(self, batch)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Mnist, "loss", loss)
        patched.setattr(Trainer, "optimizer_step", step)
        run(f"precision={mode}", name=mode)
    return found


def test_c3_outputs_and_loss_are_float32() -> None:
    for mode in ("bf16_mixed", "fp16_mixed", "bf16_true", "half_sr"):
        assert seen(mode).dtypes == {(torch.float32, torch.float32)}, mode


def test_c5_the_mnist_recipe_is_the_published_one() -> None:
    """tests/recipes/test_mnist.py has its layers, weights, inputs and loss."""
    config = compose(["recipe=mnist"]).config
    train, optimizer = config.train, config.train.optimizer
    assert (train.batch_size, train.epochs, train.lr) == (8192, 5, 1e-3)
    assert (optimizer.name, optimizer.alpha, optimizer.eps) == ("rmsprop", 0.9, 1e-7)
    assert config.recipe.model["units"] == 256
    fraction = config.data.validation_fraction
    splits = Mnist(256).data(DataRequest(source="generated", validation_fraction=fraction))
    assert len(splits.train) / len(splits.validation) == 48_000 / 12_000


def test_c5_accuracy_and_loss_of_each_epoch_are_recorded() -> None:
    summary = run("data.validation_fraction=0.2", "train.epochs=2", steps=8)
    assert len(summary.history) == 2
    for epoch in summary.history:
        for scores in (epoch.train, epoch.validation):
            assert scores.accuracy is not None
            assert 0 <= scores.accuracy <= 1
            assert isinstance(scores.loss, float)
            assert scores.loss > 0
    assert summary.test.accuracy is not None


TRAINING = (0.5529, 0.7743, 0.8260, 0.8607, 0.8545)
VALIDATION = (0.7214, 0.7849, 0.8795, 0.8682, 0.8813)


def test_c6_the_published_run_stands_beside_the_measured_one() -> None:
    shown, page, _ = mnist_compared()
    for text in (page, recipes_page()):
        for figure in (*TRAINING, *VALIDATION, 0.8749, 0.4217):
            assert f"{figure:.4f}" in text
        assert "about 12 us" in text
    assert "0.8749" in shown


def test_c7_the_same_seed_gives_each_mode_the_same_weights_and_samples() -> None:
    first = seen("fp32")
    assert len(first.targets) == 3 * 32
    for mode in ("bf16_mixed", "fp16_mixed", "bf16_sr", "half_sr"):
        low = {"bf16_sr": torch.bfloat16, "half_sr": torch.float16}.get(mode, torch.float32)
        for mine, exact in zip(seen(mode).begun, first.begun, strict=True):
            assert torch.equal(mine, exact.to(low).float()), mode
        assert seen(mode).targets == first.targets


def test_c8_warm_up_steps_are_left_out_of_the_step_time_and_counted() -> None:
    summary = run("train.epochs=4", steps=16)
    times = [x["step_time_ms"] for x in read_lines(Path("run")) if x["kind"] == "step"]
    timing = summary.step_time_ms
    assert timing.warmup >= 1
    assert timing.warmup + timing.n == 16
    kept = sorted(times[timing.warmup :])
    middle = len(kept) // 2
    expected = kept[middle] if len(kept) % 2 else (kept[middle - 1] + kept[middle]) / 2
    # A line holds microseconds.
    assert timing.median == pytest.approx(expected, abs=2e-3)


def test_c9_the_number_of_units_can_be_set() -> None:
    run("recipe.model.units=64")
    assert weights()["0.weight"].shape == (64, 784)
    assert compose(["recipe=mnist"]).config.recipe.model["units"] == 256


def test_c10_the_published_claims_stand_beside_the_measured_speed() -> None:
    claims = ("more than 2 times", "up to 2 times", "60 % more", "significantly slower")
    for text in (*mnist_compared()[:2], recipes_page()):
        for claim in (*claims, "no benefit for toy models", "HPU"):
            assert claim in text, claim
