"""Does a mode train"""

from __future__ import annotations

from collections.abc import Iterator

from mprun.inspect.checked_mode import CheckedMode
from mprun.results.check_result import Finding


def trains(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    yield from ()
