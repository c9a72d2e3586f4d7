"""A step on the shards of a parameter gives the bits of a step on the whole, with every engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mprun.optim import AdamW, MasterWeights, mark_shard, name_parameters
from mprun.optim.masters import masters_of
from mprun.precision import random_bits as random_bits_module
from mprun.precision.random_bits import BLOCK, START, key, random_bits, tensor_number
from mprun.precision.rounding import round_stochastic, settle
from tests.optim import (
    BRAIN,
    HALF,
    LOW,
    MAKE,
    RULES,
    STORED,
    give,
    moment_options,
    normal,
    same_bits,
    wide,
    widen,
)
from tests.optim.test_engines import moments_of, needs_c

SIZE = 1003
CUTS = (0, 0, 1, 66, 391, 391, SIZE)
"""Where shards begin and end: two are empty; none begins at a multiple of the kernels' 64."""
STEPS = 3
ENGINES = ("eager", pytest.param("c", marks=needs_c))


def stepped(
    name: str,
    engine: str,
    stored: tuple[torch.dtype, torch.dtype],
    options: dict[str, Any],
    cuts: tuple[int, ...],
) -> dict[str, Tensor]:
    """Parameter and state after some steps, put together of shards with an optimizer each."""
    dtype, grad_dtype = stored
    size, parts = cuts[-1], [slice(*ends) for ends in pairwise(cuts)]
    values = wide(dtype, size, seed=1)
    shards = [nn.Parameter(values[part].clone()) for part in parts]
    for p, part in zip(shards, parts, strict=True):
        mark_shard(p, "weight", part.start)
    optimizers = [MAKE[name]([p], **options, seed=5, engine=engine) for p in shards]
    for step in range(STEPS):
        gradient = wide(grad_dtype, size, seed=100 * step)
        for p, optimizer, part in zip(shards, optimizers, parts, strict=True):
            give(p, gradient[part])
            optimizer.step()
            if step == 0:
                widen(optimizer.state[p], size, part)
    states = [{"parameter": p, **o.state[p]} for p, o in zip(shards, optimizers, strict=True)]
    assert all(state.pop("step") == STEPS for state in states)
    return {entry: torch.cat([state[entry] for state in states]).detach() for entry in states[0]}


def unlike_entries(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [entry for entry in a if not same_bits(a[entry], b[entry])]


@pytest.mark.representative("eager-adamw-*", "c-adamw-*", "c-rmsprop_momentum-*16-*")
@pytest.mark.parametrize("row", range(len(STORED)), ids=lambda n: "-".join(map(str, STORED[n])))
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("engine", ENGINES)
def test_shards_get_the_bits_of_the_whole_for_every_storage_and_rule(
    engine: str, name: str, row: int
) -> None:
    for number, (rounding, overflow) in enumerate(RULES):
        for moments in moments_of(name, row, number):
            options: dict[str, Any] = {"rounding": rounding, "overflow": overflow}
            options |= moment_options(name, *moments)
            whole = stepped(name, "eager", STORED[row], options, (0, SIZE))
            shards = stepped(name, engine, STORED[row], options, CUTS)
            assert unlike_entries(shards, whole) == [], options


LOW_ADAMW: dict[str, Any] = {"momentum_dtype": BRAIN, "variance_dtype": HALF}


# ---- parameters of more than 2^31 elements ----

FAR = (1, 63, BLOCK - 500, BLOCK - 1, BLOCK, BLOCK + 17, 5 * BLOCK - 301, 2**40 + 1)


def far(
    start: int,
    name: str,
    engine: str,
    stored: tuple[torch.dtype, torch.dtype],
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """Parameter and state after the first step of a shard that begins at `start`."""
    p = nn.Parameter(wide(stored[0], SIZE, seed=1))
    mark_shard(p, "weight", start)
    give(p, wide(stored[1], SIZE, seed=2))
    optimizer = MAKE[name]([p], **options, seed=5, engine=engine)
    optimizer.step()
    return {"parameter": p.detach(), **optimizer.state[p]}


def check_far(start: int, dtype: torch.dtype, engine: str) -> None:
    """SGD written out, with the random bits of elements `start` to `start + SIZE`."""
    p = nn.Parameter(normal((SIZE,), 1, dtype))
    old, gradient = p.detach().clone(), normal((SIZE,), 2)
    mark_shard(p, "weight", start)
    give(p, gradient)
    MAKE["sgd"]([p], lr=2.0**-7, weight_decay=0.0, seed=5, engine=engine).step()
    bits = random_bits(key(5, 1, tensor_number("weight"), 0), SIZE, start=start)
    change = 2.0**-7 * gradient
    settled = settle(old.float() - change, old.float(), change, bits)
    assert same_bits(p.detach(), round_stochastic(settled, dtype, bits))


@pytest.mark.parametrize("start", FAR)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("engine", ENGINES)
def test_shards_far_into_a_parameter(start: int, dtype: torch.dtype, engine: str) -> None:
    check_far(start, dtype, engine)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys for 200 elements instead of 2^31."""
    monkeypatch.setattr(random_bits_module, "BLOCK", 200)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rounding", ["stochastic", "kahan", "nearest"])
@pytest.mark.parametrize("engine", ENGINES)
def test_shards_across_several_blocks(engine: str, rounding: str) -> None:
    options = {**LOW_ADAMW, "rounding": rounding}
    whole = stepped("adamw", "eager", (BRAIN, BRAIN), options, (0, SIZE))
    for cuts in (CUTS, (0, 200, 400, 401, SIZE), (0, 199, 600, SIZE)):
        shards = stepped("adamw", engine, (BRAIN, BRAIN), options, cuts)
        assert unlike_entries(shards, whole) == []


# ---- what becomes of parameters ----


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.usefixtures("small_blocks")
def test_masters_of_shards_round_as_the_whole(dtype: torch.dtype) -> None:
    """Steps are exact in float32, so that the only roundings are those to 16 bits."""
    found = []
    for cuts in ((0, 40), (0, 0, 1, 13, 13, 40)):
        shards = []
        for begin, end in pairwise(cuts):
            p = nn.Parameter(torch.ones(40, 25, dtype=dtype)[begin:end].clone())
            mark_shard(p, "weight", 25 * begin)
            masters = masters_of([p])
            inner = torch.optim.SGD(masters, lr=2.0**-13)
            optimizer = MasterWeights(inner, masters, seed=3)
            for step in range(STEPS):
                p.grad = torch.ones_like(p) * (step + 1)
                optimizer.step()
            shards.append(p.detach())
        found.append(torch.cat(shards))
    assert len(found[0].unique()) == 2
    assert same_bits(*found)


# ---- marks ----


def test_a_mark_is_a_name_and_a_start() -> None:
    p, whole = nn.Parameter(torch.ones(3)), nn.Linear(1, 1)
    mark_shard(p, "weight", 12)
    name_parameters(whole)
    assert vars(p).items() >= {**vars(whole.weight), START: 12}.items()
    with pytest.raises(ValueError, match=r"shard of weight with start=-1; legal is 0 or more"):
        mark_shard(p, "weight", -1)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_dtensor_is_refused_with_what_is_legal(scaled: bool) -> None:
    p = nn.Parameter(torch.ones(3, dtype=BRAIN))
    p.to_local = lambda: p.data  # type: ignore[attr-defined]
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p])
    legal = r"legal: parallel=fsdp2 of mprun, local shards .* mprun\.optim\.mark_shard, or whole"
    with pytest.raises(TypeError, match=legal):
        optimizer.scaled_step(torch.ones(()), 1.0) if scaled else optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3, dtype=BRAIN))


def test_a_parameter_whose_data_is_replaced_stays_its_shard() -> None:
    """As a view of a larger buffer, which local shards are; `start` does not count from there."""
    whole = stepped("adamw", "eager", (BRAIN, BRAIN), LOW_ADAMW, (0, SIZE))
    values = wide(BRAIN, SIZE, seed=1)
    p = nn.Parameter(values[391:].clone())
    mark_shard(p, "weight", 391)
    optimizer = MAKE["adamw"]([p], **LOW_ADAMW, seed=5)
    for step in range(STEPS):
        buffer = torch.zeros(SIZE + step, dtype=BRAIN)
        view = buffer[step : step + SIZE - 391].copy_(p.detach())
        p.data = view
        give(p, wide(BRAIN, SIZE, seed=100 * step)[391:])
        optimizer.step()
        if step == 0:
            widen(optimizer.state[p], SIZE, slice(391, SIZE))
        assert same_bits(buffer[step : step + SIZE - 391], p.detach())
    assert same_bits(p.detach(), whole["parameter"][391:])


def test_masters_are_marked_for_an_inner_optimizer_that_draws() -> None:
    """Second moments in 16 bits of an inner AdamW of mprun, in the first group and one added."""
    found = []
    for begin, end in ((0, SIZE), (391, SIZE)):
        made = [nn.Parameter(normal((SIZE,), n, BRAIN)[begin:end]) for n in range(2)]
        for n, p in enumerate(made):
            mark_shard(p, f"weight {n}", begin)
            p.grad = normal((SIZE,), 2 + n, BRAIN)[begin:end]
        masters = masters_of(made[:1])
        optimizer = MasterWeights(AdamW(masters, variance_dtype=BRAIN), masters)
        optimizer.add_param_group({"params": made[1:]})
        optimizer.step()
        found.append([optimizer.state[p]["exp_avg_sq_root"] for p in made])
    whole, shard = found
    assert all(same_bits(x[391:], y) for x, y in zip(whole, shard, strict=True))
