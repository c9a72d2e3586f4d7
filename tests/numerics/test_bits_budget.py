"""The least harm within a budget, against every possible set."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.numerics.set_search import least_harm

LOWEST = 5.0
"""Effective bits with nothing high."""
NAMES = "abcdefg"


@given(
    values=st.lists(
        st.tuples(st.floats(0.01, 10), st.floats(0.01, 3)), min_size=1, max_size=len(NAMES)
    ),
    spare=st.floats(0, 12),
)
def test_where_powers_add_at_least_half_of_the_best_is_removed(
    values: list[tuple[float, float]], spare: float
) -> None:
    alone = {name: harm for name, (harm, _) in zip(NAMES, values, strict=False)}
    cost = {name: bits for name, (_, bits) in zip(NAMES, values, strict=False)}

    def bits(high: tuple[str, ...]) -> float:
        return LOWEST + sum(cost[name] for name in sorted(high))

    def removed(high: tuple[str, ...]) -> float:
        return sum(alone[name] ** 2 for name in sorted(high))

    def harm(high: tuple[str, ...]) -> float:
        return math.sqrt(max(0.0, removed(tuple(alone)) - removed(high)))

    budget = LOWEST + spare
    found = least_harm(alone, harm, bits, budget)
    assert bits(found.names) <= budget
    assert found.harm == harm(found.names) <= harm(())
    sets = (s for n in range(len(alone) + 1) for s in itertools.combinations(alone, n))
    best = max(removed(s) for s in sets if bits(s) <= budget)
    assert removed(found.names) >= best / 2 * (1 - 1e-9)  # sums of float64
    if spare >= sum(cost.values()) + 1e-9:
        assert {*found.names} == {*alone}


def test_the_most_harm_per_bit_goes_first_and_what_does_not_fit_is_passed_over() -> None:
    alone = {"large": 4.0, "small": 3.0, "tiny": 1.0}
    cost = {"large": 4.0, "small": 1.0, "tiny": 1.0}  # 4, 9 and 1 a bit

    def bits(high: tuple[str, ...]) -> float:
        return LOWEST + sum(cost[name] for name in high)

    def harm(high: tuple[str, ...]) -> float:
        return sum(alone[name] for name in alone if name not in high)

    assert least_harm(alone, harm, bits, LOWEST).names == ()
    assert least_harm(alone, harm, bits, LOWEST + 2).names == ("small", "tiny")
    found = least_harm(alone, harm, bits, LOWEST + 5)
    assert found.names == ("small", "large")
    assert [(step.action, step.name) for step in found.steps] == [
        ("add", "small"),
        ("add", "large"),
    ]


def test_a_single_name_beats_the_order_per_bit_where_it_removes_more() -> None:
    alone, cost = {"dense": 1.0, "large": 10.0}, {"dense": 0.005, "large": 1.0}

    def bits(high: tuple[str, ...]) -> float:
        return LOWEST + sum(cost[name] for name in high)

    def harm(high: tuple[str, ...]) -> float:
        return sum(alone[name] for name in alone if name not in high)

    assert least_harm(alone, harm, bits, LOWEST + 1).names == ("large",)


def test_measured_harm_decides() -> None:
    """Keeping `a` does harm here, which its harm alone does not tell."""
    harms = {(): 1.0, ("a",): 5.0, ("a", "b"): 0.5, ("b",): 0.8}
    found = least_harm({"a": 3.0, "b": 1.0}, lambda high: harms[high], lambda high: len(high), 1)
    assert (found.names, found.harm) == (("b",), 0.8)
    assert least_harm({"a": 3.0, "b": 1.0}, lambda h: harms[h], lambda h: len(h), 2).harm == 0.5


def test_infinite_harm_goes_first() -> None:
    def harm(high: tuple[str, ...]) -> float:
        return 0.5 if "nan" in high else math.inf

    alone = {"good": 9.0, "nan": math.inf}
    assert least_harm(alone, harm, lambda high: len(high), 1).names == ("nan",)


def test_a_budget_below_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="4 effective bits is below 5"):
        least_harm({"a": 1.0}, lambda high: 0.0, lambda high: LOWEST + len(high), 4)
