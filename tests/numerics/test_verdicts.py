"""Range or precision, from signal-to-noise ratios and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from mprun.numerics.verdicts import Errors, errors, range_or_precision, typical_errors


@pytest.mark.parametrize(
    ("fp16", "bf16", "word"),
    [
        (70.0, 52.0, "either"),
        (20.0, 20.0, "either"),
        (-math.inf, 52.0, "needs range: bf16"),
        (3.0, 52.0, "needs range: bf16"),
        (math.nan, 52.0, "needs range: bf16"),
        (40.0, 12.0, "needs precision: fp16"),
        (19.9, 19.9, "needs fp32"),
        (math.inf, math.inf, "either"),
    ],
)
def test_words(fp16: float, bf16: float, word: str) -> None:
    assert range_or_precision(fp16, bf16) == word


def test_another_threshold() -> None:
    assert range_or_precision(70.0, 52.0, needed_db=60.0) == "needs precision: fp16"


def test_every_parameter_counts_the_same() -> None:
    exact = {
        "large": torch.full((100,), 1e3),
        "small": torch.full((2,), 1e-9),
        "none": torch.zeros(2),
    }
    found = {"large": exact["large"] * 1.1, "small": exact["small"] * 0.7, "none": torch.ones(2)}
    result = errors(exact, found)
    assert set(result.ratios) == {"large", "small"}  # a gradient of 0 has no ratio
    # float32's 1.1 and 0.7 are good to 6e-8.
    assert result.mean == pytest.approx((0.01 + 0.09) / 2, rel=1e-5)
    assert result.db == pytest.approx(-10 * math.log10(0.05), abs=1e-4)
    assert result.db_of("small") == pytest.approx(-10 * math.log10(0.09), abs=1e-4)


def test_what_is_not_finite_is_all_noise() -> None:
    exact = {"a": torch.ones(2), "b": torch.ones(2)}
    for bad in (math.inf, math.nan):
        result = errors(exact, {"a": torch.tensor([1.0, bad]), "b": torch.ones(2)})
        assert result.ratios == {"a": math.inf, "b": 0.0}
        assert result.db == -math.inf


def test_equal_gradients_have_no_noise() -> None:
    assert errors({"a": torch.ones(2)}, {"a": torch.ones(2)}).db == math.inf
    assert Errors({}).db == math.inf


def test_the_median_over_steps_but_infinite_where_one_is() -> None:
    steps = [Errors({"a": 0.1, "b": 0.2}), Errors({"a": 0.3}), Errors({"a": 1e6})]
    assert typical_errors(steps).ratios == {"a": 0.3, "b": 0.2}
    assert typical_errors([Errors({"a": 0.1}), Errors({"a": math.inf})]).db == -math.inf
