"""Moments in 8 bits and masters of 24 bits: oracles, statistics, and the bits of every engine."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mprun.optim import AdamW, formulas
from mprun.precision.rounding import (
    EAGER_BLOCK,
    converted,
    merge_master,
    merged,
    rest_beside,
    split_master,
)
from tests.optim import (
    BRAIN,
    FLOAT,
    HALF,
    LOW,
    MAKE,
    STORED,
    generator,
    give,
    moment_options,
    normal,
    parameters,
    unlike,
)
from tests.optim.test_engines import needs_c, ran

CODED = torch.uint8
SIGNED, ROOTS = torch.tensor(formulas.dynamic_map(True)), torch.tensor(formulas.dynamic_map(False))


def random_bits(shape: tuple[int, ...], seed: int) -> Tensor:
    words = torch.randint(-(2**31), 2**31, shape, generator=generator(seed))
    return words.to(torch.int32)


# ---- codes of 8 bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_torchao_s(signed: bool) -> None:
    quant_utils = pytest.importorskip("torchao.optim.quant_utils")
    theirs = torch.tensor(quant_utils.create_dynamic_map(signed))
    # theirs is computed in float32, ours in float64: the last digits differ
    torch.testing.assert_close(
        torch.tensor(formulas.dynamic_map(signed)), theirs, rtol=3e-7, atol=0
    )


@pytest.mark.parametrize("signed", [True, False])
def test_codes_to_nearest_are_torchao_s(signed: bool) -> None:
    quant_utils = pytest.importorskip("torchao.optim.quant_utils")
    values = SIGNED if signed else ROOTS
    x = normal((40 * 256,), 1) * 10.0 ** (normal((40 * 256,), 2) * 2)
    x = x if signed else x.abs()
    ours, scales = formulas.encode(x, values, None)
    scaled, theirs = quant_utils.scale_tensor(x, 256)
    assert torch.equal(scales.abs(), theirs)
    if not signed:
        expected = quant_utils.quantize_8bit_with_qmap(scaled, values)
        assert torch.equal(ours, torch.where(scaled > 0, expected.clamp(min=1), expected))
        return
    # Ours has the sign of the block's largest number in the scale: blocks whose largest number is
    # negative are those of the negated numbers.
    flipped = torch.where(scales < 0, -1.0, 1.0).repeat_interleave(256)
    assert torch.equal(ours, quant_utils.quantize_8bit_with_qmap(scaled * flipped, values))


@settings(max_examples=50)
@given(st.integers(1, 1000), st.integers(-30, 30), st.integers(0, 2**31))
def test_a_number_is_moved_to_a_neighbour_and_the_largest_not_at_all(
    count: int, exponent: int, seed: int
) -> None:
    x = normal((count,), seed) * 2.0**exponent
    for bits in (None, random_bits((count,), seed + 1)):
        coded, scales = formulas.encode(x, SIGNED, bits)
        back = formulas.decode(coded, scales, SIGNED)
        for start in range(0, count, 256):
            block, moved = x[start : start + 256], back[start : start + 256]
            largest = block.abs().argmax()
            assert moved[largest] == block[largest]
            # the widest gap of the map is 0.9 / 64 of the scale
            assert ((moved - block).abs() <= block.abs().max() * 0.9 / 64).all()


def test_the_mean_of_stochastic_codes_is_exact() -> None:
    count = 2**16
    for value in (0.5, 0.1234, 3e-4, 2e-6):
        x = torch.full((count,), value)
        x[::256] = 1.0  # the scale
        drawn = formulas.decode(*formulas.encode(x, ROOTS, random_bits((count,), 3)), ROOTS)
        kept = drawn[x < 1].double()
        below = ROOTS[value >= ROOTS].max().item()
        above = ROOTS[value < ROOTS].min().item()
        assert {*kept.unique().tolist()} <= {below, above}
        up = Fraction(value) - Fraction(below)
        chance = float(up / (Fraction(above) - Fraction(below)))
        # five standard errors of a share
        assert (
            abs((kept > below).double().mean() - chance)
            < 5 * (chance * (1 - chance) / count) ** 0.5
        )


def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not() -> None:
    for bad in (float("inf"), float("nan"), -float("inf")):
        x = torch.ones(600)
        x[300] = bad
        back = formulas.decode(*formulas.encode(x, SIGNED, None), SIGNED)
        assert back[256:512].isnan().all()
        assert (back[:256] == 1).all()
        assert (back[512:] == 1).all()


def test_zero_stays_zero_and_a_positive_root_stays_positive() -> None:
    x = torch.tensor([0.0, 1e-30, 1.0] + [0.0] * 300)
    back = formulas.decode(*formulas.encode(x, ROOTS, None), ROOTS)
    assert back[0] == 0
    assert back[1] > 0
    assert (back[3:] == 0).all()


# ---- optimizers ----------------------------------------------------------------------------------

SIZES = (4096, 5003, 100)
"""Blocks that are full, a short last one, and a tensor that keeps float32."""


def assert_c_has_the_bits_of_eager(name: str, rounding: str) -> None:
    for stored in STORED:
        for moments in ((CODED, CODED), (CODED, FLOAT), (BRAIN, CODED)):
            options: dict[str, Any] = {"rounding": rounding, **moment_options(name, *moments)}
            a, b = (plain_run(name, e, stored, options) for e in ("c", "eager"))
            assert unlike(a, b) == [], (stored, moments)


every_rounding = pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan", "split"])
every_name = pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "rmsprop_momentum"])


@needs_c
@every_rounding
@every_name
def test_c_and_eager_give_the_same_bits_with_moments_in_8_bits(name: str, rounding: str) -> None:
    assert_c_has_the_bits_of_eager(name, rounding)


@needs_c
def test_tensors_of_several_parts_get_the_same_bits_with_moments_in_8_bits() -> None:
    """PyTorch takes `EAGER_BLOCK` numbers at a time, threads of C share more than `SERIAL`."""
    options: dict[str, Any] = {"rounding": "stochastic", **moment_options("adamw", CODED, CODED)}
    sizes = (EAGER_BLOCK + 5003,)
    a, b = (plain_run("adamw", e, (BRAIN, BRAIN), options, sizes) for e in ("c", "eager"))
    assert unlike(a, b) == []


@needs_c
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", MAKE)
def test_c_and_eager_give_the_same_bits_with_masters_of_24_bits(
    name: str, dtype: torch.dtype
) -> None:
    for grad in (dtype, FLOAT):
        a, b = (ran(name, e, (dtype, grad), {"rounding": "split"}, (1003,)) for e in ("c", "eager"))
        assert unlike(a, b) == [], grad


def plain_run(
    name: str,
    engine: str,
    stored: tuple[torch.dtype, torch.dtype],
    options: dict[str, Any],
    sizes: tuple[int, ...] = SIZES,
) -> Any:
    """Some steps with ordinary gradients, of which one has an infinity."""
    made = parameters(normal((n,), n, stored[0]) for n in sizes)
    optimizer = MAKE[name](made, **options, seed=5, engine=engine)
    for step in range(4):
        for p in made:
            g = normal(p.shape, 100 * step + p.numel()) * 10.0 ** normal(p.shape, step)
            if step == 3:
                g[7] = float("inf")
            give(p, g.to(stored[1]))
        optimizer.step()
    return optimizer


def test_moments_are_converted_between_dtypes_on_load() -> None:
    p = normal((4096,), 1)
    wide_state = AdamW(parameters([p]), momentum_dtype=FLOAT, variance_dtype=FLOAT)
    (q,) = wide_state.param_groups[0]["params"]
    give(q, normal((4096,), 2))
    wide_state.step()
    low = AdamW(parameters([p]), momentum_dtype=CODED, variance_dtype=CODED)
    saved = wide_state.state_dict()
    low.load_state_dict(saved)
    for group in low.param_groups:
        group["momentum_dtype"] = group["variance_dtype"] = CODED
    (r,) = low.param_groups[0]["params"]
    give(r, normal((4096,), 3))
    give(q, normal((4096,), 3))
    low.step(), wide_state.step()
    state = low.state[r]
    assert (state["exp_avg"].dtype, state["exp_avg_scale"].shape) == (CODED, (16,))
    back = formulas.decode(state["exp_avg"], state["exp_avg_scale"], SIGNED)
    exact = wide_state.state[q]["exp_avg"]
    # two roundings, each by up to a gap of the map
    assert ((back - exact).abs() <= 2 * exact.abs().max() * 0.9 / 64).all()
    again = AdamW(parameters([p]), momentum_dtype=CODED, variance_dtype=CODED)
    again.load_state_dict(low.state_dict())
    (s,) = again.param_groups[0]["params"]
    s.data.copy_(r.data)
    for x in (r, s):
        give(x, normal((4096,), 4))
    low.step(), again.step()
    assert unlike(low, again) == []


def test_codes_without_scales_are_refused() -> None:
    optimizer = AdamW(parameters([normal((4096,), 1)]), momentum_dtype=CODED)
    (p,) = optimizer.param_groups[0]["params"]
    give(p, normal((4096,), 2))
    optimizer.step()
    del optimizer.state[p]["exp_avg_scale"]
    with pytest.raises(ValueError, match="exp_avg in uint8 without exp_avg_scale"):
        optimizer.step()


# ---- masters of 24 bits --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW)
def test_a_master_of_24_bits_is_kept_exactly(dtype: torch.dtype) -> None:
    cut = {BRAIN: 8, HALF: 5}[dtype]
    x = normal((5000,), 1) * 2.0 ** (torch.arange(5000) % 20 - 10)
    exact = ((x.view(torch.int32) >> cut) << cut).view(FLOAT)
    if dtype == HALF:
        exact = exact[exact.abs() > 2.0**-14]  # subnormals of float16 are spaced evenly
    parameter, rest = split_master(exact, dtype, random_bits(tuple(exact.shape), 2))
    assert torch.equal(merge_master(parameter, rest), exact)
    # ties go away from zero, so a parameter is at most half a unit from its master
    assert ((parameter.float() - exact).abs() <= (exact.to(dtype).float() - exact).abs()).all()


@pytest.mark.parametrize("dtype", LOW)
def test_the_mean_of_masters_is_exact(dtype: torch.dtype) -> None:
    count = 2**16
    for value in (1 + 2.0**-17, -0.3000001, 3e-5):
        x = torch.full((count,), value)
        drawn = merge_master(*split_master(x, dtype, random_bits((count,), 4))).double()
        low, high = drawn.min(), drawn.max()
        gap = float(high - low)
        assert gap <= abs(value) * 2.0**-14
        error = abs(float(drawn.mean()) - float(torch.tensor(value)))
        # five standard errors, and what 5 random bits resolve
        resolution = max(gap, 2.0**-32) * 2.0**-5  # 2^-32: of float16's subnormal numbers
        assert error <= 5 * gap / 2 / count**0.5 + resolution


@pytest.mark.parametrize("dtype", LOW)
def test_a_thousand_small_steps_are_not_lost(dtype: torch.dtype) -> None:
    """Nearest rounding keeps the start: 1e-4 is below half of its distance to the neighbour."""
    ends = {}
    for rounding in ("nearest", "split"):
        made = parameters([torch.ones(64, dtype=dtype)])
        optimizer = MAKE["sgd"](made, lr=1e-4, weight_decay=0.0, rounding=rounding)
        for _ in range(1000):
            give(made[0], -torch.ones(64, dtype=dtype))
            optimizer.step()
        rest = optimizer.state[made[0]].get("remainder")
        kept = made[0].detach()
        ends[rounding] = (
            merged(kept, rest).mean().item() if rest is not None else kept.mean().item()
        )
    assert ends["nearest"] == 1.0
    # 1,000 roundings to 2^-15 or finer, 64 numbers: a standard error of 6e-5
    assert abs(ends["split"] - 1.1) < 4e-4


def test_infinities_and_nan_are_kept() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38, 0.0, -0.0])
    for dtype in LOW:
        parameter, rest = split_master(x, dtype, None)
        back = merge_master(parameter, rest)
        assert back[0] == float("inf")
        assert back[1] == -float("inf")
        assert back[2].isnan()
        assert (back[4], back[5].signbit()) == (0, True)


@pytest.mark.parametrize("dtype", LOW)
def test_remainders_of_kahan_and_split_become_each_other(dtype: torch.dtype) -> None:
    x = normal((1000,), 5)
    parameter, rest = split_master(x, dtype, None)
    wide_rest = converted(parameter, rest, torch.int16)
    assert torch.equal(merged(parameter, wide_rest), merge_master(parameter, rest))
    assert torch.equal(converted(parameter, wide_rest, torch.int8), rest)
    assert torch.equal(rest_beside(merge_master(parameter, rest), parameter), rest)


@needs_c
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", ["sgd_momentum", "rmsprop"])
def test_c_finds_the_place_of_each_value_of_the_map_and_of_its_neighbours(
    name: str, rounding: str
) -> None:
    """The C kernels compute places from decades; the first moment is the gradient, or its size."""
    values = SIGNED if name == "sgd_momentum" else ROOTS
    words = values.view(torch.int32)
    near = torch.cat([(words + by).view(FLOAT) for by in range(-2, 3)]).nan_to_num(1.0)
    rows = near.repeat(4).view(-1, 128)
    gradient = torch.cat([rows, torch.ones_like(rows)], 1).view(-1)  # the scale of a block is 1
    options: dict[str, Any] = {"rounding": rounding, **moment_options(name, CODED, CODED)}
    options |= {"alpha": 0.0} if name == "rmsprop" else {}
    found = []
    for engine in ("c", "eager"):
        (p,) = parameters([torch.zeros_like(gradient)])
        give(p, gradient)
        found.append(MAKE[name]([p], **options, seed=5, engine=engine))
        found[-1].param_groups[0]["weight_decay"] = 0.0
        found[-1].step()
    assert unlike(*found) == []


@pytest.mark.parametrize(("decades", "most"), [(0, 1.6), (2, 1.0), (5, 1.0)])
def test_moments_of_8_bits_are_no_worse_than_the_published_codes(decades: int, most: float) -> None:
    """Gradients whose sizes differ by factors of up to 10^5 within each block of 256.

    Where all are of one size, drawn rounding costs a factor of the square root of 2 (its error has
    twice the variance of nearest rounding's), which is the price for moments that drift right.
    """
    size, steps = 2**14, 60
    generator = torch.Generator().manual_seed(0)
    powers = 10.0 ** -torch.randint(0, decades + 1, (size,), generator=generator).double()
    start = torch.randn(size, generator=generator)
    gradients = [powers * torch.randn(size, generator=generator) for _ in range(steps)]

    def error(weights: Tensor) -> float:
        return float((weights.detach().double() - exact).square().mean().sqrt())

    exact = adamw_in_float64(start, gradients)
    weights = nn.Parameter(start.clone())
    options = {"momentum_dtype": torch.uint8, "variance_dtype": torch.uint8}
    optimizer = AdamW([weights], lr=1e-3, weight_decay=0.0, **options)
    for gradient in gradients:
        weights.grad = gradient.float()
        optimizer.step()
    maps = formulas.dynamic_map(True), formulas.dynamic_map(False)
    published = adamw_in_float64(start, gradients, [torch.tensor(x).double() for x in maps])
    assert error(weights) < most * error(published)
    assert error(weights) < error(start) / 2


def adamw_in_float64(
    start: Tensor, gradients: Sequence[Tensor], maps: Sequence[Tensor] | None = None
) -> Tensor:
    """Weights after AdamW; with `maps`, moments are kept between steps as published.

    bitsandbytes and torchao keep both moments, the second as it is, as the nearest values of the
    dynamic maps for blocks of 256 (Dettmers et al., 2022; bitsandbytes, `create_dynamic_map`).
    """

    def kept(x: Tensor, values: Tensor) -> Tensor:
        blocks = x.view(-1, 256)
        largest = blocks.abs().amax(1, keepdim=True)
        nearest = torch.bucketize(blocks / largest, (values[:-1] + values[1:]) / 2)
        return (values[nearest] * largest).view(-1)

    w, m, v = start.double().clone(), torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
    for step, gradient in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        corrected = (v / (1 - 0.999**step)).sqrt() + 1e-8
        w -= 1e-3 * m / (1 - 0.9**step) / corrected
        if maps is not None:
            m, v = kept(m, maps[0]), kept(v, maps[1])
    return w
