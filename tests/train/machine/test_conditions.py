"""What others take of the CPUs, and the clock: from the kernel's files, and of a real process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mprun.train.machine import conditions
from mprun.train.machine.conditions import CpuTimes, OthersShare, cpu_times, others_share

STAT = """\
cpu  600 60 400 9000 100 10 20 300 50 0
cpu0 100 10 100 2000 20 2 5 100 50 0
cpu1 200 20 100 3000 30 3 5 100 0 0
cpu12 300 30 200 4000 50 5 10 100 0 0
intr 12 34
"""


def test_the_times_are_those_of_the_named_cpus() -> None:
    # Guest time (the ninth figure) is part of user time and is not counted again.
    assert cpu_times(STAT, [0], 0.01) == pytest.approx((2.1, 1.0, 23.37))
    assert cpu_times(STAT, [1, 12], 0.01) == pytest.approx((8.5, 2.0, 34.58 + 46.95 - 0.0))


@pytest.mark.parametrize("text", ["", "cpu  1 2 3\n", "cpu0 1 2 3\n", "nonsense"], ids=str)
def test_a_file_without_these_figures_has_no_times(text: str) -> None:
    assert cpu_times(text, [0], 0.01) is None


@pytest.mark.parametrize(
    ("busy_s", "stolen_s", "total_s", "own_s", "wall_s", "expected"),
    [
        (15.0, 1.0, 20.0, 10.0, 10.0, OthersShare(0.25, 0.05)),
        (9.9, 0.0, 20.0, 10.0, 10.0, OthersShare(0.0, 0.0)),  # ticks are rounded
        (20.0, 0.0, 20.0, 0.0, 10.0, OthersShare(1.0, 0.0)),
        (1.0, 0.0, 1.8, 0.5, 0.9, None),  # too short
        (0.0, 0.0, 0.0, 10.0, 10.0, None),  # a sandbox that counts nothing
    ],
)
def test_others_take_what_is_not_this_process(
    busy_s: float,
    stolen_s: float,
    total_s: float,
    own_s: float,
    wall_s: float,
    expected: OthersShare | None,
) -> None:
    before = CpuTimes(100.0, 5.0, 1000.0)
    after = CpuTimes(100.0 + busy_s, 5.0 + stolen_s, 1000.0 + total_s)
    assert others_share(before, after, own_s, wall_s, cpus=2) == pytest.approx(expected)


BUSY = """
import os, subprocess, sys, time
from mprun.train.machine.conditions import LoadMeter
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
meter, began, own_s = LoadMeter(), time.perf_counter(), time.process_time()
while time.perf_counter() < began + 1.5:
    pass
share, own_s = meter.share(), time.process_time() - own_s
wall_s = time.perf_counter() - began
other.kill()
other.wait()
print(share is None, share and share.other_load + share.steal, own_s / wall_s)
"""


@pytest.mark.skipif(
    not hasattr(conditions.os, "sched_setaffinity"), reason="only Linux pins processes"
)
def test_a_second_process_on_the_same_cpu_is_seen() -> None:
    """The CPU is never idle: whatever else runs on it, others have what this process has not."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=True)
    is_unknown, others, own = done.stdout.split()
    if is_unknown == "True":
        pytest.skip("this system does not count the time of its CPUs")
    assert float(others) > 0.1  # half, where nothing else runs
    assert float(others) + float(own) == pytest.approx(1, abs=0.2)  # ticks, interrupts


def test_the_clock_is_the_fastest_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "usable_cpus", lambda: [0, 3])
    monkeypatch.setattr(conditions, "CPUS", tmp_path)
    monkeypatch.setattr(conditions, "CPUINFO", tmp_path / "cpuinfo")
    assert conditions.clock_mhz() is None
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\ncpu MHz\t\t: 1999.5\nprocessor\t: 1\ncpu MHz\t\t: 2100.250\n",
        encoding="utf-8",
    )
    assert conditions.clock_mhz() == 2100.25
    for cpu, kilohertz in ((0, 800_000), (1, 4_000_000), (3, 3_100_000)):
        folder = tmp_path / f"cpu{cpu}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{kilohertz}\n", encoding="utf-8")
    assert conditions.clock_mhz() == 3100.0
