"""Fused kernels under emulation: as wrong as the real ones, beside a model of doubles."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.precision.emulate import Emulated16
from tests.each import each
from tests.precision import normal

LOW = (torch.bfloat16, torch.float16)
NATIVE = 1.2
"""Errors of emulated ops over the native ones', at most, and at least its inverse."""
HEADS, STEPS, SIZE = 4, 64, 32


class Function(nn.Module):
    """A function of some inputs, as a model."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def qkv(keys: int = HEADS) -> list[Tensor]:
    return [normal(2, h, STEPS, SIZE, seed=n) for n, h in enumerate((HEADS, keys, keys))]


def attention(scale: float = 1.0, **options: Any) -> nn.Module:
    return Function(lambda q, k, v: F.scaled_dot_product_attention(scale * q, k, v, **options))


LOWER = torch.ones(STEPS, STEPS, dtype=torch.bool).tril()
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "attention": (attention, qkv),
    "causal, scores times 5": (lambda: attention(5.0, is_causal=True), qkv),
    "mask": (lambda: attention(attn_mask=LOWER), qkv),
    "added mask": (lambda: attention(attn_mask=-3.0 * (~LOWER).float()), qkv),
    "groups": (lambda: attention(enable_gqa=True), lambda: qkv(2)),
    "softmax": (lambda: nn.Softmax(-1), lambda: [5 * normal(64, 64)]),
    "group norm": (lambda: nn.GroupNorm(4, 16), lambda: [normal(8, 16, 8, 8)]),
    "rms norm": (lambda: nn.RMSNorm(64, eps=1e-6), lambda: [normal(64, 64)]),
    "lstm": (lambda: nn.LSTM(16, 32), lambda: [normal(STEPS, 8, 16)]),
    "lstm of two layers, both directions": (
        lambda: nn.LSTM(16, 32, num_layers=2, bidirectional=True, batch_first=True),
        lambda: [normal(8, STEPS, 16)],
    ),
    "gru": (lambda: nn.GRU(16, 32), lambda: [normal(STEPS, 8, 16)]),
    "rnn": (lambda: nn.RNN(16, 32), lambda: [normal(STEPS, 8, 16)]),
}
MORE_EXACT = ("layer norm", "batch norm", "log softmax", "cross entropy")
CASES |= {
    "layer norm": (lambda: nn.LayerNorm(64), lambda: [normal(64, 64)]),
    "batch norm": (lambda: nn.BatchNorm2d(16), lambda: [normal(8, 16, 8, 8)]),
    "log softmax": (lambda: nn.LogSoftmax(-1), lambda: [5 * normal(64, 64)]),
    "cross entropy": (
        lambda: Function(lambda x: F.cross_entropy(x, torch.arange(64), reduction="none")),
        lambda: [5 * normal(64, 64)],
    ),
}
"""The last ones round less than PyTorch's kernels on a CPU, whose sums of 16-bit numbers lose."""


def results(model: nn.Module, inputs: list[Tensor], region: Any) -> tuple[Tensor, Tensor]:
    """The output, and all gradients in one vector, in float64."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    with region:
        output = model(*inputs)
        output = output[0] if isinstance(output, tuple) else output
        output.backward(normal(*output.shape, seed=9).to(output.dtype))
    gradients = [x.grad for x in (*inputs, *model.parameters())]
    return output.detach().double(), torch.cat(
        [g.double().flatten() for g in gradients if g is not None]
    )


def emulated(dtype: torch.dtype, name: str) -> tuple[list[float], list[float]]:
    """The errors of output and gradients, native and emulated, as shares of the exact ones."""
    make, data = CASES[name]
    torch.manual_seed(0)
    model = make().to(dtype)
    inputs = [x.to(dtype) for x in data()]
    exact = results(
        copy.deepcopy(model).double(), [x.double() for x in inputs], contextlib.nullcontext()
    )
    arithmetic = Emulated16("nearest", "infinity", "float32", 0)
    found = []
    for region in (contextlib.nullcontext(), arithmetic.region()):
        low = results(copy.deepcopy(model), inputs, region)
        found.append([float((a - b).norm() / b.norm()) for a, b in zip(low, exact, strict=True)])
    return found[0], found[1]


def native_lstm(dtype: torch.dtype) -> bool:
    """Whether this CPU computes an LSTM in this dtype by a kernel of its own."""
    layer = nn.LSTM(4, 4).to(dtype)
    output, _ = layer(torch.zeros(2, 1, 4, dtype=dtype))
    return "Mkldnn" in str(output.grad_fn.next_functions) + str(output.grad_fn)


@each("dtype", LOW, ids=str)
@each("name", CASES)
def test_emulated_ops_are_as_wrong_as_native_ones(name: str, dtype: torch.dtype) -> None:
    if name.startswith("lstm") and dtype == torch.bfloat16 and not native_lstm(dtype):
        pytest.skip("this CPU has no kernel for an LSTM in bfloat16")
    native, ours = emulated(dtype, name)
    for real, found in zip(native, ours, strict=True):
        assert found < NATIVE * real, (native, ours)
        assert name in MORE_EXACT or found > real / NATIVE, (native, ours)


def test_rows_that_see_nothing_are_zero_as_natively() -> None:
    q, k, v = (x.bfloat16().requires_grad_() for x in qkv())
    mask = LOWER.clone()
    mask[3] = False
    with Emulated16("nearest", "infinity", "float32", 0).region():
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        output.sum().backward()
    native = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.equal(output[:, :, 3], native[:, :, 3])
    assert (output[:, :, 3] == 0).all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
