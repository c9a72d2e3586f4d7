"""Kernels that are wrong are named, and right ones are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.cli.main import main
from mprun.inspect import device_check
from mprun.inspect.device_check import check_device, checked_before, keep_check, kept_check
from mprun.numerics.kernel_check import LAYERS, judged
from mprun.numerics.nonfinite.op_call import op_spec
from mprun.results.kernel_check_result import KernelCheck

CPU = torch.device("cpu")
Damage = Callable[[Tensor], Tensor]


class Planted(TorchDispatchMode):
    """Damages the results of an op in a dtype."""

    def __init__(self, op: str, dtype: torch.dtype, damage: Damage) -> None:
        super().__init__()
        self._op, self._dtype, self._damage = op, dtype, damage
        self.times = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ != self._op:
            return result
        items = list(result) if isinstance(result, tuple) else [result]
        if items[0] is None or items[0].dtype != self._dtype:
            return result
        self.times += 1
        items[0] = self._damage(items[0])
        return tuple(items) if isinstance(result, tuple) else items[0]


def one_nan(x: Tensor) -> Tensor:
    damaged = x.clone()
    damaged.view(-1)[0] = float("nan")
    return damaged


def half_as_large(x: Tensor) -> Tensor:
    return x * 0.5


def one_value_lost(x: Tensor) -> Tensor:
    damaged = x.clone()
    damaged.view(-1)[int(x.abs().argmax())] = 0
    return damaged


def found(layers: list[str]) -> KernelCheck:
    return check_device(CPU, layers=[x for x in LAYERS if x.name in layers])


@pytest.mark.parametrize(
    ("layer", "op", "dtype", "damage", "problem", "phase"),
    [
        ("Linear", "addmm", torch.bfloat16, one_nan, "nan", "forward"),
        ("Linear", "addmm", torch.float32, half_as_large, "wrong", "forward"),
        ("Conv2d", "convolution_backward", torch.float16, half_as_large, "wrong", "backward"),
        ("LayerNorm", "native_layer_norm", torch.float32, one_value_lost, "wrong", "forward"),
        ("softmax", "_softmax_backward_data", torch.float32, one_nan, "nan", "backward"),
        ("GELU", "gelu", torch.bfloat16, one_nan, "nan", "forward"),
    ],
)
def test_a_planted_fault_is_named(
    layer: str, op: str, dtype: torch.dtype, damage: Damage, problem: str, phase: str
) -> None:
    with Planted(op, dtype, damage) as planted:
        check = found([layer])
    assert planted.times > 0
    assert check.faults, check
    for fault in check.faults:
        assert fault.op == op
        assert fault.dtype == str(dtype).removeprefix("torch.")
        assert (fault.problem, fault.phase) == (problem, phase)
        assert fault.layer.startswith(layer)
    assert f"{op} in {fault.dtype}" in check.answer
    assert check.answer.startswith("WRONG RESULTS")


def test_the_kernels_of_this_machine_are_right() -> None:
    check = found(["Linear", "Conv2d", "BatchNorm2d", "LayerNorm", "softmax", "cross_entropy"])
    assert check.faults == []
    assert check.ops > 150
    assert check.layers[0] == "Linear"
    assert check.answer.startswith("no fault on ")


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(5))
def test_no_layer_is_accused_by_mistake(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.manual_seed
    monkeypatch.setattr(device_check.torch, "manual_seed", lambda _: plain(seed))
    check = check_device(CPU)
    assert check.faults == []
    assert check.missing == []
    assert check.ops > 4000


def test_sums_in_bfloat16_are_told_from_sums_in_float32() -> None:
    """What old hardware does: 2,048 terms are added one by one in bfloat16."""
    torch.manual_seed(0)
    a, b = torch.rand(8, 2048).bfloat16(), torch.rand(2048, 8).bfloat16()
    exact, usual = a.double() @ b.double(), a.float() @ b.float()
    total = torch.zeros(8, 8, dtype=torch.bfloat16)
    for k in range(2048):
        total = total + a[:, k : k + 1] * b[k]
    assert judged(usual.bfloat16(), exact, usual) is None
    verdict = judged(total, exact, usual)
    assert verdict is not None
    assert verdict[0] == "wrong"


def test_an_overflow_that_the_dtype_explains_is_no_fault() -> None:
    exact = torch.tensor([1.0, 1e6], dtype=torch.float64)
    x = exact.to(torch.float16)  # infinite, as it must be
    assert judged(x, exact, exact.float()) is None
    assert judged(torch.full_like(x, float("inf")), exact, exact.float()) is not None


def test_a_check_is_kept_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check.kernels, "cache_folder", lambda: tmp_path)
    assert kept_check(CPU) is None
    check = found(["GELU"])
    keep_check(CPU, check)
    assert kept_check(CPU) == check
    next(tmp_path.glob("check_*")).write_bytes(b"damaged")
    assert kept_check(CPU) is None
    assert checked_before(CPU) == [], "the CPU's kernels are checked when someone asks"


def test_a_fault_warns_before_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_check.kernels, "cache_folder", lambda: tmp_path)
    with Planted("gelu", torch.float32, one_nan):
        check = found(["GELU"])
    monkeypatch.setattr(device_check, "kept_check", lambda device: check)
    (warning,) = checked_before(torch.device("meta"))
    assert "gelu in float32" in warning


def test_the_command_names_the_kernel_and_exits_with_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_check.kernels, "cache_folder", lambda: tmp_path)
    words = ["doctor", "check", "recipe=linear", "recipe.model.samples=64", "doctor.json=true"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["faults"] == []
    assert found["layers"][-1] == "linear"
    with Planted("addmm", torch.bfloat16, one_nan):
        assert main(["doctor", "check"]) == 3
    out = capsys.readouterr().out
    assert "addmm in bfloat16" in out
    assert "train in another precision" in " ".join(out.split())


def test_a_kernel_is_not_run_again_with_another_dtypes_workspace() -> None:
    """oneDNN's LSTM in float64, with the workspace of bfloat16, wrote outside of its memory."""
    backward = torch.ops.aten.mkldnn_rnn_layer_backward.default
    assert not op_spec(backward).runs_again
    assert op_spec(torch.ops.aten.native_batch_norm_backward.default).runs_again
    (layer,) = [layer for layer in LAYERS if layer.name == "LSTM"]
    check = check_device(torch.device("cpu"), layers=[layer])
    assert check.ops > 20
    assert check.faults == []
