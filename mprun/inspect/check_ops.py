"""What dtypes the ops of a mode run in, and how far their numbers are from the format's limits."""

from __future__ import annotations

from collections.abc import Iterator

from mprun.inspect.checked_mode import CheckedMode
from mprun.results.check_result import Finding


def dtypes(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    yield from ()


def robust(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    yield from ()
