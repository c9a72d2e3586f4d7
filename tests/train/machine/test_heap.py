"""The C library's heap: what it is called, and that a steady one gives no memory back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mprun.train.machine import conditions


@pytest.mark.parametrize(
    ("variables", "steady"),
    [
        ({}, False),
        ({"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967295"}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "4294967295"}, False),
        ({"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967295"},
            True,
        ),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}, False),
    ],
    ids=str,
)
def test_variables_that_make_the_heap_steady(variables: dict[str, str], steady: bool) -> None:
    assert conditions.is_steady(variables) == steady


@pytest.mark.parametrize("name", [*conditions.OTHERS, conditions.SYSTEM])
def test_another_allocator_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "_library", lambda: name)
    monkeypatch.setattr(conditions.ctypes, "CDLL", lambda _: pytest.fail("mallopt was called"))
    assert conditions.steady_heap() == conditions.allocator() == name


SCRIPT = """
import runpy, sys
heap = runpy.run_path(sys.argv[1])
def faults_of_a_block():
    before = heap["page_faults"]()
    del bytearray(40 * 2**20)[:1]  # above 32 MiB, glibc always maps a block apart
    return heap["page_faults"]() - before
def faults():
    return sorted(faults_of_a_block() for _ in range(5))[2]
print(heap["allocator"](), faults())
heap["steady_heap"]()
print(heap["allocator"](), faults())
"""


@pytest.mark.parametrize(
    "python",
    [
        sys.executable,
        "/usr/bin/python3",  # of Debian: the address of `malloc` lies in the program itself
    ],
    ids=["this", "of the system"],
)
def test_a_steady_heap_has_no_page_faults(python: str) -> None:
    if conditions._library() != conditions.GLIBC:
        pytest.skip("mallopt is glibc's")
    if not Path(python).exists():
        pytest.skip(f"there is no {python}")
    command = [python, "-c", SCRIPT, conditions.__file__]
    done = subprocess.run(command, capture_output=True, text=True, env={}, check=True)
    plain, steady = (line.split() for line in done.stdout.splitlines())
    assert plain[0] == conditions.GLIBC
    assert steady == [conditions.STEADY, "0"]
    assert int(plain[1]) >= 40 / 2  # a fault for each page, of 2 MiB at most


def test_the_price_of_a_fault_is_that_of_a_page_cleared() -> None:
    price_us = conditions.page_fault_us()
    if conditions.page_faults() is None:
        assert price_us is None
        return
    assert price_us is not None
    # Clearing 4 KiB takes 0.05 us or more; 2 MiB, on a slow machine, far less than 0.1 s.
    assert 0.01 < price_us < 1e5
