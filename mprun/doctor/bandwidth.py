"""How fast memory is, by the size of what is touched.

A working set that fits into a cache is read several times as fast as memory. An op finds tensors in
a cache where the op before it left them. So there is no one bandwidth: it is measured at sizes from
64 KiB on, each twice the one before. At each size a buffer is copied, read (a sum) and written
(filled), again and again, and the fastest of all rounds counts: the best case for that size.

A tensor that is larger than the last-level cache may still be found there in part: 28 MB of
gradients, just computed, are a quarter of what AdamW reads and writes. So bytes beyond a size have
the rate of that size, and the first bytes have the rates of smaller ones (`moving_s`). That is the
time with a cache that always holds what is needed next; no op is faster.
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


def moving_s(bandwidths: Sequence[Bandwidth], nbytes: int) -> float:
    """The least seconds in which an op reads and writes `nbytes` in total.

    Args:
        bandwidths: at least one, the smallest size first.
        nbytes: read and written.
    """
    ends = [*(b.bytes for b in bandwidths[1:]), nbytes]
    total_s, done = 0.0, 0
    for n, end in enumerate(ends):
        part = min(end, nbytes) - done
        if part > 0:
            best = max(b.gigabytes_per_second for b in bandwidths[n:])  # a small call has a price
            total_s += part / best / 1e9
            done += part
    return total_s


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
