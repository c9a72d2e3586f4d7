"""Every row of the four systems has a test of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("one_traced_step")

ROWS = {"A": 13, "B": 10, "C": 10, "D": 14}
"""How many rows there are of each system."""


def test_each_row_has_a_test_that_bears_its_name() -> None:
    text = "".join(p.read_text(encoding="utf-8") for p in Path(__file__).parent.glob("test_*.py"))
    tested = set(re.findall(r"^def test_([abcd]\d+)_", text, flags=re.MULTILINE))
    assert tested == {f"{s.lower()}{n}" for s, rows in ROWS.items() for n in range(1, rows + 1)}
