"""Amounts of memory as people write them: `16GiB`."""

from __future__ import annotations

import math
import re

from mprun.errors import UsageError

UNITS = {
    "B": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("KMGT", start=1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", start=1)},
}


def parse_size(text: str, key: str) -> int:
    """The bytes in `text`, the value of the setting `key`.

    Raises:
        UsageError: it is not an amount of memory above zero.
    """
    by_name = {name.lower(): factor for name, factor in UNITS.items()}
    match = re.fullmatch(r"([0-9.eE+]+?)\s*([A-Za-z]*)", text.strip())
    factor = by_name.get(match[2].lower() or "b") if match else None
    try:
        size = float(match[1]) * factor if match and factor else math.nan
    except ValueError:
        size = math.nan
    if not 1 <= size < 2**63:
        raise UsageError(
            f"'{key}={text}': legal is an amount of memory above 0: a number and a unit, one of "
            f"{', '.join(UNITS)} (16GiB, 500MB)"
        )
    return int(size)
