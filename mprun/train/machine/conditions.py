"""What else the machine did during a run: other processes, the clock, and the cost of fresh memory.

Step times change with all of them, so a difference between two runs may be theirs. Linux counts,
for each CPU, the time in which it computed, was idle, or was taken by the hypervisor (`/proc/stat`,
in ticks of 10 ms). What other processes took is the computing time of the CPUs that this process
may use, less its own.

A step frees and allocates the same large blocks each time. glibc returns a large block to the
system, which clears each fresh page when it is first touched: a page fault. That is no arithmetic,
and float32's blocks are larger than bfloat16's. `steady_heap` makes glibc keep its memory; another
allocator has its own rules and is left alone.

Sources: proc_stat(5); the kernel's cpufreq documentation; mallopt(3).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import statistics
import time
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

STAT, CPUINFO = Path("/proc/stat"), Path("/proc/cpuinfo")
CPUS = Path("/sys/devices/system/cpu")

SHORTEST_S = 1.0  # 100 ticks of 10 ms: a share of a shorter time would be coarser than a percent

# A system that accounts for a smaller share of the time (a sandbox) does not count it
COUNTED = 0.9


class CpuTimes(NamedTuple):
    """Seconds, summed over the CPUs that this process may use."""

    busy_s: float  # In processes, in user and kernel mode; without interrupts
    stolen_s: float
    total_s: float  # With idle time: the CPUs times the time since the system began to count


class OthersShare(NamedTuple):
    """Shares of the usable CPUs' time, from 0 to 1."""

    other_load: float
    steal: float


def cpu_times(text: str, cpus: Collection[int], tick_s: float) -> CpuTimes | None:
    """The times of `cpus` in the content of `/proc/stat`; None if one of them is missing.

    Args:
        text: a line `cpuN user nice system idle iowait irq softirq steal ...` for each CPU.
        cpus: the numbers of the CPUs.
        tick_s: the unit of the figures.
    """
    rows = {
        # up to steal; the guest times that follow are contained in user and nice
        int(number): [int(x) for x in figures.split()[:8]]
        for number, figures in re.findall(r"^cpu(\d+) ([\d ]+)$", text, re.MULTILINE)
    }
    ours = [rows.get(cpu, []) for cpu in cpus]
    if not ours or any(len(row) < 8 for row in ours):
        return None
    user, nice, system, *_, stolen = (tick_s * sum(column) for column in zip(*ours, strict=True))
    return CpuTimes(user + nice + system, stolen, tick_s * sum(map(sum, ours)))


def others_share(
    before: CpuTimes, after: CpuTimes, own_s: float, wall_s: float, cpus: int
) -> OthersShare | None:
    """What others took between two readings; None if it is too short or not counted.

    Args:
        before: the first reading.
        after: the second one.
        own_s: CPU time of this process between them.
        wall_s: the time between them.
        cpus: how many CPUs the readings are of.
    """
    total_s = after.total_s - before.total_s
    if wall_s < SHORTEST_S or total_s < COUNTED * wall_s * cpus:
        return None
    others_s = after.busy_s - before.busy_s - own_s
    stolen_s = after.stolen_s - before.stolen_s
    # the clocks of the system and of the process round differently, so a share may leave [0, 1]
    return OthersShare(*(min(1.0, max(0.0, x / total_s)) for x in (others_s, stolen_s)))


class LoadMeter:
    """Measures what others take of the CPUs that this process may use, from its creation on."""

    def __init__(self) -> None:
        self._cpus = usable_cpus()
        self._began, self._own_s, self._before = time.perf_counter(), _own_s(), self._read()

    def share(self) -> OthersShare | None:
        """The shares so far; None where they are not known."""
        after, wall_s = self._read(), time.perf_counter() - self._began
        if self._before is None or after is None:
            return None
        own_s = _own_s() - self._own_s
        return others_share(self._before, after, own_s, wall_s, len(self._cpus))

    def _read(self) -> CpuTimes | None:
        if not hasattr(os, "sysconf"):  # Windows
            return None
        return cpu_times(content(STAT), self._cpus, 1 / os.sysconf("SC_CLK_TCK"))


def clock_mhz() -> float | None:
    """The clock of the fastest CPU that this process may use; None where it is not known.

    Idle CPUs lower their clock, so the fastest one is the one that computes.
    """
    files = [CPUS / f"cpu{cpu}" / "cpufreq" / "scaling_cur_freq" for cpu in usable_cpus()]
    kilohertz = [int(text) for file in files if (text := content(file).strip()).isdecimal()]
    if kilohertz:
        return max(kilohertz) / 1e3
    # virtual machines have no cpufreq
    listed = re.findall(r"^cpu MHz\s*: ([\d.]+)$", content(CPUINFO), re.MULTILINE)
    return max(map(float, listed), default=None)


def usable_cpus() -> list[int]:
    """The numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux; a container may have fewer CPUs than the machine
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _own_s() -> float:
    """CPU seconds of this process and of its children that ended."""
    return sum(os.times()[:4])  # the fifth is the wall time


def content(path: Path) -> str:
    """The text of a file of the kernel; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- the heap ------------------------------------------------------------------------------------

OTHERS = ("jemalloc", "tcmalloc", "mimalloc")  # Allocators that may be loaded in glibc's place

# glibc as it is, glibc that keeps its memory, and a C library that is not glibc
GLIBC, STEADY, SYSTEM = "glibc", "glibc-steady", "system"

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from glibc's malloc.h
NEVER = -1  # the largest size_t, as an int
# From this threshold on, an environment that also maps no blocks counts as steady
TRIM_BYTES = 1 << 30

# 1,024 faults of 4 KiB: their time is far above the clock's step
BLOCKS, BLOCK_BYTES = 5, 4 * 2**20

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
