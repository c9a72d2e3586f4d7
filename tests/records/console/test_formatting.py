"""Sizes, shares and changes as text."""

from __future__ import annotations

import pytest

from mprun.records.console.formatting import (
    change_text,
    share_text,
    size_text,
    unit_for,
)


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(1.0, "0 %"), (0.72, "-28 %"), (1.999, "+100 %"), (0.0, "-100 %"), (12.4, "x12")],
)
def test_a_ratio_as_a_change(ratio: float, text: str) -> None:
    assert change_text(ratio) == text


@pytest.mark.parametrize(
    ("size", "text", "unit"),
    [
        (0, "0 B", "B"),
        (2047, "2 KiB", "B"),
        (2**30, "1 GiB", "MiB"),
        (5 * 2**30, "5 GiB", "GiB"),
        (57846072, "55.2 MiB", "MiB"),
    ],
)
def test_amounts_have_a_unit_with_readable_digits(size: int, text: str, unit: str) -> None:
    assert (size_text(size), unit_for(size)) == (text, unit)


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "-"), (0, "0"), (1e-9, "<0.01%"), (1e-4, "0.01%"), (0.0525, "5.25%"), (1, "100.0%")],
)
def test_shares(share: float | None, text: str) -> None:
    assert share_text(share) == text
