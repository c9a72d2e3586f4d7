"""The recipes of examples/: each trains in the main modes, in the dtypes of its mode."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mprun.cli.main import main
from mprun.records.run_record import read_lines, read_summary
from tests.examples.recipes import EXAMPLES, recipe

pytestmark = pytest.mark.usefixtures("native_is_fast")

MODES = {
    "fp64": ("float64", "float64"),
    "fp32": ("float32", "float32"),
    "bf16_mixed": ("float32", "bfloat16"),
    "fp16_mixed": ("float32", "float16"),
    "bf16_sr": ("bfloat16", "bfloat16"),
    "half_sr": ("float16", "float16"),
}
"""The dtypes of parameters and of matmuls."""
STEPS = 3


@pytest.mark.representative(
    "vae-bf16_mixed", "vae-half_sr", "strings_adagrad-bf16_sr", "language_lstm-fp16_mixed"
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_in_the_dtypes_of_its_mode(name: str, mode: str) -> None:
    words = [recipe(name), f"precision={mode}", "device=cpu", "run.dir=run"]
    if mode in ("fp16_mixed", "half_sr"):
        words.append("loss_scale.value=256")  # so that no step overflows
    assert main([*words, f"train.max_steps={STEPS}"]) == 0

    params, compute = MODES[mode]
    summary = read_summary(Path("run"))
    assert (summary.status, summary.steps, summary.skipped_steps) == ("completed", STEPS, 0)
    assert (summary.effective.param_dtype, summary.effective.compute_dtype) == (params, compute)
    steps = [line for line in read_lines(Path("run")) if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(math.isfinite(float(line["loss"])) for line in steps)

    state = torch.load("run/checkpoints/last.pt", weights_only=True)["trainer"]
    in_float32 = (summary.effective.layers or {}).keys()
    found = {
        key: str(value.dtype).removeprefix("torch.")
        for key, value in state["model"].items()
        if value.is_floating_point() and not key.endswith(("running_mean", "running_var"))
    }
    wrong = {
        key: dtype
        for key, dtype in found.items()
        if dtype != ("float32" if key.startswith(tuple(in_float32)) else params)
    }
    assert found
    assert not wrong
    if name == "strings_adagrad" and params in ("bfloat16", "float16"):
        # An optimizer by its path steps float32 masters of the 16-bit parameters.
        assert summary.backend.optimizer_impl == "masters"
    elif params not in ("float32", "float64"):
        assert summary.backend.optimizer_impl == "c"
