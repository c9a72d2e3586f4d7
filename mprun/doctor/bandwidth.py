"""How fast memory is, by the size of what is touched.

A working set that fits into a cache is read ten times as fast as memory. An op on small tensors
finds its inputs in a cache, where the op before it left them. So there is no one bandwidth: it is
measured at sizes from 64 KiB on, each four times the one before.

At each size a buffer is copied, read (a sum) and written (filled), again and again, and the fastest
of all rounds counts. So the rate is the best case for a working set of that size: an op on tensors
of that size or larger ones is hardly faster. It can be: a tensor a little larger than the
last-level cache is found there in part. `rate_at` gives an op the rate of the largest size that is
not larger than its tensors, up to four times smaller, which covers that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from mprun.console import ReportPart, report_nothing
from mprun.precision.rates import alternate, warm
from mprun.records.roofline_record import Bandwidth, Traffic

SIZES = {
    "cpu": tuple(2**n for n in range(16, 30, 2)),
    "cuda": tuple(2**n for n in range(20, 32, 2)),
}
"""Bytes of working sets, by type of device."""
ROUNDS = 5


def measure_bandwidths(
    device: torch.device, sizes: Sequence[int], report: ReportPart = report_nothing
) -> list[Bandwidth]:
    """The fastest traffic at each size, the smallest first.

    Args:
        device: where.
        sizes: bytes of working sets.
        report: is called before each size.

    Raises:
        torch.OutOfMemoryError: the tensors do not fit.
    """
    rows = []
    for done, size in enumerate(sorted(sizes)):
        report("bandwidth by size", done, len(sizes))
        rows.append(_fastest(device, size))
    return rows


def rate_at(bandwidths: Sequence[Bandwidth], nbytes: int) -> float:
    """Bytes per second that an op on `nbytes` in total hardly exceeds.

    Args:
        bandwidths: at least one, the smallest size first.
        nbytes: read and written.
    """
    fitting = [b for b in bandwidths if b.bytes <= nbytes]
    smallest = fitting[-1].bytes if fitting else 0
    return max(b.gigabytes_per_second for b in bandwidths if b.bytes >= smallest) * 1e9


def _fastest(device: torch.device, size: int) -> Bandwidth:
    best: tuple[float, Traffic] = (0.0, "copy")
    for name, call in _calls(device, size):
        (times,) = alternate([warm(call, device)], ROUNDS)
        best = max(best, (size / min(times) / 1e9, name))
    return Bandwidth(bytes=size, gigabytes_per_second=best[0], by=best[1])


def _calls(device: torch.device, size: int) -> Iterator[tuple[Traffic, Callable[[], object]]]:
    """Calls that move `size` bytes each."""
    buffer = torch.ones(size // 4, device=device)
    source, target = buffer.chunk(2)
    yield "copy", lambda: target.copy_(source)
    yield "read", lambda: buffer.sum()
    yield "write", lambda: buffer.fill_(1.0)
