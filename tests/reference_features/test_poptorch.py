"""PopTorch's half precision on FashionMNIST (rows D1 to D14)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mprun.cli.main import main
from mprun.config import compose
from mprun.optim import SGD
from mprun.precision import Emulated16
from mprun.precision.rounding import round_stochastic
from mprun.recipes.fashion_mnist import FashionMnist
from mprun.records.run_record import LossScaleRow
from mprun.train.assemble import build_parts, make_plan
from tests.adversarial.recipe import WORDS, write_recipe
from tests.reference_features import faulty
from tests.reference_features.runs import (
    FASHION,
    LINEAR,
    MNIST,
    compared,
    dtypes,
    losses,
    recipes_page,
    run,
    weights,
    written,
)
from tests.run.test_inputs import Sent

pytestmark = pytest.mark.usefixtures("one_traced_step", "quick_runs")

FP16 = torch.float16


@pytest.mark.representative("half_sr")
@pytest.mark.parametrize("mode", ["half_sr", "fp16_true"])
def test_d1_the_whole_model_and_its_inputs_are_in_float16(mode: str) -> None:
    summary = run(f"precision={mode}")
    assert dtypes() == {FP16}
    assert summary.effective.param_dtype == summary.effective.compute_dtype == "float16"
    rows = written("trace", *MNIST, f"precision={mode}", file="trace.json", name="traced")["rows"]
    forward = [row for row in rows if row["phase"] == "forward"]
    assert {tuple(row["dtypes_in"]) for row in forward} == {("float16",)}


def test_d2_one_layer_is_cast_down_or_up_by_name() -> None:
    run("precision=fp32", "precision.layers={conv1: fp16}", recipe=FASHION, steps=1, name="down")
    run("precision=half_sr", "precision.layers={conv1: fp32}", recipe=FASHION, steps=1, name="up")
    for name, own, rest in (("down", FP16, torch.float32), ("up", torch.float32, FP16)):
        for key, x in weights(name).items():
            assert x.dtype == (own if key.startswith("conv1.") else rest), key


def test_d3_stochastic_rounding_is_exact_on_average_and_keeps_small_updates() -> None:
    p = nn.Parameter(torch.ones(20_000, dtype=FP16))
    optimizer = SGD([p], lr=2.0**-14)  # a 16th of the distance to the neighbour above
    nearest = nn.Parameter(torch.ones(20_000, dtype=FP16))
    other = SGD([nearest], lr=2.0**-14, rounding="nearest")
    for _ in range(32):
        p.grad, nearest.grad = -torch.ones_like(p), -torch.ones_like(nearest)
        optimizer.step()
        other.step()
    assert torch.equal(nearest, torch.ones_like(nearest))  # all updates are lost
    # The mean of 20,000 walks of 32 steps, each off by less than 2^-10: 6 standard deviations.
    spread = 2.0**-10 * (32 * 1 / 16 * 15 / 16) ** 0.5 / 20_000**0.5
    assert abs(p.double().mean().item() - (1 + 32 * 2.0**-14)) < 6 * spread
    assert set(p.tolist()) <= {1 + k * 2.0**-10 for k in range(33)}
    summary = run("precision=half_sr")
    assert summary.effective.rounding == "stochastic"
    assert dtypes() == {FP16}


def test_d4_a_static_loss_scale_is_given() -> None:
    summary = run("precision=fp16_true", "loss_scale=static", "loss_scale.value=1024")
    assert summary.loss_scale == LossScaleRow(kind="static", initial=1024.0, final=1024.0)


def test_d5_accumulation_and_moments_have_dtypes_of_their_own() -> None:
    summary = run("precision=half_sr", "train.accumulate=2", "train.batch_size=16")
    assert summary.effective.accum_dtype == "float16"
    for key in ("momentum_dtype", "variance_dtype"):
        assert getattr(summary.effective, key) == "float32"
    words = ["precision.accum_dtype=float32", "precision.variance_dtype=float16"]
    other = run("precision=half_sr", "train.optimizer.name=adamw", *words, name="other")
    assert other.effective.accum_dtype == "float32"
    saved = torch.load("other/checkpoints/last.pt", weights_only=True)["trainer"]["optimizer"]
    kept = {
        str(x.dtype)
        for state in saved["state"].values()
        for x in state.values()
        if isinstance(x, torch.Tensor) and x.dim()
    }
    assert kept == {"torch.float32", "torch.float16"}  # the first moment, the second


def test_d6_partials_are_added_up_in_the_dtype_asked_for() -> None:
    # 1, and 127 blocks of 64 products whose sum, 2^-12, is less than half of float16's step at 1.
    x = torch.full((1, 8192), 2.0**-18, dtype=FP16)
    x[0, 0], x[0, 1:64] = 1, 0
    ones = torch.ones(8192, 1, dtype=FP16)
    with Emulated16("nearest", "infinity", "float32", seed=0).region():
        assert (x @ ones).item() == torch.tensor(1 + 127 * 2.0**-12).half().item()
    with Emulated16("nearest", "infinity", "float16", seed=0).region():
        assert (x @ ones).item() == 1
    summary = run("precision=half_sr", "precision.partials_dtype=float16")
    assert summary.effective.partials_dtype == "float16"
    assert summary.execution == "emulated"
    run("precision=half_sr", "execution=emulated", name="wide")
    assert losses() != losses("wide")


def test_d7_the_fashion_mnist_recipe_is_the_published_one() -> None:
    """tests/recipes/test_fashion_mnist.py has the sizes of its layers and its loss."""
    config = compose(["recipe=fashion_mnist"]).config
    train = config.train
    assert (train.batch_size, train.eval_batch_size, train.epochs, train.lr) == (12, 32, 10, 1e-3)
    assert train.optimizer.name == "adamw"
    recipe = FashionMnist(**config.recipe.model)
    model = recipe.model()
    images = torch.randint(256, (2, 1, 28, 28), dtype=torch.uint8)
    prepared = recipe.prepare(images)
    assert prepared.shape == (2, 1, 128, 128)
    resized = F.interpolate(images.float(), size=(128, 128), mode="bilinear").round() / 255
    torch.testing.assert_close(prepared, (resized - 0.5) / 0.5)
    # The layers by hand, in the published order.
    x = F.max_pool2d(F.relu(model.conv1(prepared)), 2)
    x = model.norm(F.relu(model.conv2(x))).flatten(1)
    expected = F.log_softmax(model.fc2(F.relu(model.fc1(x))), 1)
    torch.testing.assert_close(model(prepared), expected)


def test_d8_the_log_softmax_runs_over_the_classes_or_as_published_over_the_batch() -> None:
    """tests/recipes/test_fashion_mnist.py has the sums over either."""
    assert compose(["recipe=fashion_mnist"]).config.recipe.model["log_softmax_dim"] == 1
    run("recipe.model.log_softmax_dim=0", recipe=FASHION)
    assert "log_softmax_dim=0" in recipes_page()


def test_d9_the_published_figures_stand_beside_the_measured_ones() -> None:
    run("precision=fp32", recipe=FASHION, steps=2, name="outputs/a")
    run("precision=half_sr", recipe=FASHION, steps=2, name="outputs/b")
    for text in (*compared("outputs/a", "outputs/b"), recipes_page()):
        for figure in ("about 0.84", "less than 1 point", "about 26 % less", "IPU"):
            assert figure in text, figure


def test_d10_the_footprints_of_two_modes_are_in_one_picture() -> None:
    words = [*FASHION, "precision=fp32,half_sr"]
    found = written("memory", *words, file="memory.json", name="plan")
    fp32, half = (mode["bytes"] for mode in found["modes"])
    count = sum(p.numel() for p in FashionMnist(28, 1).model().parameters())
    assert (fp32["parameters"], half["parameters"]) == (4 * count, 2 * count)
    assert fp32["gradients"] == 2 * half["gradients"] > 0  # those that are there at the peak
    assert half["peak"] < fp32["peak"]
    picture = (Path("plan") / "memory.svg").read_text(encoding="utf-8")
    assert "fp32" in picture
    assert "half_sr" in picture


def test_d11_an_exception_is_named_where_it_arises(capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(Path())
    words = [*WORDS, "precision=fp16_mixed", "train.epochs=2"]
    halting = [*words, "recipe.model.case=fp16_hostile", "debug.fp_exceptions=halt"]
    assert main([*halting, "run.dir=halted"]) == 1
    shown = capsys.readouterr()
    assert "square" in shown.out + shown.err or "pow" in shown.out + shown.err
    assert "float16" in shown.out + shown.err
    clean = [*words, "recipe.model.case=conv_bias", "debug.fp_exceptions=true"]
    assert main([*clean, "run.dir=run"]) == 0
    row: dict[str, Any] = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))
    assert row["fp_exceptions"]["action"] == "log"
    assert row["fp_exceptions"]["finding"] == 0


def test_d11_a_nan_of_the_forward_pass_is_found_though_its_steps_are_skipped() -> None:
    faulty.write_recipe()
    words = [*faulty.WORDS, "recipe.model.fault=roots", "precision=fp16_mixed"]
    assert main([*words, "debug.fp_exceptions=log", "run.dir=run"]) == 1
    row: dict[str, Any] = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))
    assert row["status"] == "failed"  # it never took a step
    assert row["fp_exceptions"]["finding"] > 0


def test_d12_without_the_hardware_a_mode_is_emulated_and_rounds_stochastically() -> None:
    summary = run("precision=half_sr_full", recipe=LINEAR)
    assert summary.execution == "emulated"
    assert summary.effective.rounding_scope == "all"
    x = torch.full((100_000,), 1 + 2.0**-12)  # a quarter of the way to the neighbour above
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, x.shape, dtype=torch.int32, generator=draw)
    up = (round_stochastic(x, FP16, bits) > 1).double().mean().item()
    assert abs(up - 0.25) < 6 * (0.25 * 0.75 / 100_000) ** 0.5
    run("precision=half_sr_full", recipe=LINEAR, name="again")
    assert losses() == losses("again")


def test_d13_float32_accumulation_without_a_loss_scale() -> None:
    words = ["precision=half_sr", "precision.accum_dtype=float32", "loss_scale=none"]
    summary = run(*words)
    assert summary.loss_scale.kind == "none"
    assert summary.effective.accum_dtype == "float32"
    assert dtypes() == {FP16}


@pytest.mark.parametrize("mode", ["fp16_true", "half_sr"])
def test_d14_floating_inputs_are_converted_before_they_travel(mode: str) -> None:
    composed = compose([*LINEAR, f"precision={mode}"])
    away = replace(make_plan(composed.config, composed.given), device=torch.device("meta"))
    with Sent() as sent:
        batch = next(build_parts(away).train.epoch(None))
    assert batch.parts[0].inputs[0].device.type == "meta"
    assert sent.dtypes
    assert FP16 in sent.dtypes  # the inputs
    assert batch.parts[0].inputs[0].dtype == FP16
