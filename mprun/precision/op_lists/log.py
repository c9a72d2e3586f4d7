"""Reports casts while a model trains (HMP: `isVerbose`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mprun._torch import running_modules


class CastLog:
    """A watcher that reports each distinct cast once, with the module that it happens in.

    `cast: linear (lower) in encoder.fc1 (Linear): float32 to bfloat16`

    Args:
        say: takes a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._running: list[str] = []
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

    @contextmanager
    def op(self, name: str, rule: str) -> Iterator[None]:
        self._running.append(f"{name} ({rule})")
        try:
            yield
        finally:
            self._running.pop()

    def cast(self, have: torch.dtype, want: torch.dtype) -> None:
        names = (str(dtype).removeprefix("torch.") for dtype in (have, want))
        line = f"cast: {self._running[-1]}{self._place()}: {' to '.join(names)}"
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _place(self) -> str:
        """` in NAME (CLASS)` of the innermost module that runs, empty outside of all."""
        modules = running_modules()
        if not modules:
            return ""
        outermost, innermost = modules[-1], modules[0]
        for name, module in outermost.named_modules():
            self._names.setdefault(
                module, name
            )  # a part that is run again by itself keeps its name
        name = self._names.get(innermost, "")
        return (
            f" in {name} ({type(innermost).__name__})"
            if name
            else f" in {type(innermost).__name__}"
        )
