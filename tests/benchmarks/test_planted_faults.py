"""The table of planted faults still fits the code."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.planted_faults import FAULTS, TABLE, Fault, planted


def test_every_line_of_the_table_is_read_and_names_are_unique() -> None:
    assert len(FAULTS) == 40
    assert len(TABLE.strip().splitlines()) == 2 * len(FAULTS)
    packages = Counter(fault.file.split("/")[1] for fault in FAULTS.values())
    assert packages == {"precision": 14, "optim": 8, "study": 8, "train": 10}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_applies_once_and_compiles(fault: Fault) -> None:
    assert fault.before != fault.after
    compile(planted(fault), fault.file, "exec")


def test_a_fault_that_no_longer_applies_is_named() -> None:
    gone = Fault("gone", "mprun/errors.py", "Nothing.", "no such line of code", "")
    with pytest.raises(ValueError, match=r"gone: 'no such line of code' occurs 0 times in mprun"):
        planted(gone)
