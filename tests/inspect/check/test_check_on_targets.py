"""What a mode would do on other hardware: what differs there, and its first step there."""

from pathlib import Path

import pytest

from mprun.inspect.check.check import check_modes, plan_check
from mprun.inspect.check.check_on_targets import on_targets
from mprun.inspect.check.check_result import CheckRecord, CheckSettings, Finding

pytestmark = pytest.mark.usefixtures("native_is_fast")

RECIPE = """
import torch
from torch import nn

{before}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.constant = torch.ones(16, dtype=torch.float64)

    def forward(self, x):
        y = self.linear(x)
        {code}
        return torch.relu(y)


def model():
    return nn.Sequential(nn.Linear(16, 16), Block(), nn.Linear(16, 1))


def data():
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    return {{"train": (x, {targets}), "validation": None}}


def loss(output, batch):
    return nn.functional.mse_loss(output, {loss})
"""
DOUBLES = """
@torch.library.custom_op("mprun_test::{name}", mutates_args=())
def kernel(x: torch.Tensor) -> torch.Tensor:
    return x * (2.0 if x.dtype == torch.bfloat16 else {number})

kernel.register_autograd(lambda context, gradient: gradient)
"""
ALL = ["t4", "v100", "a100", "h100", "mps", "cpu-avx2"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tmp_path / "small.py"


def found(
    path: Path,
    targets: list[str],
    *overrides: str,
    before: str = "",
    code: str = "pass",
    given: str = "y",
    loss: str = "batch[1]",
) -> list[Finding]:
    path.write_text(RECIPE.format(before=before, code=code, targets=given, loss=loss))
    modes = plan_check([f"recipe={path}", *overrides], None, CheckSettings(targets=targets))
    return [x for mode in modes for x in on_targets(mode)]


def test_what_the_hardware_has_gives_nothing(recipe: Path) -> None:
    assert found(recipe, ["h100", "a100"], "precision=fp32,bf16_mixed,fp16_mixed,tf32") == []
    assert found(recipe, ["t4", "v100"], "precision=fp32,fp16_mixed") == []
    assert found(recipe, ALL, "precision=fp32") == []
    assert found(recipe, ["mps"], "precision=bf16_mixed,fp16_mixed,bf16_true") == []


def test_emulation_is_the_same_on_all_hardware(recipe: Path) -> None:
    assert found(recipe, ALL, "precision=bf16_mixed", "execution=emulated") == []
    assert found(recipe, ALL, "precision=half_sr_full") == []


@pytest.mark.parametrize("precision", ["bf16_mixed", "bf16_true"])
def test_bfloat16_without_units_agrees_in_a_healthy_model(recipe: Path, precision: str) -> None:
    (x,) = found(recipe, ["t4", "v100", "h100"], f"precision={precision}")
    assert (x.kind, x.severity, x.module) == ("target_differs", "warning", "")
    assert x.text.startswith("on t4, v100: bfloat16: ")
    assert "the first step agrees, loss " in x.text


@pytest.mark.parametrize("there", ["one", "nan"])
def test_a_kernel_that_is_another_in_bfloat16_does_not_agree(recipe: Path, there: str) -> None:
    number = {"one": "1.0", "nan": "float('nan')"}[there]
    (x,) = found(
        recipe,
        ["cpu-avx2"],
        "precision=bf16_mixed",
        before=DOUBLES.format(name=there, number=number),
        code=f"y = torch.ops.mprun_test.{there}(y)",
    )
    assert "the first step does not agree" in x.text
    assert f"{'inf ' if there == 'nan' else ''}times the bound of rounding" in x.text


def test_float16_of_a_cpu_without_instructions(recipe: Path) -> None:
    (x,) = found(recipe, ["cpu-avx2"], "precision=fp16_mixed", "speed=plain")
    assert x.text.startswith("on cpu-avx2: float16: needs AVX512-FP16")
    assert "the first step agrees" in x.text


def test_float16_without_a_loss_scale(recipe: Path) -> None:
    (x, _) = found(recipe, ["a100", "cpu-avx2"], "precision=fp16_mixed", "loss_scale=none")
    assert x.text.startswith("on a100: float16 without a loss scale")
    assert found(recipe, ["a100"], "precision=bf16_mixed", "loss_scale=none") == []


def test_formats_of_products_and_tf32(recipe: Path) -> None:
    fp8 = found(recipe, ["a100", "h100"], "precision=fp8_rowwise")
    assert [x.text.partition(":")[0] for x in fp8] == ["on a100"]
    assert "fp8_rowwise" in fp8[0].text
    (nvfp4,) = found(recipe, ["h100"], "precision=nvfp4")
    assert "compute capability 10.0" in nvfp4.text
    (tf32,) = found(recipe, ["t4", "a100", "mps"], "precision=tf32")[:1]
    assert tf32.text.startswith("on t4: tf32: ")


def test_a_layer_with_a_dtype_of_its_own_is_named(recipe: Path) -> None:
    layers = "precision.layers={1.linear: bf16}"
    (x,) = found(recipe, ["t4"], "precision=fp16_mixed", layers)
    assert (x.module, x.text.split(":")[:2]) == ("1.linear", ["on t4", " bfloat16"])


@pytest.mark.parametrize(
    "code", ["y = y.double().float()", "y = y + y.new_ones(16, dtype=torch.float64).to(y)"]
)
def test_float64_on_the_device_is_refused_on_mps_with_its_line(recipe: Path, code: str) -> None:
    (x,) = found(recipe, ["mps", "a100"], "precision=fp32", code=code, loss="batch[1].float()")
    assert (x.kind, x.severity, x.module) == ("target_refuses", "error", "1")
    assert x.text.startswith("on mps: float64 of ")
    assert "small.py:" in x.line


def test_float64_in_the_loss(recipe: Path) -> None:
    (x,) = found(recipe, ["mps"], "precision=bf16_mixed", loss="batch[1].double().float()")
    assert "(loss)" in x.line


def test_float64_in_the_batch(recipe: Path) -> None:
    (x,) = found(recipe, ["mps"], "precision=fp32", given="y.double()", loss="batch[1].float()")
    assert x.text.startswith("on mps: float64 in the batch")


def test_float64_constants_that_stay_on_the_cpu_are_no_finding(recipe: Path) -> None:
    code = "y = y + self.constant.cumsum(0).to(y.dtype)"
    assert found(recipe, ["mps"], "precision=fp32", code=code) == []


def test_a_check_says_what_each_mode_does_on_each_target(recipe: Path) -> None:
    recipe.write_text(RECIPE.format(before="", code="pass", targets="y", loss="batch[1]"))
    settings = CheckSettings(targets=["t4", "h100"])
    modes = plan_check([f"recipe={recipe}", "precision=fp32,bf16_mixed"], None, settings)
    record = check_modes(modes, settings).record
    assert isinstance(record, CheckRecord)
    answers = [x for x in record.notes if x.startswith(("t4: ", "h100: "))]
    assert answers == ["t4: as asked: fp32; differs: bf16_mixed", "h100: runs as asked"]
    assert [mode.figures["target t4"] for mode in record.modes] == ["as asked", "differs"]
    assert [x.kind for _, x in record.findings if x.kind.startswith("target")] == ["target_differs"]


def test_without_targets_nothing_is_said_of_them(recipe: Path) -> None:
    recipe.write_text(RECIPE.format(before="", code="pass", targets="y", loss="batch[1]"))
    settings = CheckSettings(budget_s=1e-3)
    record = check_modes(plan_check([f"recipe={recipe}"], None, settings), settings).record
    assert isinstance(record, CheckRecord)
    assert all("targets" not in {*mode.done, *mode.not_done} for mode in record.modes)
