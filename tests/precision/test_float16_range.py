"""What float16 does to weights: counted by thresholds, proved by numpy's conversion."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mprun.precision.formats import Float16Range, float16_range
from tests.each import each


def by_conversion(values: torch.Tensor) -> Float16Range:
    """The counts from what numpy's float16 really makes of each value."""
    before = values.float().numpy().ravel()
    with np.errstate(over="ignore"):
        after = np.abs(before.astype(np.float16)).astype(np.float64)
    return Float16Range(
        total=before.size,
        overflow=int(np.isinf(after).sum()),
        zero=int(((after == 0) & (before != 0)).sum()),
        subnormal=int(((after > 0) & (after < 2.0**-14)).sum()),
    )


def around(value: float) -> torch.Tensor:
    """The float32 below `value`, itself, and the one above, with both signs."""
    middle = torch.tensor(value)
    ends = (torch.tensor(0.0), torch.tensor(torch.inf))
    near = [torch.nextafter(middle, ends[0]), middle, torch.nextafter(middle, ends[1])]
    return torch.stack([*near, *(-x for x in near)])


@each(
    ("border", "counts"),
    [
        (65504.0, (0, 0, 0)),  # the largest float16
        (65520.0, (4, 0, 0)),  # the tie goes to infinity
        (2.0**-14, (0, 0, 0)),  # the float32 below it rounds up to it
        (2.0**-14 - 2.0**-25, (0, 0, 2)),  # the tie goes to 2^-14, the even one
        (2.0**-24, (0, 0, 6)),  # the smallest subnormal
        (2.0**-25, (0, 4, 2)),  # the tie goes to zero
    ],
)
def test_the_borders_to_the_last_bit(border: float, counts: tuple[int, int, int]) -> None:
    values = around(border)
    assert float16_range([values]) == by_conversion(values) == Float16Range(6, *counts)


def test_planted_weights_are_counted_over_all_tensors() -> None:
    weights = torch.full((10, 10), 0.5)
    weights[0, :3] = torch.tensor([7e4, -1e38, torch.inf])
    weights[1, :2] = torch.tensor([1e-9, -1e-40])
    weights[2, :5] = torch.tensor([1e-5, -1e-5, 2.0**-20, 1e-6, 6e-5])
    weights[3, :4] = torch.tensor([0.0, -0.0, 65504.0, 2.0**-14])
    bias = torch.tensor([1e5, 0.25], dtype=torch.bfloat16)
    assert float16_range([weights]) == by_conversion(weights) == Float16Range(100, 3, 2, 5)
    assert float16_range([weights, bias]) == Float16Range(102, 4, 2, 5)
    assert float16_range([]) == Float16Range(0, 0, 0, 0)


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=50))
def test_any_values(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    assert float16_range([tensor]) == by_conversion(tensor)
