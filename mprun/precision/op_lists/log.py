"""Telling of casts while a model trains (HMP: `isVerbose`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class CastLog:
    """A watcher that says each distinct cast once: `cast: linear (lower): float32 to bfloat16`.

    Args:
        say: takes a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._running: list[str] = []

    @contextmanager
    def op(self, name: str, rule: str) -> Iterator[None]:
        self._running.append(f"{name} ({rule})")
        try:
            yield
        finally:
            self._running.pop()

    def cast(self, have: torch.dtype, want: torch.dtype) -> None:
        names = (str(dtype).removeprefix("torch.") for dtype in (have, want))
        line = f"cast: {self._running[-1]}: {' to '.join(names)}"
        if line not in self._said:
            self._said.add(line)
            self._say(line)
