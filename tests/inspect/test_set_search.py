"""The smallest set, and the least harm within a budget, with made-up sensitivities."""

from __future__ import annotations

import math
from itertools import chain, combinations
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.inspect.op_search import least_harm, smallest_set

NAMES = ("linear", "exp", "sum", "softmax", "relu", "log", "norm")


@pytest.mark.parametrize("names", [(), ("exp",), ("relu",), ("exp", "log"), NAMES])
def test_what_is_hostile_is_kept_and_nothing_else(names: tuple[str, ...]) -> None:
    """Each of these by itself makes the loss NaN; all others do next to nothing."""

    def harm(kept: tuple[str, ...]) -> float:
        return 0.01 if set(names) <= set(kept) else math.nan

    alone = {n: math.inf if n in names else 0.01 for n in NAMES}
    assert set(smallest_set(alone, harm)) == set(names)


def test_the_most_harmful_alone_is_added_first_and_of_equals_the_first_called() -> None:
    alone = {"a": 2.0, "b": math.inf, "c": math.inf, "d": 3.0}
    assert smallest_set(alone, lambda kept: 0.0 if len(kept) == 4 else 9.0) == ("b", "c", "d", "a")


def test_what_was_added_before_the_one_that_mattered_is_dropped_again() -> None:
    """`linear` and `sum` take what `exp` makes, and so look as bad; keeping `exp` is enough."""
    alone = {"linear": math.inf, "sum": math.inf, "exp": 5.0, "relu": 0.1}
    result = smallest_set(alone, lambda kept: 0.2 if "exp" in kept else math.inf)
    assert result == ("exp",)


def test_a_cheaper_name_that_is_enough_takes_the_place_of_a_dearer_one() -> None:
    """`mul` feeds `pow`: either in float32 mends the loss, `pow` with less in float32."""
    cost = {"mul": 0.8, "pow": 0.6, "relu": 0.1}
    result = smallest_set(
        {"mul": math.inf, "pow": math.inf, "relu": 0.1},
        lambda kept: 0.1 if {"mul", "pow"} & set(kept) else math.nan,
        lambda kept: sum(cost[n] for n in kept),
    )
    assert result == ("pow",)


def test_a_dearer_name_takes_no_place() -> None:
    result = smallest_set(
        {"a": math.inf, "b": math.inf},
        lambda kept: 0.1 if kept else math.nan,
        lambda kept: 1.0 if "b" in kept else 0.5,
    )
    assert result == ("a",)


def test_a_name_that_is_harmless_alone_takes_no_place() -> None:
    """`linear` before `exp` would mend it too; it is not to blame."""
    result = smallest_set(
        {"linear": 0.2, "exp": math.inf},
        lambda kept: 0.1 if kept else math.nan,
        lambda kept: 0.0 if "linear" in kept else 1.0,
    )
    assert result == ("exp",)


def test_where_nothing_is_enough_everything_is_kept() -> None:
    assert set(smallest_set({"a": 5.0, "b": 7.0}, lambda kept: 1.5)) == {"a", "b"}
    assert smallest_set({}, lambda kept: math.nan) == ()


powers = st.lists(st.floats(0.001, 4), min_size=1, max_size=6)


@given(powers)
def test_rounding_errors_that_add_up_are_reduced_with_the_fewest_names(noise: list[float]) -> None:
    """Errors of different ops are independent, so their squares add. Then the largest are the ones
    to take, and no set that is smaller is enough: held to every set there is."""
    alone = {f"op{n}": value for n, value in enumerate(noise)}

    def harm(kept: tuple[str, ...]) -> float:
        return math.sqrt(sum(v * v for name, v in alone.items() if name not in kept))

    result = smallest_set(alone, harm)
    subsets = chain.from_iterable(combinations(alone, k) for k in range(len(alone) + 1))
    fewest = next(len(kept) for kept in subsets if harm(kept) <= 1)
    assert harm(result) <= 1
    assert len(result) == fewest


@given(
    st.dictionaries(st.sampled_from(NAMES), st.floats(0) | st.just(math.inf)),
    st.integers(0, 2**32),
)
def test_whatever_the_harms_no_name_can_be_left_out(alone: dict[str, float], seed: int) -> None:
    """Any function of sets, monotone or not, with NaN in it: the search ends, and its outcome is
    minimal or says that it is not enough."""
    values = (0.5, 0.9, 1.5, math.inf, math.nan)

    def harm(kept: tuple[str, ...]) -> float:
        if len(kept) == len(alone):
            return 0.0
        return values[crc32(repr((seed, sorted(kept))).encode()) % len(values)]

    def cost(kept: tuple[str, ...]) -> float:
        return crc32(repr(sorted(kept)).encode())

    result = smallest_set(alone, harm, cost)
    assert harm(result) <= 1
    for name in result:
        assert not harm(tuple(n for n in result if n != name)) <= 1
    assert smallest_set(alone, harm, cost) == result


# ---- within a budget -----------------------------------------------------------------------------

LOWEST = 5.0
"""Effective bits with nothing high."""
LETTERS = "abcdefg"


@given(
    values=st.lists(
        st.tuples(st.floats(0.01, 10), st.floats(0.01, 3)), min_size=1, max_size=len(LETTERS)
    ),
    spare=st.floats(0, 12),
)
def test_where_powers_add_at_least_half_of_the_best_is_removed(
    values: list[tuple[float, float]], spare: float
) -> None:
    alone = {name: harm for name, (harm, _) in zip(LETTERS, values, strict=False)}
    cost = {name: bits for name, (_, bits) in zip(LETTERS, values, strict=False)}

    def bits(high: tuple[str, ...]) -> float:
        return LOWEST + sum(cost[name] for name in sorted(high))

    def removed(high: tuple[str, ...]) -> float:
        return sum(alone[name] ** 2 for name in sorted(high))

    def harm(high: tuple[str, ...]) -> float:
        return math.sqrt(max(0.0, removed(tuple(alone)) - removed(high)))

    budget = LOWEST + spare
    found = least_harm(alone, harm, bits, budget)
    assert bits(found) <= budget
    assert harm(found) <= harm(())
    sets = (s for n in range(len(alone) + 1) for s in combinations(alone, n))
    best = max(removed(s) for s in sets if bits(s) <= budget)
    assert removed(found) >= best / 2 * (1 - 1e-9)  # sums of float64
    if spare >= sum(cost.values()) + 1e-9:
        assert {*found} == {*alone}


def test_the_most_harm_per_bit_goes_first_and_what_does_not_fit_is_passed_over() -> None:
    alone = {"large": 4.0, "small": 3.0, "tiny": 1.0}
    cost = {"large": 4.0, "small": 1.0, "tiny": 1.0}  # 4, 9 and 1 a bit

    def bits(high: tuple[str, ...]) -> float:
        return LOWEST + sum(cost[name] for name in high)

    def harm(high: tuple[str, ...]) -> float:
        return sum(alone[name] for name in alone if name not in high)

    assert least_harm(alone, harm, bits, LOWEST) == ()
    assert least_harm(alone, harm, bits, LOWEST + 2) == ("small", "tiny")
    assert least_harm(alone, harm, bits, LOWEST + 5) == ("small", "large")


def test_a_single_name_beats_the_order_per_bit_where_it_removes_more() -> None:
    alone, cost = {"dense": 1.0, "large": 10.0}, {"dense": 0.005, "large": 1.0}

    def bits(high: tuple[str, ...]) -> float:
        return LOWEST + sum(cost[name] for name in high)

    def harm(high: tuple[str, ...]) -> float:
        return sum(alone[name] for name in alone if name not in high)

    assert least_harm(alone, harm, bits, LOWEST + 1) == ("large",)


def test_measured_harm_decides() -> None:
    """Keeping `a` does harm here, which its harm alone does not tell."""
    harms = {(): 1.0, ("a",): 5.0, ("a", "b"): 0.5, ("b",): 0.8}
    alone, harm = {"a": 3.0, "b": 1.0}, harms.__getitem__
    assert least_harm(alone, harm, len, 1) == ("b",)
    assert least_harm(alone, harm, len, 2) == ("a", "b")


def test_infinite_harm_goes_first() -> None:
    def harm(high: tuple[str, ...]) -> float:
        return 0.5 if "nan" in high else math.inf

    alone = {"good": 9.0, "nan": math.inf}
    assert least_harm(alone, harm, len, 1) == ("nan",)
