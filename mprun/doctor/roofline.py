"""The least time of a step on a machine, from the work of its ops and the machine's rates.

    op                  max(FLOPs / rate of its number format, bytes / bandwidth)
    step, op by op      the sum over ops: each is a kernel that reads and writes its tensors
    step, fused         the sum over products and the optimizer: casts and memory-bound ops are
                        parts of these kernels, and move nothing of their own

The first is the aim for the kernels as they are: a step above it has slow kernels, or time between
them. The second is the aim for a compiler: no kernel that keeps the products apart beats it.

Both must be bounds, so each rate is the best one that was measured. A product is held against the
90th percentile of the fastest of matmul, convolution and its backward pass in its format, or of
float32's, which can stand in for any format. Bytes are held against the bandwidths of caches and
memory (`mprun.doctor.measure`), as if each byte that fits into a cache were there.

What the bounds leave out: ops run one after the other, and algorithms that need fewer products than
the definition (Winograd's convolutions, which cuDNN has) can be faster. On a busy machine rates and
step are slowed at different times: the share says little, and above 1 nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mprun.doctor.measure import moving_s
from mprun.numerics.op_cost import OpCost
from mprun.results.doctor_result import Rate
from mprun.results.roofline_result import (
    BY_GROUP,
    GROUPS,
    Bandwidth,
    GroupName,
    RoofGroup,
    Roofline,
)

FUSED: tuple[GroupName, ...] = ("matmul", "convolution", "optimizer")
"""The groups that remain if everything else is fused into them."""

NAMES = {**BY_GROUP, "optimizer": "the optimizer"}
WORTH_NAMING = 0.1
"""A part of the rest is named from this share of it on."""


@dataclass(frozen=True)
class MachineRates:
    """What ops are held against."""

    gflops: dict[str, float]
    """Number format to 10^9 operations a second."""
    bandwidths: Sequence[Bandwidth]
    """At least one, the smallest size first."""

    @classmethod
    def of(cls, rates: Sequence[Rate], bandwidths: Sequence[Bandwidth]) -> MachineRates:
        """From doctor's measurements, float32's among them."""
        best: dict[str, float] = {}
        for rate in rates:
            best[rate.format] = max(best.get(rate.format, 0.0), rate.gflops.p90)
        return cls({name: max(rate, best["float32"]) for name, rate in best.items()}, bandwidths)

    def least_s(self, op: OpCost, tf32: bool) -> float:
        """Seconds of an op; `tf32`: float32 products are computed in that format."""
        name = format_name(op.dtype, tf32)
        rate = self.gflops.get(name, max(self.gflops.values())) * 1e9
        return max(op.flops / rate, moving_s(self.bandwidths, op.nbytes))


def format_name(dtype: torch.dtype | None, tf32: bool) -> str:
    """The number format that products of a dtype are computed in."""
    if dtype == torch.float32 and tf32:
        return "tf32"
    return str(dtype).removeprefix("torch.")


def roof_groups(
    ops: Sequence[OpCost],
    rates: MachineRates,
    tf32: bool = False,
    measured_ms: Mapping[GroupName, float] | None = None,
) -> list[RoofGroup]:
    """The groups that have an op, in the order of `GROUPS`.

    Args:
        ops: of one step.
        rates: the machine's.
        tf32: whether float32 products are computed in TensorFloat-32.
        measured_ms: group to milliseconds in a step; None where ops were not timed.
    """
    groups = []
    for name in GROUPS:
        own = [op for op in ops if op.group == name]
        if own:
            groups.append(
                RoofGroup(
                    name=name,
                    ops=len(own),
                    flops=sum(op.flops for op in own),
                    bytes=sum(op.nbytes for op in own),
                    least_ms=sum(rates.least_s(op, tf32) for op in own) * 1e3,
                    measured_ms=None if measured_ms is None else measured_ms.get(name, 0.0),
                )
            )
    return groups


def fused_ms(groups: Sequence[RoofGroup]) -> float:
    """The least time with casts and memory-bound ops fused into the products."""
    return sum(g.least_ms for g in groups if g.name in FUSED)


def group_ms(ops: Sequence[OpCost]) -> dict[GroupName, float]:
    """Group to the milliseconds that its ops took."""
    return {name: sum(op.time_s for op in ops if op.group == name) * 1e3 for name in GROUPS}


def what_holds(roof: Roofline) -> str | None:
    """A sentence on the time above the least; None if no step was timed or there is none."""
    step_ms = roof.step_time_ms.median
    if step_ms is None or step_ms <= roof.least_ms:
        return None
    rest_ms = step_ms - roof.least_ms
    parts = {
        NAMES[g.name]: g.measured_ms - g.least_ms for g in roof.groups if g.measured_ms is not None
    }
    if roof.outside_ms is not None:
        parts["work between ops (Python, autograd)"] = roof.outside_ms
    named = sorted(
        ((ms, n) for n, ms in parts.items() if ms >= WORTH_NAMING * rest_ms), reverse=True
    )
    text = f"the other {rest_ms:.3g} ms of a step are above the least time"
    if named:
        text += ": " + ", ".join(f"{ms:.3g} ms in {name}" for ms, name in named)
    faults = roof.page_faults_ms
    if faults is not None and faults >= WORTH_NAMING * rest_ms:
        text += f"; page faults take {faults:.3g} ms of it, wherever they occur"
    return text
