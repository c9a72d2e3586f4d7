"""In which dtype products are added up, and what depends on oneDNN's instructions else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mprun.precision import partials
from mprun.precision.partials import LANES, TERMS, sum_of_ones
from mprun.precision.products import PRODUCTS
from tests.each import each

CPU = torch.device("cpu")
aten = torch.ops.aten
BACKWARD = aten.convolution_backward.default


@each("dtype", [torch.float16, torch.bfloat16])
@each("op", PRODUCTS, ids=str)
def test_every_product_is_measured(op: object, dtype: torch.dtype) -> None:
    assert 256 <= sum_of_ones(op, dtype, CPU) <= TERMS


class Blocked:
    """A matmul whose running sum is rounded to its inputs' dtype after every 32 products."""

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype == torch.float64:
            return a @ b
        total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
        for x, y in zip(a.split(LANES, 1), b.split(LANES, 0), strict=True):
            total = (total.float() + x.float() @ y.float()).to(a.dtype)
        return total


def test_a_kernel_that_rounds_its_running_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Blocked()
    shapes = partials._OPERANDS[aten.mm.default]
    monkeypatch.setitem(partials._OPERANDS, kernel, shapes)
    monkeypatch.setattr(partials, "MATMULS", {kernel: (0, 1)})
    assert sum_of_ones(kernel, torch.float16, CPU) == 2048
    assert sum_of_ones(kernel, torch.bfloat16, CPU) == 256


def direct(dtype: torch.dtype) -> float:
    """4,096 samples of one pixel, a gradient of one each: the weight's, by PyTorch alone."""
    x = torch.ones(TERMS, 1, 1, 1, dtype=dtype)
    weight = torch.ones(1, 1, 1, 1, dtype=dtype, requires_grad=True)
    torch.conv2d(x, weight).sum(dtype=torch.float32).backward()
    assert weight.grad is not None
    return weight.grad.item()


@each("dtype", [torch.float16, torch.bfloat16])
def test_the_measurement_agrees_with_a_convolution_of_ones(dtype: torch.dtype) -> None:
    assert sum_of_ones(BACKWARD, dtype, CPU) <= direct(dtype)
    if direct(dtype) < TERMS:
        assert sum_of_ones(BACKWARD, dtype, CPU) == direct(dtype)


SCRIPT = """
import json, sys, torch
from pathlib import Path
from typing import Any
from mprun.cli.main import main
from mprun.records.run_record import read_summary
from tests.precision.convolutional import WORDS
from tests.precision.test_accumulation_dtype import direct
from tests.precision.test_arithmetic import Recurrent, lstm_step

runs = {
    "plain": [*WORDS, "precision=fp16_true", "speed=plain"],
    "auto": [*WORDS, "precision=fp16_true"],
    "mixed": [*WORDS, "precision=bf16_mixed", "execution=native"],
    "float32": [*WORDS, "precision=fp32"],
    "no convolution": ["recipe=linear", "precision=fp16_true", "speed=plain"],
    "substituted": ["recipe=linear", "precision=fp16_true"],
}
found = {"direct": [direct(torch.float16), direct(torch.bfloat16)]}
for name, words in runs.items():
    assert main([*words, "train.max_steps=2", "device=cpu", f"run.dir={name}"]) == 0
    summary = read_summary(Path(name))
    found[name] = [
        summary.requested.partials_dtype,
        summary.effective.partials_dtype,
        [text for text in summary.warnings if "accumulates in" in text],
        [x.op for x in summary.substitutions],
    ]
for name in ("fp16_mixed", "bf16_mixed"):
    out, by = lstm_step(name, Recurrent(), torch.randn(4, 3, 6))
    listed = [x.op for x in by.arithmetic.substitutions]
    found[f"LSTM {name}"] = [bool(out.isfinite().all()), listed]
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("as it is", "AVX512_CORE")),
        "AVX2",
    ],
)
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """Runs in a process whose oneDNN has the machine's instructions, or none for 16 bits.

    It reads the variable as it starts.
    """
    limit = {} if request.param == "as it is" else {"ONEDNN_MAX_CPU_ISA": request.param}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path_factory.mktemp("runs"),
        env={**os.environ, **limit, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = json.loads(done.stdout.rpartition("FOUND")[2])
    return found


def test_a_record_says_in_which_dtype_its_kernels_add_up(runs: dict[str, list[Any]]) -> None:
    float16, bfloat16 = runs["direct"]
    for name, reached, dtype in (("plain", float16, "float16"), ("mixed", bfloat16, "bfloat16")):
        asked, effective, warnings, _ = runs[name]
        assert asked == "float32"
        if reached == TERMS:
            assert (effective, warnings) == ("float32", [])
        else:
            text = f"aten.convolution_backward accumulates in {dtype} on this machine, not in "
            text += f"float32: a sum that should be 4,096 comes out as {reached:,.0f}"
            assert (effective, warnings) == (dtype, [text])
    for name in ("auto", "float32", "no convolution", "substituted"):
        # That op is substituted, or not there.
        assert runs[name][1:3] == ["float32", []], name


def test_substitutions_name_only_ops_that_occurred(runs: dict[str, list[Any]]) -> None:
    assert runs["auto"][3][0] == "aten.convolution_backward"
    products = {"aten.convolution", "aten.mm", "aten.addmm"}  # the CNN's, where they are slow
    assert set(runs["auto"][3]) - {"aten.convolution_backward"} in (set(), products)
    assert set(runs["substituted"][3]) in (set(), {"aten.mm", "aten.addmm"})
    for name in ("plain", "mixed", "float32", "no convolution"):
        assert runs[name][3] == [], name


def test_lstms_train_whatever_instructions_onednn_has(runs: dict[str, list[Any]]) -> None:
    """With AVX2 alone it has no bfloat16 LSTM either."""
    for name, replaced in (("fp16_mixed", (2,)), ("bf16_mixed", (0, 2))):
        finite, listed = runs[f"LSTM {name}"]
        assert finite, name
        assert len(listed) in replaced, name
