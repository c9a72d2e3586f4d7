"""Measures in which dtype the kernel of a matmul or convolution adds up its products.

A kernel for 16-bit numbers should keep its running sum in float32, and most do. Some do not: the
fallback for a convolution's backward pass, on CPUs without 16-bit instructions, adds up the
samples' weight gradients in 16 bits. No list of processors or versions names them, so the op is run
on ones. A sum of 4,096 ones is representable in float16 and in bfloat16. But a running sum in
float16 stops at 2,048, where 1 is half of the distance to the next number, and one in bfloat16 at
256. A vector instruction may keep several running sums, each of which stays below that. Long sums
are cheap in matmuls, so matmuls get as many smaller products as make each of 32 running sums stop.

The sums run over what kernels divide among loops: the inner dimension of a matmul; channels and
taps of a convolution; samples, positions and output channels of its backward pass. Another size may
use another kernel, so the result is a lower limit for what is rounded, not a promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mprun.precision.products import CONVOLUTION_BACKWARD, CONVOLUTIONS, MATMULS

aten = torch.ops.aten

TERMS = 4096  # Ones in a sum; a matmul's longer sum of smaller numbers has this value too
LANES = 32  # Running sums that a vector instruction may keep side by side, in 16 bits
# Products in a matmul's sum, of 1 / `LANES` each: as many as `TERMS` for each lane
LONG = TERMS * LANES
SIDE = 64  # Its square root: an image of so many positions
ROWS = 4  # Of a matmul, so that it is no vector product

Shape = tuple[int, ...]
# The shapes of an op's tensors, and its other arguments
Case = tuple[tuple[Shape, ...], tuple[Any, ...]]

_MATMULS: dict[Any, list[Shape]] = {
    aten.mm.default: [(ROWS, LONG), (LONG, ROWS)],
    aten.bmm.default: [(2, ROWS, LONG), (2, LONG, ROWS)],
    aten.addmm.default: [(ROWS,), (ROWS, LONG), (LONG, ROWS)],
    aten.baddbmm.default: [(2, ROWS, ROWS), (2, ROWS, LONG), (2, LONG, ROWS)],
    aten.addbmm.default: [(ROWS, ROWS), (2, ROWS, LONG // 2), (2, LONG // 2, ROWS)],
    aten.mv.default: [(ROWS, LONG), (LONG,)],
    aten.addmv.default: [(ROWS,), (ROWS, LONG), (LONG,)],
    aten.dot.default: [(LONG,), (LONG,)],
    aten.vdot.default: [(LONG,), (LONG,)],
}
# Stride, padding, dilation, transposed, output padding, groups
_GEOMETRY = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
# Input and weight of convolutions whose outputs are sums over channels, over taps
_FORWARD: list[tuple[Shape, Shape]] = [
    ((1, TERMS, 1, 1), (1, TERMS, 1, 1)),
    ((1, 1, SIDE, SIDE), (1, 1, SIDE, SIDE)),
]
# Gradient, input and weight where the gradients are sums over samples, positions, channels
_BACKWARD: list[tuple[Shape, Shape, Shape]] = [
    ((TERMS, 1, 1, 1), (TERMS, 1, 1, 1), (1, 1, 1, 1)),
    ((1, 1, SIDE, SIDE), (1, 1, SIDE, SIDE), (1, 1, 1, 1)),
    ((1, TERMS, 1, 1), (1, 1, 1, 1), (TERMS, 1, 1, 1)),
]


def _convolutions(op: Any) -> list[Case]:
    if op in CONVOLUTIONS:
        return [(shapes, (None, *_GEOMETRY)) for shapes in _FORWARD]
    assert op in CONVOLUTION_BACKWARD, op
    mask = [True, True, True]
    return [(shapes, ([shapes[2][0]], *_GEOMETRY, mask)) for shapes in _BACKWARD]


@cache
def sum_of_ones(op: Any, dtype: torch.dtype, device: torch.device) -> float:
    """The result of `op`'s kernel for sums that are `TERMS`; less if it accumulates in 16 bits.

    Measured once in a process; the backend switches are those of the first call.

    Args:
        op: a matmul or convolution, an overload of `MATMULS`, `CONVOLUTIONS` or
            `CONVOLUTION_BACKWARD`.
        dtype: float16 or bfloat16.
        device: whose kernel.

    Returns:
        The least of the sums that should be `TERMS`: over inner dimensions, channels, taps, samples
        and positions.
    """
    if op in MATMULS:
        return _least(op(*_matmul_operands(op, dtype, device)))
    least = float(TERMS)
    for shapes, rest in _convolutions(op):
        ones = [torch.ones(s, dtype=dtype, device=device) for s in shapes]
        exact = _tensors(op(*(x.cpu().double() for x in ones), *rest))
        for sums, expected in zip(_tensors(op(*ones, *rest)), exact, strict=True):
            long = sums.cpu()[expected == TERMS]
            least = min(least, _least(long)) if long.numel() else least
    return least


def _matmul_operands(op: Any, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Operands whose product is `TERMS` everywhere; an addend is 0."""
    operands = [torch.ones(s, dtype=dtype, device=device) for s in _MATMULS[op]]
    operands[-1] /= LANES
    return [torch.zeros_like(operands[0]), *operands[1:]] if len(operands) == 3 else operands


def _least(sums: Tensor) -> float:
    return sums.cpu().double().min().item()


def _tensors(result: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [result] if isinstance(result, Tensor) else result
