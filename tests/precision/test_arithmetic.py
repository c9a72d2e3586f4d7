"""Stand-ins for kernels: TF32 rounding bit for bit, float16 ops by float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.precision import (
    Arithmetic,
    BlockedConvolutions,
    Emulated16,
    Float16Fallback,
    NativeArithmetic,
    Precision,
    round_to_tf32,
)
from mprun.precision.arithmetic import occurred_substitutions
from tests.each import each


def exact_tf32(x: Tensor) -> Tensor:
    """The oracle: nearest multiple of the last kept bit's weight, ties to even, in float64."""
    wide = x.double()
    _, exponent = torch.frexp(wide)
    # Normals have an 11-bit significand; below 2^-126 the quantum stays that of subnormals.
    quantum = torch.ldexp(torch.ones_like(wide), torch.clamp(exponent - 11, min=-126 - 10))
    return (torch.round(wide / quantum) * quantum).float()  # torch.round takes ties to even


def test_every_dropped_pattern_at_every_exponent_rounds_exactly() -> None:
    """All 2^13 patterns of the bits that go, above even and odd kept bits, every exponent."""
    dropped = torch.arange(2**13, dtype=torch.int64)
    for exponent in range(255):
        for kept in (0, 1, 2**10 - 1):
            bits = (exponent << 23) | (kept << 13) | dropped
            x = bits.to(torch.int32).view(torch.float32)
            for signed in (x, -x):
                found, exact = round_to_tf32(signed), exact_tf32(signed)
                assert torch.equal(found.view(torch.int32), exact.view(torch.int32))


def half(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


OPS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mm": (torch.ops.aten.mm.default, (half(8, 32, seed=0), half(32, 8, seed=1))),
    "addmm": (
        torch.ops.aten.addmm.default,
        (half(8, seed=0), half(4, 32, seed=1), half(32, 8, seed=2)),
    ),
    "mv": (torch.ops.aten.mv.default, (half(8, 32, seed=0), half(32, seed=1))),
    "dot": (torch.ops.aten.dot.default, (half(32, seed=0), half(32, seed=1))),
    "bmm": (torch.ops.aten.bmm.default, (half(2, 8, 16, seed=0), half(2, 16, 8, seed=1))),
    "convolution": (
        torch.ops.aten.convolution.default,
        (
            *(half(2, 3, 10, 10, seed=0), half(4, 3, 3, 3, seed=1), half(4, seed=2)),
            *([1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        ),
    ),
    "convolution_backward": (
        torch.ops.aten.convolution_backward.default,
        (
            *(half(2, 4, 8, 8, seed=0), half(2, 3, 10, 10, seed=1), half(4, 3, 3, 3, seed=2)),
            *([4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]),
        ),
    ),
}


@each("name", OPS)
def test_float16_by_float32_rounds_the_exact_result_once(name: str) -> None:
    """Against float64: a half-unit rounding to float16, and float32 sums before it."""
    op, args = OPS[name]
    exact = op(*[a.double() if isinstance(a, Tensor) else a for a in args])
    with Float16Fallback(matmuls=True).region():
        found = op(*args)
    for a, b in zip(*[(x,) if isinstance(x, Tensor) else x for x in (found, exact)], strict=True):
        assert a.dtype == torch.float16
        # 2^-11 is half a unit of float16; 1e-5 covers float32 sums of some hundred terms of size 1.
        torch.testing.assert_close(a.double(), b, rtol=2**-11, atol=1e-5)


class Counted(TorchDispatchMode):
    """The ops that ran, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func).removesuffix(".default"))
        return func(*args, **(kwargs or {}))


@each(
    ("model", "shape"),
    [
        (nn.Linear(8, 4), (3, 8)),
        (nn.Linear(8, 4, bias=False), (3, 8)),
        (nn.Conv2d(2, 3, 3), (2, 2, 8, 8)),
        (nn.ReLU(), (3, 8)),
    ],
)
@each(
    "arithmetic",
    [
        lambda: Float16Fallback(matmuls=True),
        lambda: Float16Fallback(matmuls=False),
        lambda: Emulated16("nearest", "infinity", "float16", 0),
        BlockedConvolutions,
    ],
)
def test_substitutions_that_occurred_are_those_whose_op_ran(
    arithmetic: Callable[[], Arithmetic], model: nn.Module, shape: tuple[int, ...]
) -> None:
    """Against the ops a mode of the test's own counts above the arithmetic."""
    made, half_model = arithmetic(), copy.deepcopy(model).half()
    assert occurred_substitutions(made) == []
    counted, x = Counted(), torch.zeros(shape, dtype=torch.float16, requires_grad=True)
    with made.region(), counted:
        half_model(x).sum().backward()
    named = {s.op for s in occurred_substitutions(made)}
    planned = {s.op for s in made.substitutions}
    assert named - {"*"} == planned & counted.names
    assert ("*" in named) == ("*" in planned)


def test_the_first_step_shows_which_products_are_computed_in_16_bits() -> None:
    arithmetic, model = NativeArithmetic(watch=True), nn.Linear(8, 4).bfloat16()
    x = torch.zeros(3, 8, dtype=torch.bfloat16)
    with arithmetic.region():
        model(x)  # no step yet: evaluation is not looked at
    assert arithmetic.products == set()
    arithmetic.begin_step(1)
    with arithmetic.region():
        model(x).sum().backward()
    arithmetic.end_step()
    aten = torch.ops.aten
    expected = {(op.default, torch.bfloat16) for op in (aten.addmm, aten.mm)}
    assert arithmetic.products == expected
    arithmetic.begin_step(2)
    with arithmetic.region(), Counted() as counted:
        torch.ones(2, 2).half() @ torch.ones(2, 2).half()
    assert "aten.mm" in counted.names
    assert arithmetic.products == expected  # later steps run at their full speed


class Recurrent(nn.Module):
    """An LSTM with all that it can have, and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True)
        self.last = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.lstm(x)[0])
        return out


def lstm_step(policy_name: str, model: nn.Module, x: Tensor) -> tuple[Tensor, Precision]:
    """One forward and backward pass as a run takes it; the outputs, and what carried it out."""
    by = Precision(policy_name, device="cpu", execution=NativeArithmetic(), loss_scale="none")
    by.prepare(model, torch.device("cpu"))
    out = by.forward(model, x)
    by.backward(by.loss(lambda y, _: y.square().sum(), out, x))
    return out.detach(), by


def test_an_lstm_that_onednn_does_not_have_is_computed_in_float32_and_listed() -> None:
    """PyTorch's autocast asks for a float16 primitive, which does not exist, and dies."""
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(4, 3, 6)
    with pytest.raises(RuntimeError, match="primitive"), torch.autocast("cpu", torch.float16):
        model(x)
    exact = copy.deepcopy(model)
    wide = exact(x)
    wide.square().sum().backward()
    out, by = lstm_step("fp16_mixed", model, x)
    # A handful of roundings to float16, 2^-11 each, of numbers of size 1.
    torch.testing.assert_close(out, wide.detach(), rtol=0, atol=8 * 2**-11)
    assert not torch.equal(out, wide.detach())
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=2**-7 * q.grad.abs().max().item())
    listed = [s[:2] for s in by.arithmetic.substitutions]
    assert listed == [
        ("aten.mkldnn_rnn_layer", "float16"),
        ("aten.mkldnn_rnn_layer_backward", "float16"),
    ]
