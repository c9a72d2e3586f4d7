"""The engines against each other: C, Triton and PyTorch block by block give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mprun.optim import LowPrecisionOptimizer, engines
from mprun.precision import kernels
from tests.optim import (
    BRAIN,
    DTYPES,
    FLOAT,
    HALF,
    LOW,
    MAKE,
    RULES,
    STORED,
    give,
    moment_options,
    parameters,
    same_bits,
    unlike,
    wide,
    widen,
)

needs_c = pytest.mark.skipif(
    kernels.why_not() is not None, reason=f"no compiled kernels: {kernels.why_not()}"
)
STEPS = 3
BORDERS = (1, 17, 2**15 - 1, 2**15, 2**16 + 3)
"""One, less than a vector, both sides of `SERIAL`, more than an `EAGER_BLOCK`."""


def ran(
    name: str,
    engine: str | None,
    stored: tuple[torch.dtype, torch.dtype],
    options: dict[str, Any],
    sizes: tuple[int, ...],
) -> LowPrecisionOptimizer:
    """An optimizer after some steps from state and gradients of every size and kind."""
    dtype, grad_dtype = stored
    made = parameters(wide(dtype, n, seed=n) for n in sizes)
    optimizer = MAKE[name](made, **options, seed=5, engine=engine)
    for step in range(STEPS):
        for p in made:
            give(p, wide(grad_dtype, p.numel(), seed=100 * step + p.numel()))
        optimizer.step()
        if step == 0:
            for state in optimizer.state.values():
                widen(state)
    return optimizer


def moments_of(
    name: str, row: int, rule: int
) -> Iterator[tuple[torch.dtype, torch.dtype] | tuple[torch.dtype]]:
    """Dtypes of the moments for one kind of storage and one rule.

    Every first moment, with the second one of a Latin square: over all storages and rules each
    combination of three of storage, rule, first and second moment comes up.
    """
    for number, first in enumerate(DTYPES):
        yield first, DTYPES[(number + row + rule) % 3]


def assert_c_has_the_bits_of_eager(name: str, row: int) -> None:
    """For one kind of storage, and every rule."""
    tried = set()
    for number, (rounding, overflow) in enumerate(RULES):
        for moments in moments_of(name, row, number):
            options: dict[str, Any] = {"rounding": rounding, "overflow": overflow}
            options |= moment_options(name, *moments)
            if tuple(options.items()) in tried:
                continue
            tried.add(tuple(options.items()))
            a, b = (ran(name, e, STORED[row], options, (1003,)) for e in ("c", "eager"))
            assert unlike(a, b) == [], options
    assert len(tried) == (5 if name == "sgd" else 15)


every_storage = pytest.mark.parametrize(
    "row", range(len(STORED)), ids=lambda n: "-".join(map(str, STORED[n]))
)


@needs_c
@every_storage
@pytest.mark.parametrize("name", MAKE)
def test_c_and_eager_give_the_same_bits_for_every_storage_and_rule(name: str, row: int) -> None:
    assert_c_has_the_bits_of_eager(name, row)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.representative(0, 3)
@needs_c
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("name", "stored", "rule", "moments"),
    [
        ("adamw", (BRAIN, BRAIN), "stochastic", (BRAIN, BRAIN)),
        ("adamw", (HALF, FLOAT), "kahan", (HALF, FLOAT)),
        ("rmsprop", (BRAIN, FLOAT), "stochastic", (FLOAT, HALF)),
        ("rmsprop_momentum", (HALF, HALF), "stochastic", (BRAIN, HALF)),
    ],
)
def test_neither_sizes_nor_threads_change_a_bit(
    name: str,
    stored: tuple[torch.dtype, torch.dtype],
    rule: str,
    moments: tuple[torch.dtype, torch.dtype],
) -> None:
    options = {"rounding": rule, **moment_options(name, *moments)}
    blocks = ran(name, "eager", stored, options, BORDERS)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert unlike(ran(name, "c", stored, options, BORDERS), blocks) == [], count


@needs_c
@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(MAKE)),
    dtype=st.sampled_from(LOW),
    size=st.integers(1, 300),
    seed=st.integers(0, 2**63),
    scale=st.floats(1e-30, 1e30),
    lr=st.floats(0, 1e3),
)
def test_any_seed_scale_rate_and_size_give_the_same_bits(
    name: str, dtype: torch.dtype, size: int, seed: int, scale: float, lr: float
) -> None:
    found = []
    for engine in ("c", "eager"):
        made = parameters([wide(dtype, size, seed=1)])
        optimizer = MAKE[name](made, seed=seed, engine=engine)
        optimizer.param_groups[0]["lr"] = lr
        for step in range(2):
            give(made[0], wide(dtype, size, seed=step))
            optimizer.grad_scale = torch.tensor(scale)
            optimizer.step()
        found.append(optimizer)
    assert unlike(*found) == []


def test_every_element_and_site_and_step_and_tensor_gets_bits_of_its_own() -> None:
    """Alike elements, tensors and steps are rounded apart: no two of them share their bits."""
    made = parameters([torch.ones(2000, dtype=BRAIN)] * 2)
    optimizer = MAKE["sgd"](made, lr=2.0**-9, weight_decay=0.0, engine="eager")
    moves = []
    for _ in range(2):
        before = [p.detach().clone() for p in made]
        for p in made:
            give(p, torch.ones(2000, dtype=BRAIN))
        optimizer.step()
        moves += [(b != p.detach()) for b, p in zip(before, made, strict=True)]
    for number, a in enumerate(moves):
        # Half a unit: each moves with probability 1/2, 4 standard errors of 2000 are 0.045.
        assert abs(a.double().mean().item() - 0.5) < 0.045
        for b in moves[:number]:
            assert abs((a == b).double().mean().item() - 0.5) < 0.045


def test_cpu_engine_is_c_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_not", lambda: None)
    assert engines.fastest(torch.device("cpu"), "adamw") == "c"
    assert engines.fastest(torch.device("cpu"), "formula_without_c") == "eager"
    monkeypatch.setattr(kernels, "why_not", lambda: "no kernels")
    assert engines.fastest(torch.device("cpu"), "adamw") == "eager"
    assert engines.fastest(torch.device("cuda"), "adamw") == "triton"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert engines.fastest(torch.device("cuda"), "adamw") == "eager"


def test_an_engine_that_was_named_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_not", lambda: "none here")
    with pytest.raises(kernels.NoKernelsError, match="none here"):
        ran("adamw", "c", (BRAIN, BRAIN), {}, (17,))


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("skip", [None, 0.0, 1.0])
def test_a_step_that_reads_no_number_gives_the_same_bits(
    name: str, skip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What GPUs run, here on the CPU: all constants of a step on the device, none read."""

    def steps(reads: bool) -> LowPrecisionOptimizer:
        monkeypatch.setattr("mprun.optim.base.is_on_host", lambda p: reads)
        values = [wide(dtype, n, seed=n) for n in (3, 70_000) for dtype in LOW]
        made = parameters(values)
        groups = [{"params": made[:1]}, {"params": made[1:], "lr": 0.5, "weight_decay": 0.25}]
        more = {"momentum": 0.9, "dampening": 0.3} if name == "sgd" else {}
        optimizer = MAKE[name](groups, **more, seed=5, engine="eager")
        for step in range(4):
            for number, p in enumerate(made):
                if number == step:  # one takes a step less: its corrections differ
                    p.grad = None
                    continue
                give(p, wide(p.dtype, p.numel(), seed=100 * step + p.numel()))
            taken = None if skip is None else torch.tensor(skip if step == 2 else 0.0)
            optimizer.scaled_step(torch.tensor(8.0), overflow=taken)
        return optimizer

    for a, b in zip(steps(True).state.items(), steps(False).state.items(), strict=True):
        assert same_bits(a[0], b[0])
        assert a[1].keys() == b[1].keys()
        assert all(same_bits(a[1][key], b[1][key]) for key in a[1])
