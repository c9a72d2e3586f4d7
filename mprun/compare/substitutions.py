"""What a native run did not compute in its own dtype, in a few words for tables.

A CPU without a fast float16 kernel for an op computes it in float32 and rounds the result
(`substitutions` in the record). The step time is then what this machine takes in that mode, so its
ratio is shown; but it is no time of float16 arithmetic, so no gain is claimed from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from mprun.compare.load import readable
from mprun.records.run_record import Substitution, Summary

FAMILIES = {
    "matmuls": ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear"),
    "convolutions": ("convolution", "_convolution", "conv1d", "conv2d", "conv3d"),
    "conv gradients": ("convolution_backward",),
}
"""Short names of ATen ops that are named together."""
LONGEST_NAME = 20


def label(summaries: Iterable[Summary]) -> str:
    """`matmuls in fp32`, `matmuls, convolutions in fp32`; nothing of runs in their own dtype.

    An emulated run has nothing here either: it is labelled as emulated.
    """
    rows = [x for s in summaries if s.execution == "native" for x in s.substitutions]
    families = {_family(row) for row in rows}
    if "convolutions" in families:  # which says it of their gradients as well
        families.discard("conv gradients")
    ordered = [*(name for name in FAMILIES if name in families), *sorted(families - {*FAMILIES})]
    return f"{', '.join(ordered)} in fp32" if ordered else ""


def _family(row: Substitution) -> str:
    op = row.op.removeprefix("aten.").partition(".")[0]
    found = next((name for name, ops in FAMILIES.items() if op in ops), None)
    return found or readable(op, LONGEST_NAME)
