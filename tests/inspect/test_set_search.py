"""The smallest set, with made-up sensitivities."""

from __future__ import annotations

import math
from itertools import chain, combinations
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.inspect.op_search import smallest_set

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

    result = smallest_set(alone, harm)
    assert harm(result) <= 1
    for name in result:
        assert not harm(tuple(n for n in result if n != name)) <= 1
    assert smallest_set(alone, harm) == result
