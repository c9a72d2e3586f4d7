"""The table of other hardware, and what a mode would not do there."""

from pathlib import Path

import pytest

from mprun.inspect.check.check import check_modes, plan_check
from mprun.inspect.check.check_result import TARGETS as NAMES
from mprun.inspect.check.check_result import CheckRecord, CheckSettings, Finding
from mprun.inspect.check.check_targets import (
    TABLE,
    TARGETS,
    Configuration,
    FormatUse,
    on_targets,
    refused_or_different,
    target_verdict,
)

pytestmark = pytest.mark.usefixtures("native_is_fast")

FORMATS = ("bfloat16", "float16", "tf32", "fp8", "mxfp8", "nvfp4", "float16 partials", "float64")
GIB = 2**30


def figures(name: str, native: bool = False) -> dict[str, str]:
    """What a target does with each format that it does not run as asked."""
    said = {
        x: target_verdict(refused_or_different(name, Configuration({x: FormatUse()}, native)))
        for x in FORMATS
    }
    return {x: how for x, how in said.items() if how != "as asked"}


def kinds(name: str, wanted: Configuration) -> list[str]:
    return [x.kind for x in refused_or_different(name, wanted)]


def test_each_target_of_the_settings_has_a_row_with_sources() -> None:
    assert (*TARGETS,) == NAMES
    for target in TARGETS.values():
        for row in (target, *target.lacks.values()):
            assert {*row.source.split(", ")} <= {*TABLE.sources}
        assert target.memory_gib == sorted(target.memory_gib)


@pytest.mark.parametrize(
    ("name", "different"),
    [
        ("t4", {"bfloat16", "tf32", "fp8", "mxfp8", "nvfp4"}),
        ("v100", {"bfloat16", "tf32", "fp8", "mxfp8", "nvfp4"}),
        ("a100", {"fp8", "mxfp8", "nvfp4"}),
        ("h100", {"mxfp8", "nvfp4"}),
        ("mps", {"tf32", "fp8", "mxfp8", "nvfp4", "float16 partials", "float64"}),
        (
            "cpu-avx2",
            {"bfloat16", "float16", "tf32", "fp8", "mxfp8", "nvfp4", "float16 partials"},
        ),
    ],
)
def test_a_target_has_the_formats_of_its_hardware(name: str, different: set[str]) -> None:
    expected = dict.fromkeys(different, "differs")
    if name == "mps":
        expected["float64"] = "refused"
    assert figures(name) == expected


def test_native_execution_is_refused_where_only_an_emulation_can_be() -> None:
    assert figures("h100", native=True) == dict.fromkeys(("mxfp8", "nvfp4"), "refused")
    t4 = figures("t4", native=True)
    assert t4.pop("bfloat16") == "differs"  # PyTorch's own kernels compute it
    assert {*t4.values()} == {"refused"}


def test_float32_and_what_the_hardware_has_give_nothing() -> None:
    for name in TARGETS:
        assert kinds(name, Configuration()) == []
        assert kinds(name, Configuration({"float32": FormatUse("layer")})) == []
    assert kinds("h100", Configuration({"bfloat16": FormatUse()}, True, False, 80 * GIB)) == []


@pytest.mark.parametrize("name", ["t4", "v100", "a100", "h100", "mps"])
def test_float16_without_a_loss_scale_is_found_on_each_gpu(name: str) -> None:
    uses = {"float16": FormatUse()}
    assert kinds(name, Configuration(uses, scaled=True)) == []
    (found,) = refused_or_different(name, Configuration(uses, scaled=False))
    assert found.kind == "target_differs"
    assert "loss_scale=none" in found.text


def test_a_step_that_needs_more_memory_than_any_model_has_is_refused() -> None:
    assert kinds("t4", Configuration(peak_bytes=16 * GIB)) == []
    (refused,) = refused_or_different("t4", Configuration(peak_bytes=17 * GIB))
    assert (refused.kind, refused.text) == ("target_refuses", "a step takes 17 GiB, and it has 16")
    (larger,) = refused_or_different("v100", Configuration(peak_bytes=17 * GIB))
    assert (larger.kind, "32 GiB" in larger.text) == ("target_differs", True)
    assert kinds("mps", Configuration(peak_bytes=1000 * GIB)) == []


# ---- modes ---------------------------------------------------------------------------------------

RECIPE = """
import torch
from torch import nn

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
ALL = ["t4", "v100", "a100", "h100", "mps", "cpu-avx2"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tmp_path / "small.py"


def found(
    path: Path,
    targets: list[str],
    *overrides: str,
    code: str = "pass",
    given: str = "y",
    loss: str = "batch[1]",
) -> list[Finding]:
    path.write_text(RECIPE.format(code=code, targets=given, loss=loss))
    modes = plan_check([f"recipe={path}", *overrides], None, CheckSettings(targets=targets))
    return [x for mode in modes for x in on_targets(mode)]


def test_what_the_hardware_has_gives_nothing(recipe: Path) -> None:
    assert found(recipe, ["h100", "a100"], "precision=fp32,bf16_mixed,fp16_mixed,tf32") == []
    assert found(recipe, ["t4", "v100"], "precision=fp32,fp16_mixed") == []
    assert found(recipe, ALL, "precision=fp32") == []
    assert found(recipe, ["mps"], "precision=bf16_mixed,fp16_mixed,bf16_true") == []
    assert found(recipe, ALL, "precision=bf16_mixed", "execution=emulated") == []
    assert found(recipe, ALL, "precision=half_sr_full") == []


@pytest.mark.parametrize("precision", ["bf16_mixed", "bf16_true"])
def test_bfloat16_without_units_is_a_warning(recipe: Path, precision: str) -> None:
    (x,) = found(recipe, ["t4", "v100", "h100"], f"precision={precision}")
    assert (x.kind, x.severity, x.module) == ("target_differs", "warning", "")
    assert x.text.startswith("on t4, v100: bfloat16: ")


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


@pytest.mark.parametrize(
    ("precision", "model", "text", "line"),
    [
        ("bf16_mixed", {"loss": "batch[1].double().float()"}, "float64 of ", "(loss)"),
        ("fp32", {"given": "y.double()", "loss": "batch[1].float()"}, "float64 in the batch", ""),
    ],
)
def test_float64_in_the_loss_or_the_batch(
    recipe: Path, precision: str, model: dict[str, str], text: str, line: str
) -> None:
    (x,) = found(recipe, ["mps"], f"precision={precision}", **model)
    assert x.text.startswith(f"on mps: {text}")
    assert line in x.line


def test_float64_constants_that_stay_on_the_cpu_are_no_finding(recipe: Path) -> None:
    code = "y = y + self.constant.cumsum(0).to(y.dtype)"
    assert found(recipe, ["mps"], "precision=fp32", code=code) == []


def test_a_check_says_what_each_mode_does_on_each_target(recipe: Path) -> None:
    recipe.write_text(RECIPE.format(code="pass", targets="y", loss="batch[1]"))
    settings = CheckSettings(targets=["t4", "h100"])
    modes = plan_check([f"recipe={recipe}", "precision=fp32,bf16_mixed"], None, settings)
    record = check_modes(modes, settings).record
    assert isinstance(record, CheckRecord)
    answers = [x for x in record.notes if x.startswith(("t4: ", "h100: "))]
    assert answers == ["t4: as asked: fp32; differs: bf16_mixed", "h100: runs as asked"]
    assert [mode.figures["target t4"] for mode in record.modes] == ["as asked", "differs"]
    assert [x.kind for _, x in record.findings if x.kind.startswith("target")] == ["target_differs"]
