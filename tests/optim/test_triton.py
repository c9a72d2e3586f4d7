"""The Triton kernel under its interpreter against the eager engine: the same bits."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.optim import BRAIN, DTYPES, FLOAT, HALF, MAKE, RULES, STORED, moment_options, unlike
from tests.optim.test_engines import ran

CODES = torch.uint8
SIZES = (1, 17, 255, 1003, 4097)
"""Less than a group of codes, less than a chunk, more than one; one that is stored in codes."""


def assert_same(name: str, stored: Any, options: dict[str, Any], sizes: tuple[int, ...]) -> None:
    a, b = (ran(name, engine, stored, options, sizes) for engine in ("triton", "eager"))
    assert unlike(a, b) == [], (name, stored, options)


@pytest.mark.usefixtures("triton")
@pytest.mark.representative(0, 7)
@pytest.mark.parametrize("row", range(len(STORED)), ids=lambda n: "-".join(map(str, STORED[n])))
@pytest.mark.parametrize("name", MAKE)
def test_the_kernel_gives_the_bits_of_eager_for_every_storage_and_rule(name: str, row: int) -> None:
    """Moments in turn: each format of both meets every storage and rule of one formula."""
    moments = list(product((*DTYPES, CODES), (*DTYPES, CODES)))
    for number, rule in enumerate((*RULES, ("split", "infinity"))):
        options: dict[str, Any] = {"rounding": rule[0], "overflow": rule[1]}
        options |= moment_options(name, *moments[(5 * number + 3 * row) % len(moments)])
        assert_same(name, STORED[row], options, (1003, 4097))


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("name", "stored", "rule", "moments"),
    [
        ("adamw", (BRAIN, BRAIN), "stochastic", (BRAIN, HALF)),
        ("rmsprop_momentum", (HALF, FLOAT), "kahan", (CODES, CODES)),
        ("sgd", (FLOAT, FLOAT), "nearest", (FLOAT, FLOAT)),
    ],
)
def test_any_size(name: str, stored: Any, rule: str, moments: Any) -> None:
    assert_same(name, stored, {"rounding": rule, **moment_options(name, *moments)}, SIZES)
