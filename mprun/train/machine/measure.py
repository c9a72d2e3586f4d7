"""The rates of this machine, within a budget of time.

Every op is timed in every format at a small size, which fits the budget even if a kernel is a
hundred times slower than the others. Then it is timed at a large size, which shows the rate of fast
kernels. A case is left out if it would exceed the budget at the large size: no rate is
extrapolated. Each round includes float32, and a speed-up is float32's time over another format's,
round by round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import numpy as np
import torch
from scipy.stats import binom

from mprun.precision import has_tf32
from mprun.precision.policy import torch_dtype
from mprun.precision.rates import (
    TimedOp,
    Timer,
    alternate,
    convolution,
    convolution_backward,
    matmul,
    timer,
    warm,
)
from mprun.records.console import ReportPart, report_nothing
from mprun.train.machine.doctor_result import FORMATS, Copy, Format, OpName, Rate, Ratio, Spread
from mprun.train.machine.machine import has_amx
from mprun.train.machine.speed_choices import choose

# Rounds: as many as fit the budget, between these; 6 are the fewest with a 95 % interval
FEWEST, MOST = 6, 25
WARMUP = 2  # Calls made before an op is timed in rounds
SMALL, LARGE = 0.3, 0.6  # Shares of the budget; copying takes the rest
COPIES = 7  # an odd number has a middle one
OPTIMIZER = "sgd"  # Any will do: memory formats do not depend on it


class Sizes(NamedTuple):
    """The sizes of the ops measured together."""

    side: int
    images: tuple[int, int, int]  # [batch, channels, height and width] of a convolution's input

    def ops(self) -> tuple[TimedOp, ...]:
        """The ops at these sizes, in the order of `doctor_result.OPS`."""
        return (
            matmul(self.side),
            convolution(*self.images),
            convolution_backward(*self.images),
        )


SIZES = {
    "cpu": (Sizes(256, (4, 32, 28)), Sizes(1024, (16, 64, 28))),
    "cuda": (Sizes(2048, (32, 64, 56)), Sizes(4096, (32, 256, 56))),
}
COPY_BYTES = {"cpu": 2**27, "cuda": 2**29}  # 128 and 512 MiB, larger than most caches


class Case(NamedTuple):
    """One op in one format."""

    op: TimedOp
    format: Format


def formats_of(device: torch.device) -> tuple[Format, ...]:
    """The formats that the device computes in without emulation."""
    return tuple(f for f in FORMATS if f != "tf32" or has_tf32(device))


def measure_rates(
    device: torch.device, budget_s: float, report: ReportPart = report_nothing
) -> tuple[list[Rate], Copy]:
    """Time every op in every format, and copying.

    Args:
        device: where.
        budget_s: about how long that may take; the fewest rounds are made even if they take longer.
        report: is called before each round.

    Raises:
        torch.OutOfMemoryError: the tensors do not fit.
    """
    small, large = SIZES.get(device.type, SIZES["cuda"])
    formats = formats_of(device)
    cases = [Case(op, f) for op in small.ops() for f in formats]
    rates = _measure(cases, device, budget_s * SMALL, report)
    # seconds of one operation at the small size, by which the time at the large one is estimated
    flop_s: dict[tuple[str, str], float] = {
        (r.op, r.format): r.time_ms.median / 1e3 / r.flops for r in rates
    }
    expected_s = {Case(op, f): flop_s[op.name, f] * op.flops for op in large.ops() for f in formats}
    fitting = which_fit(expected_s, budget_s * LARGE)
    rates += _measure(fitting, device, budget_s * LARGE, report)
    report("copying")
    return rates, measure_copy(device, COPY_BYTES.get(device.type, COPY_BYTES["cuda"]))


def which_fit(expected_s: Mapping[Case, float], share_s: float) -> list[Case]:
    """The cases to measure: the slowest are left out until twice the fewest rounds fit the time.

    An op is left out in all formats if float32 does not fit: the speed-up needs it.

    Args:
        expected_s: about how long a call of each case takes.
        share_s: the time for all of them.
    """
    quickest = sorted(expected_s, key=lambda case: expected_s[case])
    total_s = accumulate(expected_s[case] for case in quickest)
    each_s = share_s / (2 * FEWEST + WARMUP)  # twice: the estimate may be off by a factor
    fit = {case for case, s in zip(quickest, total_s, strict=True) if s <= each_s}
    based = {case.op.name for case in fit if case.format == "float32"}
    return [case for case in expected_s if case in fit and case.op.name in based]


def _measure(
    cases: Sequence[Case], device: torch.device, share_s: float, report: ReportPart
) -> list[Rate]:
    """The rates of the cases, each op's float32 among them, timed in turn."""
    timers = [_timer(case, device) for case in cases]
    rounds, sizes = _rounds(timers, share_s), ", ".join({case.op.size: None for case in cases})

    def begin_round(done: int) -> None:
        report(f"rates at {sizes}: round", done, rounds)

    times = dict(zip(cases, alternate(timers, rounds, begin_round), strict=True))
    return [_rate(case, times[case], times[Case(case.op, "float32")]) for case in cases]


def _timer(case: Case, device: torch.device) -> Timer:
    tf32 = case.format == "tf32"
    dtype = "float32" if tf32 else case.format  # TF32 is a switch on float32 tensors
    # as in a run: float32 convolutions on CPUs are faster channels-last, and a gain over the slower
    # layout would be no real gain
    layout = choose("auto", device.type, dtype, OPTIMIZER, has_amx()).torch_memory_format
    return timer(case.op, torch_dtype(dtype), device, tf32, layout)


def _rounds(timers: Sequence[Timer], share_s: float) -> int:
    round_s = sum(t.round_s for t in timers)
    return max(FEWEST, min(MOST, int(share_s / round_s))) if timers else 0


def _rate(case: Case, times_s: Sequence[float], float32_s: Sequence[float]) -> Rate:
    op = case.op
    return Rate(
        op=cast(OpName, op.name),
        format=case.format,
        size=op.size,
        flops=op.flops,
        time_ms=spread([t * 1e3 for t in times_s]),
        gflops=spread([op.flops / t / 1e9 for t in times_s]),
        speedup=ratio([base / t for base, t in zip(float32_s, times_s, strict=True)]),
    )


def measure_copy(device: torch.device, size: int) -> Copy:
    """The rate of copying a buffer of `size` bytes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (times,) = alternate([warm(lambda: target.copy_(source), device)], COPIES)
    return Copy(bytes=size, gigabytes_per_second=spread([2 * size / t / 1e9 for t in times]))


def spread(values: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile of at least one value."""
    p10, median, p90 = (float(x) for x in np.percentile(values, [10, 50, 90]))
    return Spread(median=median, p10=p10, p90=p90, n=len(values))


def ratio(values: Sequence[float]) -> Ratio:
    """The median and its 95 % interval.

    The interval is from the k-th smallest value to the k-th largest, k as large as leaves 2.5 % or
    less outside on either side (Hahn and Meeker, "Statistical Intervals").
    """
    ordered, n = sorted(values), len(values)
    # Whatever the distribution, the number of values below its median is binomial with p = 1/2.
    # Fewer than six values reach no 95 %: k is 1, and their interval is all of them.
    k = max(1, int(binom.ppf(0.025, n, 0.5)))
    return Ratio(median=float(np.median(ordered)), low=ordered[k - 1], high=ordered[n - k], n=n)
