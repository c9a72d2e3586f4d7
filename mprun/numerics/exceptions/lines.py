"""Which line of the user's Python led to the op that runs now.

The innermost frame that is neither PyTorch's, nor mprun's, nor Python's own library. Recipes are
the user's code, mprun's own among them.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

import mprun

TORCH = Path(torch.__file__).parent
OURS = Path(mprun.__file__).parent
RECIPES = OURS / "recipes"
PYTHON = Path(sysconfig.get_path("stdlib"))
PACKAGES = (Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib")))

TYPED_IN = ("<stdin>", "<ipython")

ENDS = (str(OURS / "precision" / "precision.py"),)
"""Code that calls a model for mprun's loop: outside of it there is no line of the user's."""


class Line(NamedTuple):
    """A line of code."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.number} ({self.function})"


def current_line() -> Line | None:
    """The line the caller's op is from; None where only libraries lead to it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _is_library(code.co_filename):
            return Line(code.co_filename, frame.f_lineno, code.co_name)
        if code.co_name == "_engine_run_backward" or code.co_filename in ENDS:
            return None
        frame = frame.f_back
    return None


@functools.cache
def _is_library(file: str) -> bool:
    if file.startswith("<"):
        return not file.startswith(TYPED_IN)
    path = Path(file)
    if path.is_relative_to(TORCH) or path.is_relative_to(OURS):
        return not path.is_relative_to(RECIPES)
    return path.is_relative_to(PYTHON) and not any(map(path.is_relative_to, PACKAGES))
