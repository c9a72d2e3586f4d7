"""From work and rates to the least time, and from both to what holds the rest."""

from __future__ import annotations

import pytest
import torch

from mprun.doctor.roofline import MachineRates, format_name, fused_ms, roof_groups, what_holds
from mprun.numerics.op_cost import OpCost
from mprun.records.run_record import StepTimes
from mprun.results.doctor_result import Format, OpName, Rate, Ratio, Spread
from mprun.results.roofline_result import Bandwidth, GroupName, RoofGroup, Roofline

SLOW = [Bandwidth(bytes=1, gigabytes_per_second=1.0, by="copy")]  # a byte takes a nanosecond


def rate(op: OpName, format_: Format, gflops: float) -> Rate:
    one = Ratio(median=1.0, low=1.0, high=1.0, n=6)
    spread = Spread(median=gflops / 2, p10=gflops / 4, p90=gflops, n=6)
    return Rate(
        op=op, format=format_, size="s", flops=1, time_ms=spread, gflops=spread, speedup=one
    )


def cost(
    group: GroupName,
    flops: int = 0,
    nbytes: int = 0,
    dtype: torch.dtype | None = torch.float32,
    time_s: float = 0.0,
) -> OpCost:
    return OpCost("op", "forward", group, dtype if flops else None, flops, nbytes, time_s)


RATES = MachineRates.of(
    [
        rate("matmul", "float32", 10.0),
        rate("convolution", "float32", 20.0),
        rate("matmul", "bfloat16", 40.0),
        rate("matmul", "float16", 5.0),
    ],
    SLOW,
)


def test_the_best_op_of_a_format_is_its_rate_and_float32_can_stand_in() -> None:
    assert RATES.gflops == {"float32": 20.0, "bfloat16": 40.0, "float16": 20.0}


@pytest.mark.parametrize(
    ("op", "least_s"),
    [
        (cost("matmul", flops=2_000, nbytes=10), 2_000 / 20e9),  # held by FLOPs
        (cost("matmul", flops=2_000, nbytes=1_000), 1e-6),  # held by bytes
        (cost("matmul", flops=80_000, dtype=torch.bfloat16), 2e-6),
        (cost("cast", nbytes=5), 5e-9),
        (cost("memory-bound"), 0.0),
        (cost("matmul", flops=80, dtype=torch.float64), 80 / 40e9),  # not measured: the fastest
    ],
)
def test_the_least_time_of_an_op(op: OpCost, least_s: float) -> None:
    assert RATES.least_s(op, tf32=False) == pytest.approx(least_s, rel=1e-12)


def test_products_of_a_tf32_mode_have_its_rate() -> None:
    rates = MachineRates.of([rate("matmul", "float32", 10.0), rate("matmul", "tf32", 50.0)], SLOW)
    assert rates.least_s(cost("matmul", flops=500), tf32=True) == pytest.approx(1e-8)
    assert rates.least_s(cost("matmul", flops=500), tf32=False) == pytest.approx(5e-8)
    assert format_name(torch.bfloat16, tf32=True) == "bfloat16"


def test_groups_are_sums_in_a_fixed_order() -> None:
    ops = [cost("optimizer", nbytes=7), cost("cast", nbytes=2), cost("cast", nbytes=3)]
    ops += [cost("matmul", flops=20_000)]
    groups = roof_groups(ops, RATES, measured_ms={"cast": 4.0})
    assert [(g.name, g.ops, g.flops, g.bytes, g.measured_ms) for g in groups] == [
        ("matmul", 1, 20_000, 0, 0.0),
        ("cast", 2, 0, 5, 4.0),
        ("optimizer", 1, 0, 7, 0.0),
    ]
    assert [g.least_ms for g in groups] == pytest.approx([1e-3, 5e-6, 7e-6])
    assert fused_ms(groups) == pytest.approx(1e-3 + 7e-6)  # the casts cost nothing
    assert roof_groups(ops, RATES)[0].measured_ms is None


def roofline(
    step_ms: float | None = 10.0,
    cast_ms: float | None = 1.5,
    matmul_ms: float | None = 6.0,
    outside_ms: float | None = 2.5,
    faults_ms: float | None = None,
) -> Roofline:
    """Of 4 ms in products and 1 ms in casts."""

    def group(name: GroupName, least_ms: float, measured_ms: float | None) -> RoofGroup:
        return RoofGroup(
            name=name, ops=1, flops=0, bytes=0, least_ms=least_ms, measured_ms=measured_ms
        )

    return Roofline(
        recipe="r",
        precision="fp32",
        variant="fp32",
        execution="native",
        batch_size=8,
        gflops={"float32": 20.0},
        bandwidths=SLOW,
        groups=[group("matmul", 4.0, matmul_ms), group("cast", 1.0, cast_ms)],
        least_ms=5.0,
        fused_ms=4.0,
        why_real=None,
        step_time_ms=StepTimes(
            median=step_ms, p10=step_ms, p90=step_ms, n=0 if step_ms is None else 9, warmup=5
        ),
        share=None if step_ms is None else 5.0 / step_ms,
        outside_ms=outside_ms,
        page_faults=None if faults_ms is None else 100.0,
        page_faults_ms=faults_ms,
        notes=[],
    )


def test_what_holds_the_rest_is_named_the_largest_first() -> None:
    assert what_holds(roofline()) == (
        "the other 5 ms of a step are above the least time: 2.5 ms in work between ops (Python, "
        "autograd), 2 ms in matrix products, 0.5 ms in casts"
    )


def test_a_small_part_is_not_named() -> None:
    text = what_holds(roofline(cast_ms=1.4))
    assert text is not None
    assert "casts" not in text


@pytest.mark.parametrize(("faults_ms", "named"), [(None, False), (0.49, False), (0.5, True)])
def test_page_faults_are_named_where_they_matter(faults_ms: float | None, named: bool) -> None:
    text = what_holds(roofline(faults_ms=faults_ms))
    assert text is not None
    assert ("page faults take 0.5 ms of it" in text) == named


def test_without_times_of_ops_the_rest_is_a_figure_alone() -> None:
    roof = roofline(cast_ms=None, matmul_ms=None, outside_ms=None)
    assert what_holds(roof) == "the other 5 ms of a step are above the least time"


@pytest.mark.parametrize("step_ms", [None, 4.9])
def test_nothing_is_held_without_a_step_or_above_the_roof(step_ms: float | None) -> None:
    assert what_holds(roofline(step_ms=step_ms)) is None
