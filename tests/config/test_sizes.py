"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from mprun.config.settings import parse_size
from mprun.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("16gib", 16 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("500MB", 500_000_000),
        ("2TB", 2 * 10**12),
        ("80KiB", 80 * 1024),
        ("12345", 12345),
        ("12345B", 12345),
        ("1e9", 10**9),
        (" 1KB ", 1000),
    ],
)
def test_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_size(text, "memory.fits") == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "16G",
        "16 gigs",
        "-1GiB",
        "0",
        "0.5B",
        "1e99GiB",
        "1..5GB",
        "nan",
        "inf",
        "1+1",
        "e",
    ],
)
def test_anything_else_is_refused_with_what_is_legal(text: str) -> None:
    with pytest.raises(UsageError) as told:
        parse_size(text, "memory.fits")
    assert f"'memory.fits={text}'" in str(told.value)
    assert "16GiB" in str(told.value)
