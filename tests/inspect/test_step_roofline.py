"""A recipe's step: its FLOPs by hand, its share of the roof, and the gains of formats."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from mprun.errors import RunFailedError, UsageError
from mprun.inspect import step_roofline
from mprun.inspect.doctor import plan_step
from mprun.inspect.step_roofline import (
    ABOVE_THE_ROOF,
    EMULATED,
    StepCount,
    best_rate,
    count_step,
    layer_us,
    measure_formats,
    recipe_roofline,
)
from mprun.precision.gemms import RECIPES
from mprun.records.reader import read_json
from mprun.records.run_record import StepTimes
from mprun.train.machine.doctor_result import (
    SCHEMA_VERSION,
    Examination,
    FormatGains,
    Roofline,
    Shape,
    format_verdicts,
)
from tests.schema import conforms
from tests.train.machine import AVX2_ONLY, measured

pytestmark = pytest.mark.usefixtures("native_is_fast")

CPU = torch.device("cpu")
TINY = {
    "linear": ["train.batch_size=64"],
    "mnist": ["train.batch_size=64"],
    "fashion_mnist": ["train.batch_size=4"],
    "resnet": ["train.batch_size=4"],
    "char_gpt": ["train.batch_size=2"],
    "transformer": ["train.batch_size=2"],
}
MADE_UP = measured(AVX2_ONLY, {"bfloat16": 5.0, "float16": 0.1})
"""100 GFLOP/s in float32; 500 at most in bfloat16; each 90th percentile is 1.1 times as much."""


def roof_of(*overrides: str, steps: int = 3) -> Roofline:
    return recipe_roofline(plan_step(["device=cpu", *overrides]), MADE_UP, steps)[0]


# ---- the share of the roof -----------------------------------------------------------------------


@pytest.mark.representative("linear-fp32", "fashion_mnist-bf16_mixed", "char_gpt-bf16_mixed")
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("recipe", TINY)
def test_a_step_is_held_against_its_least_time(recipe: str, precision: str) -> None:
    roof = roof_of(f"recipe={recipe}", f"precision={precision}", *TINY[recipe])
    assert conforms(roof, Roofline)
    name, rate = ("float32", 110.0) if precision == "fp32" else ("bfloat16", 550.0)
    assert roof.gflops == pytest.approx({name: rate})
    assert roof.least_ms == pytest.approx(roof.flops / rate / 1e6) != 0
    assert roof.step_time_ms.n == 3
    assert roof.step_time_ms.median is not None
    assert roof.share == pytest.approx(roof.least_ms / roof.step_time_ms.median)


def test_the_products_of_a_recipe_are_counted_by_hand() -> None:
    planned = plan_step(["recipe=linear", "device=cpu", "train.batch_size=16"])
    step = count_step(planned)
    weight = planned.plan.recipe.model().weight
    # forward and the gradient of the weight; samples have no gradient
    assert step.flops == 2 * (2 * 16 * weight.numel())


ATTENTION = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        x = x * self.scale
        return nn.functional.scaled_dot_product_attention(x, x, x)


def model():
    return Model()


def data():
    x = torch.randn(8, 2, 32, 16)
    return {"train": (x, x)}


def loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])


DEFAULTS = {"train.batch_size": 4}
"""


def test_attention_on_a_cpu_is_counted_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "attention.py"
    file.write_text(ATTENTION)
    # speed=auto would make four dimensions channels-last, for which there is no fused kernel
    step = count_step(plan_step([f"recipe={file}", "device=cpu", "speed=plain"]))
    product = 2 * 4 * 2 * 32 * 32 * 16  # of 4 samples, 2 heads
    # two products forward; backward one again, for the weights, and two gradients of each
    assert step.flops == (2 + 5) * product


def test_a_step_that_fails_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "fails.py"
    file.write_text(ATTENTION.replace("x = x * self.scale", 'raise RuntimeError("planted")'))
    with pytest.raises(RunFailedError, match=r"cannot run the model's step: .*planted") as failed:
        roof_of(f"recipe={file}")
    assert "\n" not in str(failed.value)


def test_float32_stands_in_for_a_slower_format() -> None:
    plan = plan_step(["recipe=linear", "device=cpu", "precision=fp16_mixed"]).plan
    assert best_rate(MADE_UP, plan) == ("float16", pytest.approx(110.0))


def test_an_emulated_mode_has_the_products_of_its_native_one() -> None:
    words = ("recipe=mnist", "train.batch_size=8")
    flops = roof_of(*words, "precision=fp32", steps=0).flops
    for mode in ("half_sr_full", "nvfp4"):
        roof = roof_of(*words, f"precision={mode}", "execution=emulated", steps=1)
        assert roof.notes[:1] == [EMULATED]
        assert roof.flops == flops


def test_a_compiled_step_is_counted_op_by_op() -> None:
    words = ["recipe=linear", "device=cpu", "train.batch_size=8"]
    assert count_step(plan_step([*words, "speed.compile=true"])) == count_step(plan_step(words))


def test_a_step_above_the_roof_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    none = StepTimes(median=1e-9, p10=1e-9, p90=1e-9, n=3, warmup=5)
    monkeypatch.setattr(step_roofline, "_timed", lambda *args: none)
    assert roof_of("recipe=linear").notes == [ABOVE_THE_ROOF]


def test_the_record_is_read_back(tmp_path: Path) -> None:
    roof = roof_of("recipe=linear", "train.batch_size=8")
    file = tmp_path / "doctor.json"
    for record in (MADE_UP, replace(MADE_UP, roofline=roof, formats=[])):
        file.write_text(json.dumps(asdict(record)))
        assert read_json(file, Examination, SCHEMA_VERSION) == record
    file.write_text(json.dumps({**asdict(MADE_UP), "roofline": {"recipe": 1}}))
    with pytest.raises(UsageError, match=r"doctor\.json.*recipe"):
        read_json(file, Examination, SCHEMA_VERSION)


# ---- formats of 8 bits or fewer ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bf16_mixed", "mxfp8"])
def test_shapes_are_those_of_the_layers_in_a_step(mode: str) -> None:
    """Without the last layer: ten classes are no multiple of 16."""
    planned = plan_step(["recipe=mnist", f"precision={mode}", "train.batch_size=100", "device=cpu"])
    step = count_step(planned)
    assert step.shapes == {Shape(100, 784, 256): ["0"], Shape(100, 256, 256): ["2"]}
    assert step.converted == ["2"]


def test_without_float8_units_no_format_is_measured() -> None:
    step = StepCount(0, {Shape(64, 64, 64): ["a"]}, ["a"])
    assert measure_formats(step, CPU) == (
        "formats of 8 bits or fewer: none pays here, cpu has no float8 matmuls"
    )


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that multiplies all of `RECIPES`: large layers twice as fast, small ones half as fast."""

    def layer_us(shape: Shape, name: str | None, device: torch.device) -> float:
        own = float(shape.in_features)
        return own if name is None else own * (0.5 if own > 1000 else 2.0)

    monkeypatch.setattr(step_roofline.gemms, "why_not_native", lambda name, device: None)
    monkeypatch.setattr(step_roofline, "layer_us", layer_us)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")


def gains_of(shapes: dict[Shape, list[str]], converted: tuple[str, ...] = ()) -> FormatGains:
    with pytest.MonkeyPatch.context() as monkeypatch:
        on_a_gpu(monkeypatch)
        shapes = shapes or {Shape(8, 16, 16): ["a"]}
        gains = measure_formats(StepCount(0, shapes, [*converted]), CPU)
    assert conforms(gains, FormatGains)
    assert isinstance(gains, FormatGains)
    return gains


def test_the_sum_is_over_converted_layers() -> None:
    shapes = {Shape(64, 4000, 64): ["a", "b"], Shape(64, 400, 64): ["c"], Shape(64, 16, 64): ["d"]}
    found = gains_of(shapes, ("a", "b", "c"))
    # 2 layers of 4,000 us become 2,000, one of 400 us becomes 800; d is not converted
    assert found.speedup == dict.fromkeys(RECIPES, pytest.approx(8400 / 4800))
    assert gains_of(shapes).speedup == {}
    first, *_ = format_verdicts(found)
    assert first == (
        f"{next(iter(RECIPES))} pays for 2 of 4 linear layers on Some GPU (at least 1.05 times as "
        f"fast); precision={next(iter(RECIPES))} makes the layers that it converts 1.75 times as "
        "fast"
    )
    slower, *_ = format_verdicts(gains_of(shapes, ("c",)))
    assert slower.endswith("makes the layers that it converts 0.50 times as fast")


@pytest.mark.parametrize("name", [None, *RECIPES])
def test_a_layer_of_torchao_is_timed(name: str | None) -> None:
    """Its emulation here: the way to it is the same on a GPU."""
    assert 0 < layer_us(Shape(16, 32, 48), name, CPU, native=False) < 1e7
