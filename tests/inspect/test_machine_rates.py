"""Rates within a budget: what is measured at which size, and how it is summed up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import quantile_test
from torch.utils.flop_counter import FlopCounterMode

from mprun.inspect import machine_examination as measure
from mprun.inspect.machine_examination import (
    FEWEST,
    SIDES,
    WARMUP,
    formats_of,
    measure_rates,
    ratio,
)
from mprun.precision.rates import TimedOp, Timer, warm
from mprun.train.machine.doctor_result import FORMATS, Rate, Ratio
from tests.schema import conforms

CPU = torch.device("cpu")


# ---- what is measured ----------------------------------------------------------------------------


def test_a_cpu_is_measured_in_every_format_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.SIDES, "cpu", (8, 16))
    rates = measure_rates(CPU, 1.0)
    assert all(conforms(rate, Rate) for rate in rates)
    sizes = [(rate.format, rate.size) for rate in rates]
    assert len({*sizes}) == len(rates)  # each once
    small = [name for name, size in sizes if size == "8x8x8"]
    assert small == ["float32", "bfloat16", "float16", "float64"]
    with FlopCounterMode(display=False) as counter:
        torch.zeros(8, 8) @ torch.zeros(8, 8)
    assert {r.flops for r in rates if r.size == "8x8x8"} == {counter.get_total_flops()}


def test_tf32_is_a_format_of_its_hardware_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert formats_of(CPU) == ["float32", "bfloat16", "float16", "float64"]
    monkeypatch.setattr(measure, "has_tf32", lambda device: True)
    assert formats_of(torch.device("cuda")) == [*FORMATS]
    assert "float64" not in formats_of(torch.device("mps"))


def test_tf32_is_a_switch_on_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(measure, "timer", lambda op, *rest: seen.append(rest))
    for format_ in ("float32", "tf32", "bfloat16"):
        measure._timer(8, format_, CPU)  # type: ignore[arg-type]
    assert seen == [
        (torch.float32, CPU, False),
        (torch.float32, CPU, True),
        (torch.bfloat16, CPU, False),
    ]


# ---- the budget ----------------------------------------------------------------------------------


def slow_kernels(monkeypatch: pytest.MonkeyPatch, flops_per_s: dict[str, float]) -> list[float]:
    """Replace the clock: every op takes its operations over the format's rate. All it spent."""
    spent = [0.0]

    def timer(op: TimedOp, dtype: torch.dtype, *rest: Any) -> Timer:
        seconds = 2 * op.shapes[0][0] ** 3 / flops_per_s[str(dtype).removeprefix("torch.")]

        def call() -> None:
            spent[0] += seconds

        return warm(call, CPU)

    monkeypatch.setattr("mprun.precision.rates.time.perf_counter", lambda: spent[0])
    monkeypatch.setattr(measure, "timer", timer)
    return spent


def test_a_hundred_times_slower_format_is_measured_small_and_never_extrapolated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flops_per_s = {"float32": 1e11, "bfloat16": 4e11, "float16": 2e9, "float64": 5e10}
    spent = slow_kernels(monkeypatch, flops_per_s)
    rates = measure_rates(CPU, 5.0)
    sizes = {(r.format, r.size) for r in rates}
    assert sizes == {
        ("float32", "256x256x256"),
        ("bfloat16", "256x256x256"),
        ("float16", "256x256x256"),
        ("float32", "1024x1024x1024"),
        ("bfloat16", "1024x1024x1024"),
        ("float64", "256x256x256"),
        ("float64", "1024x1024x1024"),
    }
    for rate in rates:  # the clock is made up, and exact to its last bits
        expected = flops_per_s[rate.format] / 1e11
        assert rate.speedup.median == pytest.approx(expected, rel=1e-6)
        assert rate.gflops.median == pytest.approx(100 * expected, rel=1e-6)
        assert rate.time_ms.median == pytest.approx(rate.flops / (1e8 * expected), rel=1e-6)
        if rate.format == "float32":
            assert rate.speedup == Ratio(median=1, low=1, high=1, n=rate.gflops.n)
    assert spent[0] < 5.0


def test_a_slow_machine_is_measured_small_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the rate: the fewest rounds of the small sizes take longer than their share."""
    flops_per_s = {"float32": 2e9, "bfloat16": 2e8, "float16": 2e8, "float64": 1e9}
    spent = slow_kernels(monkeypatch, flops_per_s)
    rates = measure_rates(CPU, 5.0)
    assert {r.gflops.n for r in rates} == {FEWEST}
    assert {r.size for r in rates} == {"256x256x256"}
    calls = FEWEST + WARMUP
    small = sum(2 * SIDES["cpu"][0] ** 3 / f for f in flops_per_s.values())
    assert spent[0] == pytest.approx(small * calls, rel=1e-6)


# ---- summing up ----------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 1e6), min_size=FEWEST, max_size=80, unique=True))
def test_the_median_s_interval_is_scipy_s(values: list[float]) -> None:
    found = ratio(values)
    # SciPy's one-sided intervals at 97.5 %: the same order statistics, each side by itself.
    low = quantile_test(values, q=0, p=0.5, alternative="greater").confidence_interval(0.975).low
    high = quantile_test(values, q=0, p=0.5, alternative="less").confidence_interval(0.975).high
    assert (found.low, found.high, found.n) == (low, high, len(values))
