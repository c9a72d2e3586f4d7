"""The optimizers as PyTorch's: formulas, state, loss scaling, and what an Optimizer must do."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
import re
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mprun.optim import SGD, AdamW, LowPrecisionOptimizer, RMSprop
from mprun.optim.formulas import SCALE
from mprun.precision import Clip, DynamicLossScale, DynamicRule, kernels
from mprun.precision.rounding import merge
from tests.optim import (
    BRAIN,
    DTYPES,
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
    same_bits,
    unlike,
)

CPU = torch.device("cpu")
needs_c = pytest.mark.skipif(kernels.why_not() is not None, reason="no compiled kernels")
ROUNDINGS = ("nearest", "stochastic", "kahan")
EPS = 2.0**-24
"""Half a unit of float32 at 1: the relative error of one operation."""

ORACLES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (AdamW, torch.optim.AdamW, {"lr": 0.01}),
    "adamw_options": (
        *(AdamW, torch.optim.AdamW),
        {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "sgd": (SGD, torch.optim.SGD, {"lr": 0.05}),
    "sgd_momentum": (SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd_nesterov": (
        *(SGD, torch.optim.SGD),
        {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
    ),
    "sgd_dampened": (SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    "sgd_dampening_nothing": (SGD, torch.optim.SGD, {"lr": 0.05, "dampening": 0.5}),
    "rmsprop": (RMSprop, torch.optim.RMSprop, {"lr": 0.01}),
    "rmsprop_options": (
        *(RMSprop, torch.optim.RMSprop),
        {"lr": 0.01, "alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1, "momentum": 0.5},
    ),
}


def state_of(optimizer: Any) -> list[dict[str, Tensor]]:
    return [
        {k: v.clone() for k, v in optimizer.state[p].items() if isinstance(v, Tensor)}
        for group in optimizer.param_groups
        for p in group["params"]
    ]


# ---- against torch.optim ----


@pytest.mark.parametrize("name", ORACLES)
def test_float32_follows_torch_with_missing_gradients_and_a_scheduler(name: str) -> None:
    """A parameter without a gradient keeps its own step count, on which bias correction hangs."""
    ours, torchs, options = ORACLES[name]
    shapes = [(7, 5), (13,), ()]
    mine = parameters(normal(s, seed=n) for n, s in enumerate(shapes))
    theirs = parameters(p.detach() for p in mine)
    a, b = ours(mine, **options), torchs(theirs, **options)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(x, T_max=40) for x in (a, b)]
    for step in range(50):
        for n, (p, q) in enumerate(zip(mine, theirs, strict=True)):
            gradient = None if (step + n) % 3 == 0 else normal(p.shape, seed=10 * step + n)
            p.grad = gradient
            q.grad = None if gradient is None else gradient.clone()
        for x in (a, b, *schedules):
            x.step()
    # Some ten operations a step, each off by EPS of the parameter (below 4) or of its update, which
    # momentum carries on up to ten times; of random sign, so 50 steps are well below 50 times that.
    bound = 50 * 10 * EPS
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=bound, atol=bound)
        assert (p - q).abs().max() < bound * 4
        if "step" in b.state[q]:
            assert a.state[p]["step"] == b.state[q]["step"]


@pytest.mark.parametrize("name", ORACLES)
def test_defaults_are_torchs(name: str) -> None:
    ours, torchs, _ = ORACLES[name]
    mine, theirs = (inspect.signature(x).parameters for x in (ours, torchs))
    for option in ("lr", "betas", "eps", "weight_decay", "momentum", "alpha", "nesterov"):
        if option in theirs:
            assert mine[option].default == theirs[option].default, option


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", ORACLES)
def test_nearest_is_a_float32_step_rounded_once(name: str, dtype: torch.dtype) -> None:
    """Against torch's step on the upcast values, then a cast.

    Both float32 results are within some 16 float32 units of each other, and cast to different
    numbers only where the border between two 16-bit numbers lies between them: for 16 of the 2^13
    float32 numbers (bfloat16: 2^16) per 16-bit one. Where parameter and update cancel, units of the
    result are much smaller than those of the operands (below 4); hence twice that share, and an
    absolute bound there.
    """
    ours, torchs, options = ORACLES[name]
    (p,) = parameters([normal((20_000,), seed=1, dtype=dtype)])
    (q,) = parameters([p.detach().float()])
    a, b = ours([p], rounding="nearest", **options), torchs([q], **options)
    differing, steps = 0, 20
    for step in range(steps):
        q.data.copy_(p.detach().float())
        gradient = normal(p.shape, seed=100 + step, dtype=dtype)
        p.grad, q.grad = gradient, gradient.float()
        a.step()
        b.step()
        found, expected = p.detach(), q.detach().to(dtype)
        units = found.view(torch.int16).int() - expected.view(torch.int16).int()
        cancelled = (found.float() - expected.float()).abs() <= 16 * 4 * EPS
        assert ((units.abs() <= 1) | cancelled).all()
        differing += int((units != 0).sum())
    share = 2 * 16 / 2 ** (13 if dtype == HALF else 16)
    assert differing / (steps * p.numel()) < share


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(LOW),
    exponent=st.integers(-100, 100),
    lr=st.floats(1e-6, 0.02),
    momentum=st.sampled_from([0.0, 0.9]),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    low_gradients=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_kahans_sgd_is_float32s_bit_for_bit(
    dtype: torch.dtype,
    exponent: int,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    low_gradients: bool,
    seed: int,
) -> None:
    """bfloat16 at any size; float16 where the parameter stays normal (here in 1/4 to 4)."""
    scale = 2.0**exponent if dtype == BRAIN else 1.0
    start = torch.rand(500, generator=generator(seed)) + 0.8
    start = (start * scale * torch.randn(500, generator=generator(seed)).sign()).to(dtype)
    p, q = parameters([start, start.float()])
    options = {
        "lr": lr,
        "momentum": momentum,
        "nesterov": nesterov and momentum > 0,
        "weight_decay": weight_decay,
    }
    a, b = (SGD([x], rounding="kahan", engine="eager", **options) for x in (p, q))
    for step in range(20):
        gradient = (torch.rand(500, generator=generator(seed + step)) - 0.5) * 0.2 * scale
        gradient = gradient.to(dtype) if low_gradients and dtype == BRAIN else gradient
        give(p, gradient)
        give(q, gradient.float())
        a.step()
        b.step()
    assert same_bits(merge(p.detach(), a.state[p]["remainder"]), q.detach())
    assert "remainder" not in b.state[q]


def pruned(p: Tensor) -> None:
    p.mul_(torch.arange(p.numel()) % 2)


def clamped(p: Tensor) -> None:
    p.clamp_(max=0)


def exchanged(p: Tensor) -> None:
    p.copy_(torch.where(p.float() > 0, 0.0, math.inf))


@pytest.mark.parametrize("change", [pruned, clamped, exchanged])
@pytest.mark.parametrize("dtype", LOW)
def test_kahans_parameters_may_be_written_by_others(
    dtype: torch.dtype, change: Callable[[Tensor], None]
) -> None:
    """A zero with a remainder below it is a zero, not the NaN those bits would add up to."""
    found = []
    for engine in ("eager", None):
        (p,) = parameters([normal((1000,), 0, dtype)])
        optimizer = AdamW([p], lr=0.01, rounding="kahan", engine=engine)
        for step in range(6):
            p.grad = normal(p.shape, step, dtype)
            optimizer.step()
            assert not p.isnan().any()
            with torch.no_grad():
                change(p)
            assert (optimizer.state[p]["remainder"][p == 0] < 0).any()
        found.append(optimizer)
    assert unlike(*found) == []


# ---- state ----


def continued(
    optimizer: LowPrecisionOptimizer, made: list[nn.Parameter], grad: torch.dtype, start: int
) -> None:
    for step in range(start, start + 3):
        for n, p in enumerate(made):
            give(p, normal(p.shape, seed=10 * step + n, dtype=grad))
        optimizer.step()


def reloaded(optimizer: LowPrecisionOptimizer, path: Path) -> dict[str, Any]:
    torch.save(optimizer.state_dict(), path)
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


@pytest.mark.representative(
    "adamw-*-torch.float32",
    "sgd_momentum-torch.bfloat16-torch.bfloat16",
    "rmsprop-torch.float16-torch.float16",
)
@pytest.mark.parametrize("stored", STORED, ids=lambda s: f"{s[0]}-{s[1]}")
@pytest.mark.parametrize("name", MAKE)
def test_a_saved_state_continues_with_the_same_bits(
    name: str, stored: tuple[torch.dtype, torch.dtype], tmp_path: Path
) -> None:
    tried = set()
    for first, second, rounding in itertools.product(DTYPES, DTYPES, ROUNDINGS):
        options = {"rounding": rounding, **moment_options(name, first, second)}
        if tuple(options.items()) in tried:
            continue
        tried.add(tuple(options.items()))
        made = parameters(normal((11,), seed=n, dtype=stored[0]) for n in range(2))
        whole = MAKE[name](made, **options, seed=9, engine="eager")
        continued(whole, made, stored[1], start=0)

        resumed = parameters(p.detach() for p in made)
        other = MAKE[name](resumed, engine="eager")
        other.load_state_dict(reloaded(whole, tmp_path / "state.pt"))
        assert unlike(whole, other) == []
        dtypes = {k: v.dtype for k, v in other.state[resumed[0]].items()}
        assert dtypes == {k: v.dtype for k, v in whole.state[made[0]].items()}
        if rounding == "kahan" and stored[0] != FLOAT:
            assert dtypes["remainder"] == torch.int16
        continued(whole, made, stored[1], start=3)
        continued(other, resumed, stored[1], start=3)
        assert unlike(whole, other) == [], options


@pytest.mark.parametrize("rounding", ["nearest", "kahan"])
@pytest.mark.parametrize("name", ORACLES)
def test_a_state_of_torchs_optimizer_is_continued(name: str, rounding: str) -> None:
    """As torch goes on itself; options that torch does not have stay those given here."""
    ours, torchs, options = ORACLES[name]
    theirs = parameters([normal((50,), 0), normal((4, 3), 1)])
    before = torchs(theirs, **options)
    for step in range(6):
        if step == 3:
            mine = parameters(p.detach() for p in theirs)
            after = ours(mine, lr=1.0, rounding=rounding, seed=3)
            after.load_state_dict(before.state_dict())
            (group,) = after.param_groups
            assert (group["rounding"], group["seed"]) == (rounding, 3)
            assert group["lr"] == options["lr"]
        for n, p in enumerate(theirs):
            p.grad = normal(p.shape, 10 * step + n)
        before.step()
        if step >= 3:
            for p, q in zip(mine, theirs, strict=True):
                p.grad = q.grad
            after.step()
    bound = 3 * 10 * EPS
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=bound, atol=4 * bound)


@pytest.mark.parametrize(
    ("ours", "torchs", "option"),
    [
        (AdamW, torch.optim.AdamW, "amsgrad"),
        (RMSprop, torch.optim.RMSprop, "centered"),
        (SGD, torch.optim.SGD, "maximize"),
    ],
)
def test_a_state_of_another_formula_is_refused(ours: Any, torchs: Any, option: str) -> None:
    p, q = parameters([torch.ones(3)] * 2)
    optimizer = ours([p])
    with pytest.raises(ValueError, match=f"^{option}=True in the state; legal is False$"):
        optimizer.load_state_dict(torchs([q], **{option: True}).state_dict())
    assert option not in optimizer.param_groups[0]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_copied_optimizer_goes_on_with_the_same_bits(how: str, rounding: str) -> None:
    made = parameters([normal((50,), 0, BRAIN), normal((4, 3), 1, HALF)])
    whole = AdamW(made, rounding=rounding, momentum_dtype=BRAIN, variance_dtype=HALF)
    continued(whole, made, FLOAT, 0)
    other = copy.deepcopy(whole) if how == "deepcopy" else pickle.loads(pickle.dumps(whole))
    copied = other.param_groups[0]["params"]
    assert copied[0] is not made[0]
    continued(whole, made, FLOAT, 3)
    continued(other, copied, FLOAT, 3)
    assert unlike(whole, other) == []


def test_each_group_has_its_own_options() -> None:
    """Each group's options are those of an optimizer with that group alone."""
    start = [normal((100,), n, BRAIN) for n in range(3)]
    options: list[dict[str, Any]] = [
        {"rounding": "nearest", "lr": 0.1},
        {"rounding": "kahan", "momentum": 0.9, "momentum_dtype": HALF},
        {"rounding": "nearest", "overflow": "saturate", "weight_decay": 0.1},
    ]
    together = parameters(start)
    groups = [{"params": [p], **o} for p, o in zip(together, options, strict=True)]
    optimizer = SGD(groups, engine="eager")
    continued(optimizer, together, BRAIN, 0)
    for n, option in enumerate(options):
        (alone,) = parameters(start[n : n + 1])
        other = SGD([alone], **option, engine="eager")
        for step in range(3):
            give(alone, normal(alone.shape, seed=10 * step + n, dtype=BRAIN))
            other.step()
        assert same_bits(together[n], alone)
        assert optimizer.state[together[n]].keys() == other.state[alone].keys()


def turned_on_later(engine: str) -> None:
    p, q = parameters([torch.ones(100)] * 2)
    pairs: list[tuple[Any, Tensor]] = [(SGD([p], engine=engine), p), (torch.optim.SGD([q]), q)]
    for optimizer, x in pairs:
        for momentum in (0.0, 0.9, 0.9):
            optimizer.param_groups[0]["momentum"] = momentum
            x.grad = torch.ones(100)
            optimizer.step()
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("engine", ["eager", pytest.param("c", marks=needs_c)])
def test_a_process_that_turns_momentum_on_later_gets_torchs_weights(
    forked: ForkServerContext, engine: str
) -> None:
    """In a process of its own: C may read a moment that is not there, and end it."""
    process = forked.Process(target=turned_on_later, args=(engine,))
    process.start()
    process.join()
    assert process.exitcode == 0


def changes_of_dtype() -> list[Any]:
    pairs = itertools.permutations(DTYPES, 2)
    return [pytest.param(a, b, id=f"{a}-{b}".replace("torch.", "")) for a, b in pairs]


@pytest.mark.parametrize("engine", ["eager", None])
@pytest.mark.parametrize(("before", "after"), changes_of_dtype())
@pytest.mark.parametrize("name", ["adamw", "rmsprop_momentum", "sgd_momentum"])
def test_moments_are_carried_over_to_other_dtypes(
    name: str, before: torch.dtype, after: torch.dtype, engine: str | None
) -> None:
    """A change of the options after many steps is no step into another state.

    Against float32 moments throughout: each rounding is off by 2^-8 (bfloat16), its stochastic ones
    by twice that, for the five steps that follow.
    """
    found = []
    for change in (False, True):
        (p,) = parameters([normal((500,), 0)])
        options = moment_options(name, before, before) if change else {}
        if "momentum_dtype" in options or name == "rmsprop_momentum":
            options["momentum_dtype"] = before if change else FLOAT
        optimizer = MAKE[name]([p], **options, engine=engine)
        for step in range(25):
            if change and step == 20:
                for option in options:
                    optimizer.param_groups[0][option] = after
            p.grad = normal((500,), step) * 0.1 + 0.05
            optimizer.step()
            if step == 19:
                start = p.detach().clone()
        found.append(p.detach() - start)
        if change:
            kept = {k: v for k, v in optimizer.state[p].items() if k != "step"}
            assert {v.dtype for v in kept.values()} == {after}
            assert len(kept) == (1 if name == "sgd_momentum" else 2)
    expected, moved = found
    error = (moved - expected).norm() / expected.norm()
    assert error < 0.05


@pytest.mark.parametrize("dtype", LOW)
def test_a_state_of_torchs_with_16_bit_moments_is_continued(dtype: torch.dtype) -> None:
    """Theirs are neither scaled nor roots."""
    p, q = parameters([normal((500,), 0, dtype)] * 2)
    theirs = torch.optim.AdamW([q], lr=0.01)
    for step in range(10):
        q.grad = normal((500,), step, dtype)
        theirs.step()
    ours = AdamW([p], rounding="kahan", momentum_dtype=dtype, variance_dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    p.grad = normal((500,), 10, dtype)
    ours.step()
    state, scale = ours.state[p], SCALE if dtype == HALF else 1
    expected = 0.9 * theirs.state[q]["exp_avg"].float() + 0.1 * p.grad.float()
    square = 0.999 * theirs.state[q]["exp_avg_sq"].float() + 0.001 * p.grad.float() ** 2
    # Rounded twice, on the way in and after the step.
    bound = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(state["exp_avg"].float() / scale, expected, rtol=bound, atol=bound)
    found = state["exp_avg_sq_root"].float() / scale
    torch.testing.assert_close(found, square.sqrt(), rtol=bound, atol=1e-4)


def test_a_parameter_cut_short_is_refused_until_state_and_gradient_are() -> None:
    (p,) = parameters([torch.ones(10)])
    optimizer = AdamW([p])
    p.grad = torch.ones(10)
    optimizer.step()
    p.data = p.data[:4].clone()
    with pytest.raises(
        ValueError, match=r"a gradient of shape \(10,\) on cpu for a param.*zero_grad"
    ):
        optimizer.step()
    optimizer.zero_grad()
    p.grad = torch.ones(4)
    with pytest.raises(
        ValueError, match=r"exp_avg of shape \(10,\) .* clear the optimizer's state"
    ):
        optimizer.step()
    optimizer.state.clear()
    optimizer.step()


def test_c_is_refused_where_there_is_no_memory_of_the_cpu() -> None:
    p = nn.Parameter(torch.ones(10, device="meta"))
    p.grad = torch.ones(10, device="meta")
    with pytest.raises(ValueError, match="engine='c' for a parameter on meta; legal there: None"):
        AdamW([p], engine="c").step()


# ---- loss scale ----

# Parameter, first and second moment are all in 16 bits, and rounded stochastically.
SCALED: dict[str, dict[str, Any]] = {
    name: moment_options(name, BRAIN, HALF) for name in MAKE if name != "sgd_nesterov"
}


@pytest.mark.parametrize("scale", [2.0**-3, 1.0, 2.0**10])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCALED)
def test_a_power_of_two_changes_no_bit(name: str, dtype: torch.dtype, scale: float) -> None:
    """Gradients of 2^-4 to 8 times 2^10 or 2^-3 stay normal in float16, so both are exact."""
    found = []
    for factor in (None, scale):
        made = parameters(normal((200,), n, dtype) for n in range(2))
        optimizer = MAKE[name](made, **SCALED[name], engine="eager")
        for step in range(3):
            for n, p in enumerate(made):
                gradient = normal(p.shape, 10 * step + n).sign() * (
                    torch.rand(p.shape, generator=generator(step + n)) * 7.9 + 2.0**-4
                )
                p.grad = gradient.to(dtype) * (factor or 1.0)
            skipped = optimizer.scaled_step(None if factor is None else torch.tensor(factor))
            assert skipped is None if factor is None else skipped.item() == 0
        found.append(optimizer)
    assert unlike(*found) == []


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_gradients_that_float16_cannot_hold_move_parameters(rounding: str) -> None:
    true = 3e-9
    assert torch.tensor(true, dtype=HALF) == 0
    scale = torch.tensor(2.0**16)
    (p,) = parameters([torch.ones(100, dtype=HALF)])
    optimizer = AdamW([p], lr=0.05, weight_decay=0.0, rounding=rounding)
    p.grad = torch.full((100,), true * 2**16, dtype=HALF)
    skipped = optimizer.scaled_step(scale)
    assert skipped is not None
    assert skipped.item() == 0
    # AdamW's first step is lr g / (|g| + eps); the scaled gradient is off by 2^-12, the parameter
    # is rounded by 2^-11 at most.
    expected = 1 - 0.05 * true / (true + 1e-8)
    assert ((p.double() - expected).abs() < 2.0**-11).all()
    assert (p < 1 - 0.01).all()


@pytest.mark.parametrize("planted", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCALED)
def test_a_gradient_that_is_not_finite_skips_the_whole_step(
    name: str, dtype: torch.dtype, planted: float
) -> None:
    """Also the first one, which leaves a fresh optimizer."""
    made = parameters(normal((50,), n, dtype) for n in range(3))
    optimizer = MAKE[name](made, **SCALED[name], engine="eager")
    scale = torch.tensor(4.0)
    for step in range(3):
        before = [p.detach().clone() for p in made], state_of(optimizer)
        for n, p in enumerate(made):
            p.grad = normal(p.shape, seed=n, dtype=dtype)
        skips = step != 1
        if skips:
            made[2].grad[7] = planted
        skipped = optimizer.scaled_step(scale)
        assert skipped is not None
        assert skipped.dtype == FLOAT
        assert skipped.item() == (1.0 if skips else 0.0)
        for p, old, state in zip(made, *before, strict=True):
            assert same_bits(p.detach(), old) == skips
            if skips:
                assert all(same_bits(optimizer.state[p][k], v) for k, v in state.items())
        if step == 0:
            assert all((x == 0).all() for p in made for x in optimizer.state[p].values())
    assert all(optimizer.state[p]["step"] == 1 for p in made)


@pytest.mark.parametrize("name", ["sgd", "sgd_momentum", "sgd_nesterov"])
def test_an_infinite_gradient_makes_of_a_parameter_what_torch_makes(name: str) -> None:
    _, torchs, options = ORACLES[name]
    p, q = parameters([torch.ones(2)] * 2)
    for x, make in ((p, SGD), (q, torchs)):
        x.grad = torch.tensor([math.inf, -math.inf])
        make([x], **options).step()
    assert torch.equal(q.detach(), torch.tensor([-math.inf, math.inf]))
    assert torch.equal(p, q)


@pytest.mark.parametrize("scale", [None, 1.0, 1024.0, 3.3])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("size", [0.01, 50.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_is_clip_grad_norms_on_float32_copies(
    dtype: torch.dtype, size: float, max_norm: float, scale: float | None
) -> None:
    """At 50 the sum of float16 squares, 7.5 million, overflows (1024 times it, each gradient)."""
    if scale == 1024.0 and size == 50.0 and dtype == HALF:
        scale = 256.0  # 50 * 4.5 standard deviations fit
    shapes = [(1000,), (40, 50)]
    start = [torch.full(s, 1.0) for s in shapes]
    mine = parameters(s.to(dtype) for s in start)
    theirs = parameters(start)
    ours = SGD(mine, lr=2.0**-10, rounding="kahan", engine="eager")
    other = torch.optim.SGD(theirs, lr=2.0**-10)
    for n, (p, q) in enumerate(zip(mine, theirs, strict=True)):
        p.grad = (normal(p.shape, n) * size * (scale or 1.0)).to(dtype)
        q.grad = p.grad.float() / (scale or 1.0)
    assert all(p.grad.isfinite().all() for p in mine if p.grad is not None)
    if dtype == HALF and size == 50.0:
        assert sum((p.grad**2).sum() for p in mine if p.grad is not None).isinf()
    nn.utils.clip_grad_norm_(theirs, max_norm)
    other.step()
    ours.scaled_step(None if scale is None else torch.tensor(scale), max_norm)
    for p, q in zip(mine, theirs, strict=True):
        merged = p.detach() if dtype == FLOAT else merge(p.detach(), ours.state[p]["remainder"])
        # A norm summed in float32 is off by some units (1e-6) of an update of up to 0.25; the
        # difference from 1 is itself rounded to 2^-24.
        torch.testing.assert_close(merged, q.detach(), rtol=0, atol=0.25e-6 + 2 * EPS)


def half_model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to(HALF)
    return model, normal((32, 8), 3, HALF)


def test_grad_scaler_drives_float16_parameters() -> None:
    """Its scale, step and update: the bits of mprun's dynamic scale, overflows skipped."""
    pairs = []
    for _ in range(2):
        model, x = half_model()
        pairs.append((model, AdamW(model.parameters(), lr=0.01, seed=2)))
    (model, ours), (other, theirs) = pairs
    rule = DynamicRule(interval=5, floor=0.0)
    loss_scale = DynamicLossScale(2.0**20, rule, CPU)
    scaler = torch.amp.GradScaler("cpu", 2.0**20, growth_interval=rule.interval)
    skips = 0
    for _ in range(30):
        before = [p.detach().clone() for p in other.parameters()]
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        loss_scale.scale(model(x).float().square().mean()).backward()
        scaler.scale(other(x).float().square().mean()).backward()
        skipped = loss_scale.step(ours, Clip())
        loss_scale.update()
        scaler.step(theirs)
        scaler.update()
        assert skipped is not None
        unmoved = [torch.equal(p, q) for p, q in zip(before, other.parameters(), strict=True)]
        assert all(unmoved) == any(unmoved) == bool(skipped.item())
        assert scaler.get_scale() == loss_scale.tensor.item()
        assert unlike(ours, theirs) == []
        skips += all(unmoved)
    assert 2 < skips < 20
    assert not hasattr(theirs, "found_inf")


# ---- drop-in ----


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "every second": lambda x: torch.stack([x, x], dim=-1)[..., 0],
}


@pytest.mark.parametrize("engine", [pytest.param("c", marks=needs_c), "eager"])
@pytest.mark.parametrize("of_gradient", ["contiguous", *LAYOUTS])
@pytest.mark.parametrize("of_parameter", ["contiguous", *LAYOUTS])
def test_layouts_change_no_bit(of_parameter: str, of_gradient: str, engine: str) -> None:
    shape = (4, 6, 3, 5)
    plain, strided = (nn.Parameter(normal(shape, 0, BRAIN)) for _ in range(2))
    strided.data = LAYOUTS.get(of_parameter, torch.clone)(strided.data)
    assert strided.is_contiguous() == (of_parameter == "contiguous")
    layout = strided.stride()
    a, b = (AdamW([p], momentum_dtype=BRAIN, engine=engine) for p in (plain, strided))
    for step in range(3):
        gradient = normal(shape, 10 + step, BRAIN)
        plain.grad = gradient
        strided.grad = LAYOUTS.get(of_gradient, torch.clone)(gradient)
        a.step()
        b.step()
    assert strided.stride() == layout
    assert torch.equal(plain, strided)
    for name, value in a.state[plain].items():
        assert same_bits(value, b.state[strided][name])


@pytest.mark.parametrize("name", MAKE)
def test_empty_parameters_and_those_without_gradient_are_passed_over(name: str) -> None:
    made = parameters([torch.ones(0, 3, dtype=BRAIN), torch.ones(2, dtype=BRAIN), torch.ones(2)])
    optimizer = MAKE[name](made)
    made[0].grad, made[2].grad = torch.ones(0, 3, dtype=BRAIN), torch.ones(2)
    optimizer.step()
    assert not optimizer.state[made[1]]
    assert torch.equal(made[1].detach(), torch.ones(2, dtype=BRAIN))
    assert (made[2] != 1).all()
    assert optimizer.state[made[0]]["step"] == 1


def test_a_parameter_without_gradient_does_not_change_the_others_bits() -> None:
    """Random bits hang on a parameter's place, not on how many before it had a gradient."""
    found = []
    for first in (True, False):
        made = parameters([torch.ones(1000, dtype=BRAIN)] * 2)
        optimizer = SGD(made, lr=2.0**-9)
        made[0].grad = torch.ones(1000, dtype=BRAIN) if first else None
        made[1].grad = torch.ones(1000, dtype=BRAIN)
        optimizer.step()
        found.append(made[1].detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_parameter_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    (p,) = parameters([torch.ones(4, dtype=dtype)])
    p.grad = torch.ones(4, dtype=dtype)
    expected = f"a parameter of {dtype}; legal: torch.float32, torch.float16, torch.bfloat16"
    with pytest.raises(TypeError) as error:
        SGD([p]).step()
    assert str(error.value) == expected
    assert torch.equal(p.detach(), torch.ones(4, dtype=dtype))


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (SGD, {"rounding": "up"}, "rounding='up'; legal: 'nearest', 'stochastic', 'kahan', 'split'"),
    (AdamW, {"variance_dtype": "float16"}, "variance_dtype='float16'; legal: torch.float32, torc"),
    (RMSprop, {"overflow": "wrap"}, "overflow='wrap'; legal: 'infinity', 'saturate'"),
    (SGD, {"engine": "cuda"}, "engine='cuda'; legal: None, 'c', 'triton', 'eager'"),
    (
        *(AdamW, {"rounding": "kahan", "overflow": "saturate"}),
        "overflow='saturate' with rounding='kahan'; legal is 'infinity'",
    ),
    (SGD, {"variance_dtype": HALF}, "variance_dtype: SGD keeps no second moment"),
    (SGD, {"lr": -0.1}, "lr=-0.1; legal is 0 or more"),
    (AdamW, {"betas": (0.9, 1.0)}, "betas=(0.9, 1.0); legal is 0 or more and below 1, each"),
]


@pytest.mark.parametrize(("make", "options", "text"), BAD, ids=[b[2][:28] for b in BAD])
def test_options_that_are_none_are_refused(make: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(text)):
        make(parameters([torch.ones(1)]), **options)


def test_options_of_a_group_are_refused_too() -> None:
    """A misspelt rounding must not become another one silently: in a group, or in one added."""
    options: dict[str, Any] = {"rounding": "stochastik"}
    first, second = parameters([torch.ones(3, dtype=BRAIN)] * 2)
    with pytest.raises(ValueError, match="legal"):
        SGD([{"params": [first], **options}])
    optimizer = SGD([first])
    with pytest.raises(ValueError, match="legal"):
        optimizer.add_param_group({"params": [second], **options})


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_saturating_parameters_stop_at_the_largest(name: str, dtype: torch.dtype) -> None:
    """Three quarters of a unit above it, which nearest rounding takes to the infinity."""
    largest = torch.finfo(dtype).max
    unit = 2.0**5 if dtype == HALF else 2.0**120
    options = {"lr": 0.75 * unit, "weight_decay": 0.0, "rounding": "nearest"}
    for overflow, expected in (("saturate", largest), ("infinity", math.inf)):
        (p,) = parameters([torch.full((4,), largest, dtype=dtype)])
        optimizer = MAKE[name]([p], **options, overflow=overflow)
        p.grad = torch.full((4,), -1.0, dtype=dtype)
        optimizer.step()
        assert torch.equal(p.detach().float(), torch.full((4,), expected))


QUOTIENTS: dict[str, Callable[[nn.Parameter, torch.dtype, str | None], LowPrecisionOptimizer]] = {
    "adamw": lambda p, dtype, engine: AdamW(
        *([p], 1.0), weight_decay=0, momentum_dtype=dtype, variance_dtype=dtype, engine=engine
    ),
    "rmsprop": lambda p, dtype, engine: RMSprop([p], 1.0, variance_dtype=dtype, engine=engine),
}


@pytest.mark.representative("*-1.0-*", "*-1e-07-*")
@pytest.mark.parametrize("engine", ["eager", None])
@pytest.mark.parametrize("size", [1e3, 1.0, 1e-4, 1e-6, 1e-7, 1e-8])
@pytest.mark.parametrize("name", QUOTIENTS)
def test_updates_with_float16_moments_are_as_large_as_with_float32s(
    name: str, size: float, engine: str | None
) -> None:
    """They are quotients: one whose denominator was lost would be as large as can be.

    At 1e-8 a unit of the kept moments, 2^-30, is a tenth of them; elsewhere it is less.
    """
    moves = []
    for dtype in (FLOAT, HALF):
        (p,) = parameters([torch.zeros(1000)])
        optimizer = QUOTIENTS[name](p, dtype, engine)
        moved = []
        for step in range(200):
            p.grad = normal((1000,), step) * size
            p.data.zero_()
            optimizer.step()
            moved.append(p.detach().abs())
        moves.append(torch.stack(moved).double())
    wide, low = moves
    ratio = low.mean(1) / wide.mean(1)
    bound = 0.15 if size == 1e-8 else 0.03
    assert ((ratio - 1).abs() < bound).all(), (ratio.min(), ratio.max())
    assert low.max() < 1.6 * wide.max()


@pytest.mark.parametrize("engine", ["eager", None])
@pytest.mark.parametrize("size", [1e4, 1e10, 1e18])
@pytest.mark.parametrize("name", QUOTIENTS)
def test_float16_moments_that_are_too_large_stay_at_the_largest(
    name: str, size: float, engine: str | None
) -> None:
    (p,) = parameters([torch.zeros(1000)])
    optimizer = QUOTIENTS[name](p, HALF, engine)
    for step in range(20):
        p.grad = normal((1000,), step) * size
        p.data.zero_()
        optimizer.step()
        # The largest quotient there is: that of a gradient of which nothing was known before.
        assert (p.detach().abs() < 10.1).all()
    root = optimizer.state[p][f"{optimizer.second}_root"]
    assert (root <= torch.finfo(HALF).max).all()
    assert (root == torch.finfo(HALF).max).any()
