"""What else the machine did during a run: the load of other processes, stolen time, the clock.

Step times change with all three, so a difference between two runs may be theirs. Linux counts, for
each CPU, the time in which it computed, was idle, or was taken by the hypervisor (`/proc/stat`, in
ticks of 10 ms). What other processes took is the computing time of the CPUs that this process may
use, less its own.

Sources: proc_stat(5); the kernel's cpufreq documentation (`scaling_cur_freq`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

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
