"""Compiled loops for the CPU: stochastic rounding and optimizer steps in one pass over memory.

In PyTorch a stochastic rounding takes some fifteen passes over a tensor. One C loop that loads,
computes, hashes, rounds and stores is limited by memory bandwidth alone. The installation compiles
`prebuilt.c` (`setup.py`), for processors without AVX2, with it and with AVX-512; the best that runs
here is called. One library does every combination of dtypes. Without it PyTorch versions of the
same operations do the work, several times slower. All give the same bits: contraction to fused
multiply-add and unsafe math are switched off.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
SOURCES = ("formats.h", "blocks.h", "steps.h", "prebuilt.c")  # What the library is built from
# The formats of blocks.h by number; those of 16 bits have PyTorch's types
FORMATS = ("NONE", "F32", "F16", "BF16", "S16", "C8")
_ENUMS = re.findall(r"^enum \{ (.*) \};$", (FOLDER / "steps.h").read_text("utf-8"), re.MULTILINE)
# The optimizers' formulas that there are in C, and the rules of rounding, by number
FORMULAS, RULES = (names.lower().split(", ") for names in _ENUMS)
# What PyTorch finds of a processor, to the level of the library: bits of a vector
LEVELS = {"AVX2": 256, "AVX512": 512}
COLUMNS = 12  # Of the struct `Row`
CHUNK = 1024  # Numbers that a program of the Triton kernel updates: some groups of codes
_POINTER, _SIZE, _WORD, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_int
# The functions of the library; none returns anything
ARGUMENTS = {
    "round": [_POINTER, _POINTER, _POINTER, _SIZE, _WORD, _POINTER, _INT, _INT, _INT],
    "update": [_POINTER, _POINTER, _SIZE, *[_POINTER] * 3, _INT],
}


class NoKernelsError(Exception):
    """There are no compiled kernels here; the text is why."""


@cache
def library() -> ctypes.CDLL | str:
    """The library, or why it cannot be used."""
    if os.environ.get("MPRUN_NO_KERNELS"):
        return "MPRUN_NO_KERNELS is set"
    reason = "mprun was installed without compiled kernels"
    for path in sorted(FOLDER.glob("_prebuilt.*")):
        try:
            found = ctypes.CDLL(str(path))
            # An older library would give other bits, or read a `Storage` of another layout
            if ctypes.c_uint32(found.mprun_sources()).value == fingerprint():
                return found
            reason = f"{path.name} was built from other sources: install mprun again"
            warnings.warn(f"{reason}; until then steps are slower", RuntimeWarning, stacklevel=2)
        except (OSError, AttributeError) as error:
            reason = str(error).strip().partition("\n")[0]
    return reason


def fingerprint() -> int:
    """A number of the sources, which is compiled into the library."""
    texts = b"\0".join((FOLDER / name).read_bytes() for name in SOURCES)
    # 32 bits: the library has them as one macro
    return int.from_bytes(hashlib.sha256(texts).digest()[:4], "little")


def why_not() -> str | None:
    """Why there are no compiled kernels here; None where there are."""
    made = library()
    return made if isinstance(made, str) else None


def origin() -> str:
    """Where the kernels come from, in words; why there are none, where there are none."""
    reason = why_not()
    return "compiled at installation" if reason is None else f"none: {reason}"


def levels() -> list[int]:
    """The levels in the library that this processor can run, the best one first."""
    made = library()
    if isinstance(made, str):
        return []
    # PyTorch asks the processor, and has an environment variable to forbid a level
    best = LEVELS.get(torch.backends.cpu.get_cpu_capability(), 0)
    return [n for n in (512, 256, 0) if n <= best and hasattr(made, f"mprun_update_{n}")]


def call(name: str, *arguments: object) -> None:
    """Call the function `round` or `update` of the library: `ARGUMENTS`, prebuilt.c.

    Raises:
        NoKernelsError: there is no library.
    """
    if (reason := why_not()) is not None:
        raise NoKernelsError(reason)
    _function(name, levels()[0])(*arguments)


@cache
def _function(name: str, level: int) -> Callable[..., None]:
    function = getattr(library(), f"mprun_{name}_{level}")
    function.argtypes, function.restype = ARGUMENTS[name], None
    made: Callable[..., None] = function
    return made
