"""The dtype of partials, in which a matmul or convolution adds up its products.

Products of two float16 values are exact in float32, their sum need not be. Hardware that keeps it
in float16 is faster and loses digits. It is emulated by blocked accumulation: the K products are
cut, in order, into blocks of 64, the last one shorter:

    s_i = sum of the products in block i            in float32, by a float32 kernel
    acc_0 = round16(s_0)
    acc_i = round16(acc_(i-1) + s_i)                 added in float32, then rounded to float16

Rounding after every product would take 64 times as many steps and could not use a matmul kernel.
No particular machine's order of additions is claimed. Convolutions are matmuls of the weight with
patches of the input; products with the zeros of padding count towards the 64.

**Which kernels** add up in 16 bits is measured, as no list of processors names them: the op is run
on ones. Another size may use another kernel, so the result is a lower limit for what is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mprun.precision.products import CONVOLUTION_BACKWARD, CONVOLUTIONS, MATMULS

aten = torch.ops.aten

BLOCK = 64  # Products summed in float32 before the running sum is rounded

# The ops `blocked` computes
SUPPORTED: frozenset[Any] = frozenset({*MATMULS, *CONVOLUTIONS, *CONVOLUTION_BACKWARD})

# float32 tensor to one of the same shape with values representable in float16, in any dtype
Round = Callable[[Tensor], Tensor]

# Block sums and their patches that exist at one time, in float32 elements: 32 MiB. One block, or
# one sample's patches in a weight gradient, may be larger.
_SCRATCH = 32 * 2**20 // 4


def blocked(
    op: Any, args: Sequence[Any], round_: Round, kwargs: Mapping[str, Any] | None = None
) -> Any:
    """The op's result with its sums of products accumulated in blocks, below autograd.

    Args:
        op: one of `SUPPORTED`.
        args, kwargs: the op's arguments; float16 tensors are used as float32.
        round_: rounds partials and what is added after them.

    Returns: The op's result in float32: a tensor, or for a convolution's backward the gradients of
    input, weight and bias, None by the op's mask. What is added to the finished sum (an input, a
    bias) is added in float32, and the result rounded once more.

    Raises:
        NotImplementedError: `op` is not supported.
        RuntimeError: the factors' sizes do not fit.
    """
    if op in MATMULS:
        return _matmul(op, args, round_, **(kwargs or {}))
    if op in CONVOLUTIONS:
        return _convolution(args, round_)
    if op in CONVOLUTION_BACKWARD:
        return _convolution_backward(args, round_)
    legal = ", ".join(sorted(map(str, SUPPORTED)))
    raise NotImplementedError(f"no blocked accumulation for {op}; supported: {legal}")


# ---- sums of products -------------------------------------------------------------------------


class _Right(NamedTuple):
    """A right factor whose rows are made on demand, because patches may be large."""

    shape: tuple[int, int, int]  # [G, K, N]: G independent matmuls over K
    rows: Callable[[int, int], Tensor]  # Rows i to j: float32 [G, j - i, N]


def _given(b: Tensor) -> _Right:
    """A right factor [G, K, N] that exists."""
    groups, k, n = b.shape
    return _Right((groups, k, n), lambda i, j: b[:, i:j])


def _accumulate(left: Tensor, right: _Right, round_: Round) -> Tensor:
    """`left` [G, M, K] times `right`, accumulated in blocks: float32 [G, M, N]."""
    groups, m, k = left.shape
    if right.shape[:2] != (groups, k):
        raise RuntimeError(
            f"factors of sizes {tuple(left.shape)} and {right.shape} cannot be multiplied"
        )
    # An iterator: all block sums at once would take K / 64 times the result's memory
    sums = _block_sums(left, right)
    if (first := next(sums, None)) is None:  # an empty sum
        return left.new_zeros(groups, m, right.shape[2])
    acc = round_(first).float()
    for block_sum in sums:
        acc = round_(acc + block_sum).float()
    return acc


def _block_sums(left: Tensor, right: _Right) -> Iterator[Tensor]:
    """The blocks' sums in order, float32 [G, M, N] each, as many at a time as fit the scratch."""
    groups, m, k = left.shape
    n = right.shape[2]
    per_block = groups * (m * n + BLOCK * (m + n))
    stride = BLOCK * max(1, _SCRATCH // max(1, per_block))
    for i in range(0, k, stride):
        j = min(i + stride, k)
        yield from _multiply(left[:, :, i:j], right.rows(i, j))


def _multiply(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """The blocks' sums of `a` [G, M, k] times `b` [G, k, N]."""
    k = a.shape[2]
    whole = k - k % BLOCK
    if whole:
        a_blocks = a[:, :, :whole].unflatten(2, (-1, BLOCK)).transpose(1, 2)
        b_blocks = b[:, :whole].unflatten(1, (-1, BLOCK))
        yield from torch.matmul(a_blocks, b_blocks).unbind(1)
    if whole < k:
        yield torch.bmm(a[:, :, whole:], b[:, whole:])


def _matmul(
    op: Any, args: Sequence[Any], round_: Round, beta: float = 1, alpha: float = 1
) -> Tensor:
    a, b = (args[i].float() for i in MATMULS[op])
    if op is aten.addbmm.default:  # a sum over the batch too: one matmul with a longer reduction
        a, b = a.transpose(0, 1).flatten(1), b.flatten(0, 1)
    shape = (*a.shape[:-1], *(b.shape[-1:] if b.dim() > 1 else ()))
    if a.dim() == 1:
        a = a[None]
    if b.dim() == 1:
        b = b[:, None]
    if a.dim() == 2:
        a, b = a[None], b[None]
    product = _accumulate(a, _given(b), round_).reshape(shape)
    if MATMULS[op] == (0, 1):  # nothing is added
        return product
    total = alpha * product
    if beta != 0:  # with 0 the input is ignored, NaN and all
        total = beta * args[0].float() + total
    return round_(total).float()


# ---- convolutions -----------------------------------------------------------------------------


class _Geometry(NamedTuple):
    """How a kernel lies over its input, per spatial dimension.

    Tap t at position p reads input element p * stride + t * dilation - padding, a zero outside. The
    padding is that before the first element, and negative where elements are cut off. What is
    needed after the last element follows from the number of positions.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def _geometry(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> _Geometry:
    rank = weight.dim() - 2
    # One value may be for all dimensions.
    stride, padding, dilation = (
        tuple(v) * (rank if len(v) == 1 else 1) for v in (stride, padding, dilation)
    )
    return _Geometry(stride, padding, dilation, groups)


def _convolution(args: Sequence[Any], round_: Round) -> Tensor:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    x, weight = x.float(), weight.float()
    at = _geometry(weight, stride, padding, dilation, groups)
    if transposed:
        result = _transposed(x, weight, at, _transposed_size(x, weight, at, output_padding), round_)
    else:
        result = _correlate(x, weight, at, _size(x, weight, at), round_)
    if bias is None:
        return result
    return round_(result + bias.float().reshape(-1, *[1] * len(at.stride))).float()


def _convolution_backward(
    args: Sequence[Any], round_: Round
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    gradient, x, weight = (a.float() for a in args[:3])
    _, stride, padding, dilation, transposed, _, groups, mask = args[3:]
    at = _geometry(weight, stride, padding, dilation, groups)
    of_input = of_weight = of_bias = None
    if mask[0]:  # each kind of convolution is the other's gradient
        backward = _correlate if transposed else _transposed
        of_input = backward(gradient, weight, at, x.shape[2:], round_)
    if mask[1]:
        small, large = (x, gradient) if transposed else (gradient, x)
        of_weight = _weight_gradient(small, large, weight.shape[2:], at, round_)
    if mask[2]:
        summands = _matrices(gradient, 1)
        ones = gradient.new_ones(1, summands.shape[2], 1)
        of_bias = _accumulate(summands, _given(ones), round_).flatten()
    return of_input, of_weight, of_bias


def _correlate(
    x: Tensor, weight: Tensor, at: _Geometry, size: Sequence[int], round_: Round
) -> Tensor:
    """The convolution [B, O, size...] of `x` [B, C, ...] and `weight` [O, C / groups, taps...]."""
    batch, out = x.shape[0], weight.shape[0]
    left = weight.reshape(at.groups, out // at.groups, prod(weight.shape[1:]))
    patches = _patches(x, weight.shape[2:], at, size)
    channels, taps = patches.shape[1], prod(weight.shape[2:])

    def rows(i: int, j: int) -> Tensor:
        first, stop = i // taps, -(-j // taps)
        made = patches[:, first:stop].flatten(-len(size) - 1).flatten(1, -2)
        return made[:, i - first * taps : j - first * taps]

    right = _Right((at.groups, channels * taps, batch * prod(size)), rows)
    result = _accumulate(left, right, round_)
    return result.reshape(out, batch, *size).transpose(0, 1).contiguous()


def _transposed(
    x: Tensor, weight: Tensor, at: _Geometry, size: Sequence[int], round_: Round
) -> Tensor:
    """The transposed convolution [B, O, size...] of `x` [B, C, ...], `weight` [C, O / groups, ...].

    An input element is spread over the outputs it touches: output o takes weight tap t of input p
    where o = p * stride + t * dilation - padding. With stride - 1 zeros stuffed between inputs this
    reads input o + padding - t * dilation: a convolution of stride 1, its taps in reverse.
    """
    rank = len(size)
    stuffed = x.new_zeros(*x.shape[:2], *_extent(x.shape[2:], at.stride))
    elements: tuple[Any, ...] = (..., *[slice(None, None, s) for s in at.stride])
    stuffed[elements] = x
    # A transposed convolution's weight has the input's channels first, within each group
    flipped = weight.unflatten(0, (at.groups, -1)).transpose(1, 2).flatten(0, 1)
    flipped = flipped.flip(tuple(range(2, 2 + rank)))
    reach = _extent(weight.shape[2:], at.dilation)
    before = tuple(r - 1 - p for r, p in zip(reach, at.padding, strict=True))
    dense = _Geometry((1,) * rank, before, at.dilation, at.groups)
    return _correlate(stuffed, flipped, dense, size, round_)


def _weight_gradient(
    small: Tensor, large: Tensor, kernel: Sequence[int], at: _Geometry, round_: Round
) -> Tensor:
    """The gradient of a weight [A, C / groups, kernel...].

    `small` [B, A, positions...] has an element per position; the kernel slides over `large`.
    """
    patches = _patches(large, kernel, at, small.shape[2:])
    batch, positions = small.shape[0], prod(small.shape[2:])
    samples = len(kernel) + 2  # their dimension in the patches
    columns = patches.shape[1] * prod(kernel)

    def rows(i: int, j: int) -> Tensor:
        first, stop = i // positions, -(-j // positions)
        made = patches.narrow(samples, first, stop - first).flatten(samples).flatten(1, -2)
        # Transposed without copying: patches are fastest made with positions innermost.
        return made[:, :, i - first * positions : j - first * positions].transpose(1, 2)

    right = _Right((at.groups, batch * positions, columns), rows)
    result = _accumulate(_matrices(small, at.groups), right, round_)
    return result.reshape(small.shape[1], patches.shape[1], *kernel)


def _matrices(x: Tensor, groups: int) -> Tensor:
    """`x` [B, C, space...] as [groups, C / groups, B * space]."""
    channels = x.shape[1]
    each = channels // groups
    return x.transpose(0, 1).reshape(groups, each, x.shape[0] * prod(x.shape[2:]))


def _patches(x: Tensor, kernel: Sequence[int], at: _Geometry, size: Sequence[int]) -> Tensor:
    """What each tap reads at each position, a view: [groups, C / groups, kernel..., B, size...]"""
    reach = _extent(kernel, at.dilation)
    needed = [e + r - 1 for e, r in zip(_extent(size, at.stride), reach, strict=True)]
    pad: list[int] = []
    for n, have, before in zip(needed, x.shape[2:], at.padding, strict=True):
        pad = [max(before, 0), max(n - have - before, 0), *pad]  # F.pad starts at the last
    if any(pad):
        x = F.pad(x, pad)
    inside: tuple[Any, ...] = (..., *[slice(max(-before, 0), None) for before in at.padding])
    x = x[inside]
    batch, channels, *steps = x.stride()
    each = x.shape[1] // at.groups
    return x.as_strided(
        (at.groups, each, *kernel, x.shape[0], *size),
        (
            *(each * channels, channels),
            *(s * d for s, d in zip(steps, at.dilation, strict=True)),
            batch,
            *(s * d for s, d in zip(steps, at.stride, strict=True)),
        ),
    )


def _extent(count: Sequence[int], step: Sequence[int]) -> tuple[int, ...]:
    """The elements from the first to the last of `count` elements, `step` apart."""
    return tuple((n - 1) * s + 1 for n, s in zip(count, step, strict=True))


def _size(x: Tensor, weight: Tensor, at: _Geometry) -> tuple[int, ...]:
    """The spatial size of a convolution's output (torch.nn.Conv2d)."""
    reach = _extent(weight.shape[2:], at.dilation)
    sides = zip(x.shape[2:], at.padding, reach, at.stride, strict=True)
    return tuple((n + 2 * p - r) // s + 1 for n, p, r, s in sides)


def _transposed_size(x: Tensor, weight: Tensor, at: _Geometry, extra: Any) -> tuple[int, ...]:
    """The spatial size of a transposed convolution's output (torch.nn.ConvTranspose2d)."""
    reach = _extent(weight.shape[2:], at.dilation)
    extra = tuple(extra) * (len(reach) if len(extra) == 1 else 1)
    sides = zip(_extent(x.shape[2:], at.stride), at.padding, reach, extra, strict=True)
    return tuple(n - 2 * p + r - 1 + e for n, p, r, e in sides)


# ---- which kernels accumulate in 16 bits ------------------------------------------------------

# Ones in a sum; a matmul's longer sum of smaller numbers has this value too. float16 and bfloat16
# hold it, but a running sum of ones stops at 2,048 in float16, where 1 is half of the distance to
# the next number, and at 256 in bfloat16.
TERMS = 4096
# Running sums that a vector instruction may have side by side, in 16 bits: each must reach the stop
LANES = 32
# Products in a matmul's sum, of 1 / `LANES` each: as many as `TERMS` for each lane
LONG = TERMS * LANES
_SIDE = 64  # The square root of `TERMS`: an image of as many positions
ROWS = 4  # Of a matmul, so that it is no vector product

Shape = tuple[int, ...]
# The shapes of an op's tensors, and its other arguments
Case = tuple[tuple[Shape, ...], tuple[Any, ...]]

_OPERANDS: dict[Any, list[Shape]] = {
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
    ((1, 1, _SIDE, _SIDE), (1, 1, _SIDE, _SIDE)),
]
# Gradient, input and weight where the gradients are sums over samples, positions, channels
_BACKWARD: list[tuple[Shape, Shape, Shape]] = [
    ((TERMS, 1, 1, 1), (TERMS, 1, 1, 1), (1, 1, 1, 1)),
    ((1, 1, _SIDE, _SIDE), (1, 1, _SIDE, _SIDE), (1, 1, 1, 1)),
    ((1, TERMS, 1, 1), (1, 1, 1, 1), (TERMS, 1, 1, 1)),
]


@cache
def sum_of_ones(op: Any, dtype: torch.dtype, device: torch.device) -> float:
    """The result of `op`'s kernel for sums that are `TERMS`; less if it accumulates in 16 bits.

    The least over inner dimensions, channels, taps, samples and positions. Measured once in a
    process; the backend switches are those of the first call.
    """
    if op in MATMULS:
        operands = [torch.ones(s, dtype=dtype, device=device) for s in _OPERANDS[op]]
        # A power of two: the products are exact, and their sum is `TERMS` again
        operands[-1] /= LANES
        if len(operands) == 3:
            operands[0].zero_()
        return _least(op(*operands))
    cases: list[Case] = [(shapes, (None, *_GEOMETRY)) for shapes in _FORWARD]
    if op in CONVOLUTION_BACKWARD:
        mask = [True, True, True]
        cases = [(shapes, ([shapes[2][0]], *_GEOMETRY, mask)) for shapes in _BACKWARD]
    least = float(TERMS)
    for shapes, rest in cases:
        ones = [torch.ones(s, dtype=dtype, device=device) for s in shapes]
        exact = _tensors(op(*(x.cpu().double() for x in ones), *rest))
        for sums, expected in zip(_tensors(op(*ones, *rest)), exact, strict=True):
            # A backward pass has shorter sums as well, which say nothing about the accumulation
            long = sums.cpu()[expected == TERMS]
            least = min(least, _least(long)) if long.numel() else least
    return least


def _least(sums: Tensor) -> float:
    return sums.cpu().double().min().item()


def _tensors(result: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [result] if isinstance(result, Tensor) else result
