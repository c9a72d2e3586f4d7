"""The engines against each other: C, PyTorch block by block and Inductor give the same bits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mprun.optim import LowPrecisionOptimizer, engines
from mprun.precision import kernels
from mprun.precision.kernels import prebuilt
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
    combination of three of storage, rule, first and second moment comes up (a library may be
    compiled for each of these, half a second).
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


@needs_c
@pytest.mark.exhaustive
@pytest.mark.compiled
@every_storage
@pytest.mark.parametrize("name", MAKE)
def test_so_do_compiled_kernels_for_every_storage_and_rule(name: str, row: int) -> None:
    assert_c_has_the_bits_of_eager(name, row)


@needs_c
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "stored", "rule", "moments"),
    [
        ("adamw", (BRAIN, BRAIN), ("stochastic", "infinity"), (HALF, BRAIN)),
        ("adamw", (HALF, FLOAT), ("split", "infinity"), (FLOAT, HALF)),
        ("rmsprop_momentum", (HALF, HALF), ("kahan", "infinity"), (BRAIN, HALF)),
        ("sgd", (FLOAT, FLOAT), ("nearest", "infinity"), (FLOAT, FLOAT)),
        ("sgd_nesterov", (BRAIN, FLOAT), ("stochastic", "saturate"), (HALF, FLOAT)),
    ],
)
def test_a_compiled_kernel_gives_the_bits_of_eager(
    name: str,
    stored: tuple[torch.dtype, torch.dtype],
    rule: tuple[str, str],
    moments: tuple[torch.dtype, torch.dtype],
) -> None:
    """Every formula and rule once."""
    options: dict[str, Any] = {"rounding": rule[0], "overflow": rule[1]}
    options |= moment_options(name, *moments)
    a, b = (ran(name, e, stored, options, (1003,)) for e in ("c", "eager"))
    assert unlike(a, b) == []


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


def compiles_for_torch() -> bool:
    """Whether Inductor finds a C++ compiler."""
    return any(shutil.which(x) for x in (os.environ.get("CXX", ""), "g++", "clang++") if x)


BY_INDUCTOR: list[tuple[str, tuple[torch.dtype, torch.dtype], dict[str, Any]]] = [
    (
        "adamw",
        (HALF, HALF),
        {"rounding": "kahan", "momentum_dtype": HALF, "variance_dtype": BRAIN},
    ),
    (
        "adamw",
        (BRAIN, BRAIN),
        {"rounding": "stochastic", "momentum_dtype": HALF, "variance_dtype": HALF},
    ),
    ("rmsprop_momentum", (HALF, HALF), {"rounding": "kahan", "variance_dtype": BRAIN}),
    (
        "sgd_nesterov",
        (BRAIN, FLOAT),
        {"rounding": "nearest", "overflow": "saturate", "momentum_dtype": BRAIN},
    ),
]
"""Of the first one all that rounds is in it: nearest with a remainder, and drawn bits."""


# Each case is compiled once, some ten seconds the first one; sizes are dynamic.
@pytest.mark.representative(0)
@pytest.mark.usefixtures("vectors_that_are_trusted")
@pytest.mark.skipif(not compiles_for_torch(), reason="Inductor finds no C++ compiler")
@pytest.mark.parametrize(("name", "stored", "options"), BY_INDUCTOR)
def test_inductor_gives_the_bits_of_eager(
    name: str, stored: tuple[torch.dtype, torch.dtype], options: dict[str, Any]
) -> None:
    sizes = (1003, 2**15 + 3)
    a, b = (ran(name, engine, stored, options, sizes) for engine in ("inductor", "eager"))
    assert unlike(a, b) == []


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
    monkeypatch.setattr(kernels, "why_not", lambda: "no compiler")
    assert engines.fastest(torch.device("cpu"), "adamw") == "eager"
    assert engines.fastest(torch.device("cuda"), "adamw") == "inductor"


@pytest.fixture
def no_update(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A place where update.c cannot be compiled, though round.c could; what was tried."""
    tried: list[str] = []

    def load(source: str, defines: Any) -> Any:
        tried.append(source)
        raise kernels.NoCompilerError(f"cannot compile {source}")

    monkeypatch.setattr(kernels, "why_not", lambda: None)
    monkeypatch.setattr(kernels, "load", load)
    monkeypatch.setattr(prebuilt, "library", lambda: "hidden")
    for cached in (engines._compiles, engines._library):
        cached.cache_clear()
    yield tried
    for cached in (engines._compiles, engines._library):
        cached.cache_clear()


@pytest.mark.compiled
def test_a_step_whose_kernel_cannot_be_compiled_is_taken_by_pytorch(no_update: list[str]) -> None:
    options: dict[str, Any] = {"momentum_dtype": BRAIN}
    with pytest.warns(RuntimeWarning, match=r"cannot compile update\.c; PyTorch does its work"):
        found = ran("adamw", None, (BRAIN, BRAIN), options, (17, 1003))
    assert no_update == ["update.c"]
    assert unlike(found, ran("adamw", "eager", (BRAIN, BRAIN), options, (17, 1003))) == []


@pytest.mark.compiled
@pytest.mark.usefixtures("no_update")
def test_an_engine_that_was_named_is_not_replaced() -> None:
    with pytest.raises(kernels.NoCompilerError, match=r"cannot compile update\.c"):
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
