"""The C library's heap: what it costs to return memory to the system, and how to stop that.

A training step allocates and frees the same large blocks each time. glibc returns a large free
block to the system (it unmaps it, or trims the top of its heap). The next step gets fresh pages,
and the system clears each page when it is first touched: a page fault. This is no arithmetic, and
it differs between modes, because float32's blocks are larger than bfloat16's. So it changes the
answer to "which mode is faster".

`steady_heap` makes glibc keep its memory. The process then keeps its largest size until it ends. An
allocator that was loaded in glibc's place (jemalloc, tcmalloc, mimalloc) has its own rules and is
left alone.

Source: mallopt(3), M_MMAP_MAX and M_TRIM_THRESHOLD.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

OTHERS = ("jemalloc", "tcmalloc", "mimalloc")  # Allocators that may be loaded in glibc's place

# glibc as it is, glibc that keeps its memory, and a C library that is not glibc
GLIBC, STEADY, SYSTEM = "glibc", "glibc-steady", "system"

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from glibc's malloc.h
NEVER = -1  # the largest size_t, as an int
# From this threshold on, an environment that also maps no blocks counts as steady
TRIM_BYTES = 1 << 30

BLOCKS, BLOCK_BYTES = (
    5,
    4 * 2**20,
)  # 1,024 faults of 4 KiB: their time is far above the clock's step

_kept = False


def allocator() -> str:
    """The allocator of this process: `glibc`, `glibc-steady`, `system` or one of `OTHERS`."""
    name = _library()
    if name == GLIBC and (_kept or is_steady(os.environ)):
        return STEADY
    return name


def steady_heap() -> str:
    """Make glibc keep its memory, for the rest of the process; `allocator()`, afterwards."""
    global _kept
    if allocator() == GLIBC:
        libc = ctypes.CDLL(None)
        # no block is mapped apart, and the heap is never trimmed; mallopt returns 0 where it fails
        both = libc.mallopt(M_MMAP_MAX, 0), libc.mallopt(M_TRIM_THRESHOLD, NEVER)
        _kept = all(both)
    return allocator()


def is_steady(variables: Mapping[str, str]) -> bool:
    """Whether environment variables set what `steady_heap` sets."""
    tunables = dict(
        item.split("=", 1) for item in variables.get("GLIBC_TUNABLES", "").split(":") if "=" in item
    )
    mapped = tunables.get("glibc.malloc.mmap_max", variables.get("MALLOC_MMAP_MAX_"))
    trimmed = tunables.get("glibc.malloc.trim_threshold", variables.get("MALLOC_TRIM_THRESHOLD_"))
    try:
        # base 0: a tunable may be written as 0x40000000
        return int(mapped or "1", 0) == 0 and int(trimmed or "0", 0) >= TRIM_BYTES
    except ValueError:
        return False


@cache
def _library() -> str:
    """The library that allocates memory in this process."""
    try:
        libc = ctypes.CDLL(None)
        # PyTorch allocates by posix_memalign. The address of malloc can lie in the program itself,
        # where that is not position-independent, as Debian's Python is not.
        address = ctypes.cast(libc.posix_memalign, ctypes.c_void_p).value or 0
        file = _file_at(address, Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no global library
        return SYSTEM
    for name in OTHERS:
        if name in file:
            return name
    ours = file.startswith(("libc.", "libc-"))  # libc.so.6, before glibc 2.34 libc-2.31.so
    return GLIBC if ours and hasattr(libc, "gnu_get_libc_version") else SYSTEM


def _file_at(address: int, lines: Iterable[str]) -> str:
    """The name of the file that is mapped at an address; "" if none is."""
    for line in lines:
        fields = line.split(maxsplit=5)
        low, high = (int(text, 16) for text in fields[0].split("-"))
        if low <= address < high:
            return Path(fields[5]).name if len(fields) > 5 else ""
    return ""


def page_faults() -> int | None:
    """Page faults of this process so far that read no disk; None where they are not counted."""
    return None if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@cache
def page_fault_us() -> float | None:
    """Microseconds of a page fault: pages touched first, less the same pages touched again.

    The median of a few blocks. None where faults are not counted or pages come without one.
    """
    prices = [price for _ in range(BLOCKS) if (price := _price_us()) is not None]
    return statistics.median(prices) if prices else None


def _price_us() -> float | None:
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        before = page_faults()
        first_s = _touch(block)
        after = page_faults()
        again_s = min(_touch(block) for _ in range(3))  # what the loop itself takes
    if before is None or after is None or after <= before:
        return None
    return max(0.0, (first_s - again_s) / (after - before) * 1e6)  # in microseconds


def _touch(block: mmap.mmap) -> float:
    """Seconds of this thread to write a byte of each page; other processes are not in them."""
    start = time.thread_time()
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    return time.thread_time() - start
