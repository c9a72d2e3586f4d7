"""Verdicts follow from measured numbers alone, by the rules stated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.train.machine.doctor_result import OPS, OpName, modes_table
from mprun.train.machine.machine_findings import LIMIT, conclusions, judge, largest
from tests.train.machine import H100, WITH_AMX, WITH_BF16, measured, modes, rate, rates, ratio

# ---- one op --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("median", "low", "high", "state"),
    [
        (2.0, 1.8, 2.2, "faster"),
        (1.2, 1.01, 1.4, "faster"),
        (1.05, 1.01, 1.09, "same"),
        (1.0, 0.95, 1.05, "same"),
        (1.0, 0.5, 2.0, "not known"),
        (1.2, 0.9, 1.5, "not known"),
        (0.7, 0.3, 1.1, "not known"),
        (0.95, 0.92, 0.98, "same"),
        (0.5, 0.4, 0.6, "slower"),
        (0.01, 0.009, 0.011, "slower"),
    ],
)
def test_an_op_is_judged_by_median_and_interval(
    median: float, low: float, high: float, state: str
) -> None:
    assert judge(rate("matmul", "bfloat16", ratio(median, low, high))) == state


@given(st.tuples(*[st.floats(1e-3, 1e3)] * 3).map(sorted))
def test_faster_and_slower_are_each_other_turned_round(values: list[float]) -> None:
    low, median, high = values
    there = judge(rate("matmul", "float16", ratio(median, low, high)))
    back = judge(rate("matmul", "float16", ratio(1 / median, 1 / high, 1 / low)))
    turned = {"faster": "slower", "slower": "faster"}
    # A reciprocal is rounded, which decides where a value is on a limit to its last bit.
    if all(abs(x / edge - 1) > 1e-9 for x in values for edge in (1 / LIMIT, 1.0, LIMIT)):
        assert back == turned.get(there, there)


def test_an_op_counts_at_the_largest_size_it_was_measured_at() -> None:
    small, large = (
        rates({"bfloat16": (0.5, 0.5, 0.5)}),
        rates({"bfloat16": (3.0, 3.0, 3.0)}, 10**12),
    )
    for both in (small + large, large + small):
        assert {r.speedup.median for r in largest(both, "bfloat16").values()} == {3.0}


# ---- a format ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speedups", "substituted", "verdict"),
    [
        ((5.0, 3.0, 2.5), (), "worth trying"),
        ((5.0, 3.0, 1.0), (), "depends on the model"),
        ((5.0, 0.5, 0.5), (), "depends on the model"),
        ((5.0, 3.0, 0.05), ("convolution_backward",), "depends on the model"),
        ((1.0, 1.0, 1.0), (), "no gain"),
        ((1.0, 1.0, 0.05), ("convolution_backward",), "no gain"),
        ((1.0, 0.5, 0.5), (), "not for speed"),
        ((0.03, 0.04, 0.3), (), "not for speed"),
        ((0.03, 0.04, 0.3), OPS, "not for speed"),
        ((9.0, 9.0, 9.0), OPS, "not for speed"),  # the fast kernels are not used
    ],
    ids=str,
)
def test_what_a_format_is_good_for(
    speedups: tuple[float, ...], substituted: tuple[OpName, ...], verdict: str
) -> None:
    found = measured(WITH_BF16, {"float16": speedups}, modes(substituted))
    (native,) = [c for c in conclusions(found) if c.modes == ["fp16_mixed"]]
    assert native.verdict == verdict


def test_products_of_8_bits_do_not_have_the_rates_of_bfloat16() -> None:
    of_8_bits = replace(modes()[2], name="fp8_rowwise", products_of_8_bits=True)
    found = measured(WITH_BF16, {"bfloat16": (14.0, 10.0, 4.0)}, [*modes(), of_8_bits])
    sixteen, eight = conclusions(found)[:2]
    assert sixteen.modes == ["bf16_mixed", "bf16_true"]
    assert (eight.modes, eight.verdict) == (["fp8_rowwise"], "not known")
    assert "mprun doctor recipe=" in eight.text
    table = modes_table(found.modes, found.rates)
    lines = [" ".join(x.split()) for x in str(table).splitlines()]
    assert "bf16_mixed native 14.0 10.0 4.00 none" in lines
    assert "fp8_rowwise native - 10.0 4.00 none" in lines


def test_an_op_too_unsteady_to_judge_leaves_the_format_open() -> None:
    found = measured(WITH_BF16, {"bfloat16": (4.0, 3.0, 2.0)})
    found.rates[-1].speedup = ratio(2.0, 0.4, 9.0)
    native = conclusions(found)[0]
    assert native.verdict == "not known"
    assert "convolution backward 2.0x [0.40x to 9.0x]" in native.text
    assert "measure again" in native.text


def test_conclusions_are_sentences_with_the_numbers() -> None:
    found = measured(
        WITH_BF16,
        {"bfloat16": (4.21, 1.64, 1.67), "float16": (0.026, 0.03, 0.08)},
        modes(OPS),
    )
    assert [c.text for c in conclusions(found)] == [
        "bfloat16 (bf16_mixed, bf16_true): matmul 4.2x, convolution 1.6x, convolution backward "
        "1.7x as fast as float32: worth trying",
        "float16 (fp16_mixed): matmul, convolution, convolution backward computed in float32 "
        "(speed=auto): for their effect on accuracy and memory, not for speed",
        "tf32: emulated here: for accuracy, not for speed",
        "half_sr_full: emulated here: for accuracy, not for speed",
    ]


def test_a_machine_with_amx() -> None:
    found = measured(
        WITH_AMX,
        {"bfloat16": (6.8, 3.0, 3.0), "float16": (1.0, 1.0, 0.05)},
        modes(("convolution_backward",)),
    )
    verdicts = {c.format: c.verdict for c in conclusions(found) if "half" not in c.text}
    assert verdicts == {"bfloat16": "worth trying", "float16": "no gain", "tf32": "not for speed"}
    text = next(c.text for c in conclusions(found) if c.modes == ["fp16_mixed"])
    assert (
        "matmul 1.0x, convolution 1.0x as fast as float32; convolution backward computed in" in text
    )


def test_an_h100() -> None:
    found = measured(
        H100,
        {"tf32": (7.0, 5.0, 5.0), "bfloat16": (13.0, 9.0, 9.0), "float16": (13.0, 9.0, 9.0)},
        modes(tf32=True),
    )
    assert [(c.format, c.verdict) for c in conclusions(found)] == [
        ("tf32", "worth trying"),
        ("bfloat16", "worth trying"),
        ("float16", "worth trying"),
        ("float16", "not for speed"),  # half_sr_full, emulated
    ]


def test_every_mode_but_float32_is_in_one_conclusion() -> None:
    found = measured(H100, {"tf32": (2, 2, 2), "bfloat16": (2, 2, 2), "float16": (2, 2, 2)})
    named = [name for c in conclusions(found) for name in c.modes]
    assert sorted(named) == sorted(m.name for m in modes() if m.name != "fp32")
