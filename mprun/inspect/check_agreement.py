"""Is a step's error what the roundings of its format explain, and where is it not?"""

from __future__ import annotations

from collections.abc import Iterator

from mprun.inspect.checked_mode import CheckedMode
from mprun.results.check_result import Finding


def agrees(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    yield from ()
