"""What is recommended and judged, from gradients given as numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mprun.inspect.histograms import (
    LayerGradients,
    histogram,
    judge,
    largest_power,
    need,
    noise_of,
    recommend,
)


def gradients(**layers: list[float]) -> LayerGradients:
    tensors = {name: torch.tensor(values) for name, values in layers.items()}
    seen = {name: (h := histogram(x), noise_of(x, h)) for name, x in tensors.items()}
    largest = max(x.abs().max().item() for x in tensors.values())
    return LayerGradients(largest, "fc.weight", seen)


@given(st.floats(2.0**-80, 2.0**80), st.floats(1, 1000))
def test_the_largest_power_that_leaves_headroom(largest: float, headroom: float) -> None:
    advice = recommend(LayerGradients(largest, "", {}), headroom)
    assert advice is not None
    assert math.frexp(advice.scale)[0] == 0.5
    assert largest * headroom * advice.scale <= 65504 * (1 + 1e-15)
    assert largest * headroom * advice.scale * 2 > 65504 * (1 - 1e-15)


@pytest.mark.parametrize("largest", [0.0, math.inf, math.nan])
def test_nothing_is_recommended_without_a_gradient_to_go_by(largest: float) -> None:
    assert recommend(LayerGradients(largest, "", {})) is None


def test_scales_stay_such_that_the_loss_fits() -> None:
    assert largest_power(1e300) == 2.0**100
    assert largest_power(1e-300) == 2.0**-100
    assert largest_power(1023.9) == 512


def test_shares_at_a_scale_are_exact_at_powers_of_two() -> None:
    seen = gradients(a=[1.0, 2.0**-25, 1.5 * 2.0**-25, 2.0**-14, 0.99 * 2.0**-14])
    assert seen.becoming_zero(1.0) == 0.2  # 2^-25 is a tie, and goes to 0
    assert seen.becoming_zero(2.0) == 0.0
    assert seen.losing_bits(1.0) == 0.6
    assert seen.losing_bits(2.0**11) == 0.0
    assert gradients(a=[0.0]).becoming_zero(1.0) is None


SMALL = [x * 1e-8 for x in (1.0, -2.0, 3.0, 1.5)]
"""At a scale of 1 float16 keeps nothing of most of them."""


def test_too_low_fine_and_too_high() -> None:
    advice = recommend(gradients(a=SMALL, b=[1e-3, 2e-3]))
    assert advice is not None
    assert advice.scale == 2.0**23
    words = {k: judge(2.0**k, advice).word for k in range(31)}
    low = max(k for k, word in words.items() if word == "too low")
    high = min(k for k, word in words.items() if word == "too high")
    # 65520 / 2e-3 lies above 2^24; at 2^5 or so a's values become subnormals of a few units.
    assert high == 25
    assert 0 < low < 8
    assert all(word == "too low" for k, word in words.items() if k <= low)
    assert all(words[k] == "fine" for k in range(low + 1, high))
    assert judge(1.0, advice).reason.startswith("a keep ")
    assert judge(2.0**25, advice).reason == "the largest gradient, 0.002 (fc.weight), overflows"


def test_whether_one_is_needed_and_why() -> None:
    low = recommend(gradients(a=SMALL, b=[1e-3, 2e-3]))
    high = recommend(gradients(a=[1e6, 1.0]))
    fine = recommend(gradients(a=[1.0, 2.0**-25], b=[2.0, 2.0]))
    assert low is not None
    assert high is not None
    assert fine is not None
    assert need(low)[0]
    assert need(low)[1].startswith("one is needed: without a loss scale a keep ")
    assert need(high) == (
        True,
        "one is needed: without a loss scale the largest gradient, 1e+06 (fc.weight), overflows",
    )
    needed, text = need(fine)
    assert not needed
    assert text.startswith("none is needed: without a loss scale gradients keep ")


def test_more_is_asked_where_more_is_needed() -> None:
    advice = recommend(gradients(a=SMALL))
    assert advice is not None
    assert judge(2.0**8, advice, needed_db=20).word == "fine"
    assert judge(2.0**8, advice, needed_db=60).word == "too low"


def test_a_scale_is_not_too_low_where_no_scale_could_do_better() -> None:
    # The large gradients leave no room: the small ones are lost at the recommended scale as well.
    advice = recommend(gradients(a=[1e-9], b=[3e4]))
    assert advice is not None
    assert judge(advice.scale, advice).word == "fine"
    assert judge(1.0, advice).word == "fine"
