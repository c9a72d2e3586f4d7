"""Blocked accumulation: the right sums in float32, and float16 partials bit for bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mprun.precision import partials
from mprun.precision.partials import BLOCK, SUPPORTED, blocked
from tests.each import each
from tests.precision import normal

aten = torch.ops.aten


def same(x: Tensor) -> Tensor:
    return x


def half(x: Tensor) -> Tensor:
    return x.half().float()


def on_grid(*shape: int, seed: int) -> Tensor:
    """Multiples of 1/16 up to 4: products are multiples of 2^-8, and any sum of 64 of them, being
    at most 64 * 16 = 2^18 * 2^-8, is exact in float32 whatever the order of additions.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 65, shape, generator=generator).float() / 16


def mapped(args: tuple[Any, ...], change: Any) -> list[Any]:
    return [change(a) if isinstance(a, Tensor) else a for a in args]


def listed(result: Any) -> list[Tensor | None]:
    return [result] if isinstance(result, Tensor) else list(result)


def assert_equals_float64(op: Any, args: tuple[Any, ...], **kwargs: float) -> None:
    """`blocked` without rounding is within float32's error of the op in float64.

    A product passes through at most 64 + K / 64 additions, each off by 2^-24 at most, so that the
    sum is off by that many times 2^-24 of the sum of absolute values (Higham, Accuracy and
    Stability of Numerical Algorithms, chapter 4), which the op itself gives on absolute values. K
    is below 2^15 in all cases here: 64 + K / 64 and the few operations after it are below 2^10.
    """
    found = listed(blocked(op, args, same, kwargs))
    exact = listed(op(*mapped(args, Tensor.double), **kwargs))
    size = listed(op(*mapped(args, lambda a: a.double().abs()), **kwargs))
    for mine, true, scale in zip(found, exact, size, strict=True):
        if mine is None or true is None or scale is None:
            assert mine is None
            assert true is None
            continue
        assert mine.dtype == torch.float32
        assert mine.shape == true.shape
        assert bool(((mine - true).abs() <= 2**-14 * scale).all())


def naive(a: Tensor, b: Tensor) -> Tensor:
    """`a` [M, K] times `b` [K, N], a product at a time; sums in a block are exact on the grid."""
    rows, columns = a.tolist(), b.T.tolist()
    result = torch.empty(len(rows), len(columns))
    for m, row in enumerate(rows):
        for n, column in enumerate(columns):
            products = [x * y for x, y in zip(row, column, strict=True)]
            acc = torch.tensor(sum(products[:BLOCK])).half()
            for i in range(BLOCK, len(products), BLOCK):
                acc = (acc.float() + torch.tensor(sum(products[i : i + BLOCK]))).half()
            result[m, n] = acc
    return result


# ---- matmuls ----------------------------------------------------------------------------------


def matmul_args(k: int, make: Any = normal) -> dict[str, tuple[Any, tuple[Tensor, ...]]]:
    a, b = make(3, k, seed=1), make(k, 4, seed=2)
    many_a, many_b = make(2, 3, k, seed=3), make(2, k, 4, seed=4)
    return {
        "mm": (aten.mm.default, (a, b)),
        "mm of transposed views": (aten.mm.default, (a.T.contiguous().T, b.T.contiguous().T)),
        "bmm": (aten.bmm.default, (many_a, many_b)),
        "addmm": (aten.addmm.default, (make(4, seed=5), a, b)),
        "baddbmm": (aten.baddbmm.default, (make(2, 1, 4, seed=6), many_a, many_b)),
        "addbmm": (aten.addbmm.default, (make(3, 4, seed=7), many_a, many_b)),
        "mv": (aten.mv.default, (a, b[:, 0])),
        "addmv": (aten.addmv.default, (make(3, seed=8), a, b[:, 0])),
        "dot": (aten.dot.default, (a[0], b[:, 0])),
        "vdot": (aten.vdot.default, (a[0], b[:, 0])),
    }


@each("k", [0, 1, 63, 64, 65, 200])
@each("name", matmul_args(1))
def test_without_rounding_a_matmul_is_the_matmul(name: str, k: int) -> None:
    op, args = matmul_args(k)[name]
    assert_equals_float64(op, args)
    if name.startswith(("add", "badd")):
        assert_equals_float64(op, args, beta=0.5, alpha=3)


@each("k", [1, 63, 64, 65, 200])
def test_float16_partials_equal_a_naive_loop_bit_for_bit(k: int) -> None:
    made = matmul_args(k, on_grid)
    a, b = made["mm"][1]
    assert torch.equal(blocked(*made["mm"], half), naive(a, b))
    assert torch.equal(blocked(*made["mm of transposed views"], half), naive(a, b))

    many_a, many_b = made["bmm"][1]
    by_pair = torch.stack([naive(x, y) for x, y in zip(many_a, many_b, strict=True)])
    assert torch.equal(blocked(*made["bmm"], half), by_pair)

    # What is added to a finished sum is rounded once more. 0.5 and 2 are exact.
    scale = {"beta": 0.5, "alpha": 2}
    op, args = made["addmm"]
    expected = (0.5 * args[0] + 2 * naive(a, b)).half().float()
    assert torch.equal(blocked(op, args, half, scale), expected)
    op, args = made["baddbmm"]
    assert torch.equal(blocked(op, args, half, scale), (0.5 * args[0] + 2 * by_pair).half().float())

    # addbmm sums over the batch: a reduction over (batch, K).
    op, args = made["addbmm"]
    long = naive(torch.cat(list(many_a), 1), torch.cat(list(many_b), 0))
    assert torch.equal(blocked(op, args, half), (args[0] + long).half().float())


def test_beta_of_zero_ignores_the_input() -> None:
    a, b = normal(3, 8, seed=0), normal(8, 4, seed=1)
    nothing = torch.full((4,), torch.nan)
    found = blocked(aten.addmm.default, (nothing, a, b), half, {"beta": 0})
    assert torch.equal(found, blocked(aten.mm.default, (a, b), half))


def test_an_op_without_blocks_and_factors_that_do_not_fit_are_refused() -> None:
    assert aten.mm.default in SUPPORTED
    assert aten.add.Tensor not in SUPPORTED
    with pytest.raises(NotImplementedError, match=r"aten\.add\.Tensor; supported: .*aten\.mm"):
        blocked(aten.add.Tensor, (torch.ones(2), torch.ones(2)), same)
    for sizes in [((2, 3), (4, 5)), ((2, 4), (3, 5))]:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            blocked(aten.mm.default, tuple(torch.ones(s) for s in sizes), same)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        blocked(aten.bmm.default, (torch.ones(1, 2, 3), torch.ones(2, 3, 4)), same)


# ---- what float16 partials lose ---------------------------------------------------------------


def dot(products: Tensor) -> float:
    ones = torch.ones(len(products), 1)
    return float(blocked(aten.mm.default, (products[None], ones), half).item())


def test_a_partial_above_the_largest_float16_is_infinite() -> None:
    block = torch.full((BLOCK,), 1024.0)  # sums to 65536
    assert dot(block) == torch.inf
    assert dot(-block) == -torch.inf
    assert dot(0.5 * block) == 32768
    assert dot(torch.cat([0.5 * block, 0.5 * block])) == torch.inf
    # Infinite on the way stays infinite, though the whole sum is 0.
    assert dot(torch.cat([block, -block])) == torch.inf
    # Inside a block the sum is float32's.
    assert dot(torch.cat([block[:32], -block[:32]]) * 64) == 0


# ---- convolutions -----------------------------------------------------------------------------

Case = tuple[int, bool, list[int], list[int], list[int], list[int], int]

# rank, transposed, stride, padding, dilation, output_padding, groups
CASES: list[Case] = [
    (rank, transposed, s[:rank], p[:rank], d[:rank], extra[:rank], groups)
    for rank, transposed, s, p, d, groups in product(
        (1, 2, 3), (False, True), ([1, 1, 1], [2, 3, 1]), ([0, 0, 0], [1, 0, 2]),
        ([1, 1, 1], [2, 1, 2]), (1, 2),
    )
    # As much output padding as is legal: more than the stride where the dilation is larger.
    for extra in [[max(a, b) - 1 if transposed else 0 for a, b in zip(s, d, strict=True)]]
]  # fmt: skip
CASES += [
    (2, False, [1, 1], [0, 0], [1, 1], [0, 0], 4),  # depthwise
    (2, True, [2, 2], [1, 1], [1, 1], [1, 1], 4),
    (2, False, [5, 4], [0, 0], [1, 1], [0, 0], 1),  # elements no tap reads
    (2, False, [1, 1], [4, 3], [1, 1], [0, 0], 1),  # padding beyond the kernel's reach
    (2, True, [2, 2], [4, 3], [1, 1], [0, 0], 2),
    (3, False, [2], [1], [1], [0], 1),  # one value for all dimensions
    (3, True, [2], [1], [1], [1], 1),
]


def convolution(
    case: Case, make: Any = normal, batch: int = 2, channels: int = 2
) -> tuple[Any, ...]:
    """Arguments of aten.convolution; `channels` enter each group and one more leaves it."""
    rank, transposed, stride, padding, dilation, extra, groups = case
    into, out = channels * groups, (channels + 1) * groups
    kernel = (3, 2, 2)[:rank]
    shape = (into, out // groups) if transposed else (out, into // groups)
    x = make(batch, into, *(8, 7, 5)[:rank], seed=0)
    weight, bias = make(*shape, *kernel, seed=1), make(out, seed=2)
    return x, weight, bias, stride, padding, dilation, transposed, extra, groups


def backward(args: tuple[Any, ...], mask: list[bool], make: Any = normal) -> tuple[Any, ...]:
    """Arguments of aten.convolution_backward for those of aten.convolution."""
    x, weight, bias, *geometry = args
    gradient = make(*aten.convolution(*args).shape, seed=3)
    return gradient, x, weight, list(bias.shape), *geometry, mask


@each("case", CASES, ids=str)
def test_without_rounding_a_convolution_and_its_gradients_are_those(case: Case) -> None:
    args = convolution(case)
    assert_equals_float64(aten.convolution.default, args)
    assert_equals_float64(aten.convolution_backward.default, backward(args, [True] * 3))


@each("transposed", [False, True])
@each("mask", list(product([False, True], repeat=3)))
def test_gradients_not_asked_for_are_none(mask: tuple[bool, ...], transposed: bool) -> None:
    args = convolution((2, transposed, [2, 1], [1, 0], [1, 1], [0, 0], 2))
    assert_equals_float64(aten.convolution_backward.default, backward(args, list(mask)))


@each("case", CASES, ids=str)
def test_little_scratch_changes_no_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches made a block at a time are those made at once. Grid values: no order of sums.

    23 channels of 3, 6 or 12 taps make several blocks, which begin and end inside a channel.
    """
    args = convolution(case, on_grid, batch=3, channels=23)
    ops = (aten.convolution.default, aten.convolution_backward.default)
    both = list(zip(ops, (args, backward(args, [True] * 3, on_grid)), strict=True))
    at_once = [r for op, a in both for r in listed(blocked(op, a, half))]
    monkeypatch.setattr(partials, "_SCRATCH", 1)
    in_pieces = [r for op, a in both for r in listed(blocked(op, a, half))]
    assert len(at_once) == 4
    for a, b in zip(at_once, in_pieces, strict=True):
        assert torch.equal(a, b)


def test_the_order_of_a_convolutions_products() -> None:
    """Against the naive loop over F.unfold's patches: (channels, taps), (samples, positions)."""
    x, weight = on_grid(3, 9, 8, 7, seed=0), on_grid(4, 9, 3, 3, seed=1)
    gradient, bias = on_grid(3, 4, 6, 5, seed=2), on_grid(4, seed=3)
    geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    patches = F.unfold(x, 3)  # [3, 81, 30]

    forward = torch.stack([naive(weight.flatten(1), p) for p in patches]).unflatten(2, (6, 5))
    found = blocked(aten.convolution.default, (x, weight, None, *geometry), half)
    assert torch.equal(found, forward)
    found = blocked(aten.convolution.default, (x, weight, bias, *geometry), half)
    assert torch.equal(found, half(forward + bias[:, None, None]))

    of_input, of_weight, of_bias = blocked(
        aten.convolution_backward.default,
        (gradient, x, weight, [4], *geometry, [True] * 3),
        half,
    )
    rows = gradient.transpose(0, 1).flatten(1)  # [4, 90]
    expected = naive(rows, patches.transpose(1, 2).flatten(0, 1))
    assert torch.equal(of_weight, expected.view_as(weight))
    assert torch.equal(of_bias, naive(rows, torch.ones(90, 1)).flatten())
    around = F.unfold(F.pad(gradient, [2] * 4), 3)  # [3, 36, 56]
    flipped = weight.flip(2, 3).transpose(0, 1).flatten(1)
    expected = torch.stack([naive(flipped, p) for p in around])
    assert torch.equal(of_input, expected.view_as(x))


def test_layouts_that_are_not_contiguous() -> None:
    """channels_last, and the gradient of a sum, which is one element seen many times."""
    args = convolution((2, False, [1, 1], [1, 1], [1, 1], [0, 0], 1))
    x, weight, *rest = args
    layout = torch.channels_last
    last = (x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout), *rest)
    assert_equals_float64(aten.convolution.default, last)
    gradient, *others = backward(last, [True] * 3)
    one = torch.ones(()).expand_as(gradient)
    assert_equals_float64(aten.convolution_backward.default, (one, *others))


def test_sizes_of_one_and_none() -> None:
    """A view of the input serves as patches where nothing need be copied."""
    geometry = ([1], [0], [1], False, [0], 1)
    x, weight = normal(1, 1, 80, seed=0), normal(1, 1, 70, seed=1)
    assert_equals_float64(aten.convolution.default, (x, weight, None, *geometry))
    pointwise = normal(3, 1, 1, seed=2)
    assert_equals_float64(aten.convolution.default, (x, pointwise, None, *geometry))

    args = convolution((2, False, [1, 1], [1, 1], [1, 1], [0, 0], 1), batch=0)
    assert blocked(aten.convolution.default, args, half).shape == aten.convolution(*args).shape
    of_input, of_weight, of_bias = blocked(
        aten.convolution_backward.default, backward(args, [True] * 3), half
    )
    assert of_input.shape == args[0].shape
    assert torch.equal(of_weight, torch.zeros_like(args[1]))
    assert torch.equal(of_bias, torch.zeros_like(args[2]))
