"""Errors in the worker processes of a `DataLoader`.

PyTorch raises such an error again in the parent, with the worker's traceback as its text: the first
line says only that there was one. Here the first line says what it was, and where.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_CAUGHT = re.compile(r"Caught (\S+) in DataLoader worker process")
_PLACE = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
_LIBRARIES = ("site-packages", "dist-packages")


@contextmanager
def explained() -> Iterator[None]:
    """An error of a worker that is raised inside begins with its own message."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if caught := _CAUGHT.match(text):
            kind = type(error.args[0]) if error.args else str  # PyTorch's own for KeyError
            error.args = (kind(f"{_message(text, caught[1])}{_place(text)}\n{text}"),)
        raise


def _message(text: str, kind: str) -> str:
    line = text.strip().splitlines()[-1]
    return line.removeprefix(f"{kind}: ").removeprefix(f"{kind}") or kind


def _place(text: str) -> str:
    """The last line of code that is no library's."""
    places = [p for p in _PLACE.findall(text) if not any(name in p[0] for name in _LIBRARIES)]
    file, line = places[-1] if places else ("", "")
    return f" ({file}:{line}, in a DataLoader worker)" if file else " (in a DataLoader worker)"
