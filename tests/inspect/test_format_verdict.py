"""Range or precision, from signal-to-noise ratios and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from mprun.inspect.measurements import (
    FormatPasses,
    FormatVerdict,
    GradientErrors,
    gradient_errors,
    range_or_precision,
    typical_errors,
    variances_of_halves,
)


@pytest.mark.parametrize(
    ("fp16", "bf16", "word"),
    [
        (True, True, "either"),
        (False, True, "needs range: bf16"),
        (True, False, "needs precision: fp16"),
        (False, False, "needs fp32"),
    ],
)
def test_verdicts(fp16: bool, bf16: bool, word: str) -> None:
    assert range_or_precision(fp16, bf16) == word


def passes(loss: float = 1.0, **ratios: float) -> FormatPasses:
    measured = FormatPasses()
    measured.add(GradientErrors(ratios, ratios), loss, 1.0)
    return measured


@pytest.mark.parametrize(
    ("measured", "alone", "within_tolerance"),
    [
        (passes(a=1e-5), passes(a=1e-6), True),
        (passes(a=1e-5, b=0.02), passes(), False),  # 17 dB of one parameter
        (passes(a=0.5), passes(a=0.1), True),  # 7 dB worse than weights alone
        (passes(a=1.5), passes(a=0.1), False),  # 12 dB worse
        (passes(1.02, a=1e-5), passes(), False),
        (passes(1.02, a=1e-5), passes(1.01), True),
        (passes(math.nan, a=1e-5), passes(), False),
        (passes(a=math.inf), passes(), False),
        (passes(left_out=0.5), passes(), True),
        (passes(left_out=math.inf), passes(), False),  # a step with it is skipped
    ],
)
def test_a_format_will_do_by_the_criterion_of_search_ops(
    measured: FormatPasses, alone: FormatPasses, within_tolerance: bool
) -> None:
    verdict = FormatVerdict.of(measured, alone, ("left_out",))
    assert verdict.within_tolerance == within_tolerance
    by_rows = all(map(verdict.parameter_will_do, ("a", "b", "left_out")))
    assert (by_rows and verdict.loss_within_tolerance) == within_tolerance


def test_the_halves_of_a_batch_say_what_batches_differ_by() -> None:
    """The mean of the halves differs from that of other batches by half of what they differ."""
    halves = [{"a": torch.tensor([1.0, 5.0])}, {"a": torch.tensor([4.0, 1.0])}]
    assert variances_of_halves(halves) == {"a": 25 / 4}
    exact, low = {"a": torch.tensor([3.0, 4.0])}, {"a": torch.tensor([4.0, 7.0])}
    result = gradient_errors(exact, low, {"a": 4.0})
    assert result.ratios["a"] == pytest.approx(10 / 25)
    assert result.beyond["a"] == pytest.approx((10 - 2 * 4) / 25)


def test_every_parameter_counts_the_same() -> None:
    exact = {
        "large": torch.full((100,), 1e3),
        "small": torch.full((2,), 1e-9),
        "none": torch.zeros(2),
    }
    low = {"large": exact["large"] * 1.1, "small": exact["small"] * 0.7, "none": torch.ones(2)}
    result = gradient_errors(exact, low)
    assert set(result.ratios) == {"large", "small"}  # a gradient of 0 has no ratio
    # float32's 1.1 and 0.7 are good to 6e-8.
    assert result.mean == pytest.approx((0.01 + 0.09) / 2, rel=1e-5)
    assert result.db == pytest.approx(-10 * math.log10(0.05), abs=1e-4)
    assert result.db_of("small") == pytest.approx(-10 * math.log10(0.09), abs=1e-4)


def test_what_is_not_finite_is_all_noise() -> None:
    exact = {"a": torch.ones(2), "b": torch.ones(2)}
    for bad in (math.inf, math.nan):
        result = gradient_errors(exact, {"a": torch.tensor([1.0, bad]), "b": torch.ones(2)})
        assert result.ratios == {"a": math.inf, "b": 0.0}
        assert result.db == -math.inf


def test_the_median_over_steps_but_infinite_where_one_is() -> None:
    steps = [
        GradientErrors({"a": 0.1, "b": 0.2}),
        GradientErrors({"a": 0.3}),
        GradientErrors({"a": 1e6}),
    ]
    assert typical_errors(steps).ratios == {"a": 0.3, "b": 0.2}
    assert (
        typical_errors([GradientErrors({"a": 0.1}), GradientErrors({"a": math.inf})]).db
        == -math.inf
    )
