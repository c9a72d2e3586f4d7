"""What `mprun doctor check` found on a device, as JSON and on the terminal. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.console.formatting import listed, significant

Problem = Literal["nan", "wrong"]


class KernelFault(NamedTuple):
    """A kernel with a result that its dtype does not explain."""

    layer: str
    """The layer, or the module of the recipe, in which it ran."""
    phase: str
    """forward or backward."""
    op: str
    """ATen's name, without the overload."""
    dtype: str
    problem: Problem
    """nan: not a finite number where the exact result is one."""
    error: float | None
    """The rms of the error over that of the exact result; None of NaN."""
    usual: float
    """The error of the same op computed in float32 on the CPU and rounded once."""


class MissingKernel(NamedTuple):
    """A layer that PyTorch cannot run in a dtype on the device."""

    layer: str
    dtype: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """The check of a device."""

    device: str
    hardware: str
    torch: str
    dtypes: list[str]
    layers: list[str]
    ops: int
    """Ops that were compared with float64."""
    faults: list[KernelFault]
    missing: list[MissingKernel]

    @property
    def answer(self) -> str:
        """The result in a sentence."""
        where = f"on {self.hardware} with PyTorch {self.torch}"
        what = f"{self.ops:,} ops of {len(self.layers)} layers in {', '.join(self.dtypes)}"
        if not self.ops:
            return f"NOTHING CHECKED {where}: no op could be computed again on the CPU"
        if not self.faults:
            return f"no fault {where}: {what} agree with float64 on the CPU"
        named = list(dict.fromkeys(f"{x.op} in {x.dtype}" for x in self.faults))
        return (
            f"WRONG RESULTS {where}: {listed(named, 5)} (of {what}, compared with float64 on the "
            "CPU); train in another precision, or with another version of PyTorch"
        )


def check_parts(check: KernelCheck) -> Iterator[FittedTable | str]:
    """The parts in the order they are shown; the answer comes first."""
    yield check.answer
    if check.faults:
        yield FittedTable(
            "results that the dtype does not explain",
            *(text_column(name, cell=attrgetter(name)) for name in KernelFault._fields[:5]),
            figure_column("error", cell=lambda fault: significant(fault.error, 2)),
            figure_column("usual error", cell=lambda fault: significant(fault.usual, 2)),
            rows=check.faults,
            elsewhere="the output of doctor.json=true",
        )
    for missing in check.missing:
        yield f"{missing.layer} in {missing.dtype} is not there: {missing.reason}"
