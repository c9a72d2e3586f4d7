"""The kernels that a wheel ships, for machines without a compiler.

`pip install` compiles `prebuilt.c` where it finds a compiler (`setup.py`), for processors without
AVX2, with it and with AVX-512; the best that runs here is called. One library does every
combination of dtypes, with the bits and about the speed of what is compiled here.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
SOURCES = ("formats.h", "blocks.h", "steps.h", "prebuilt.c")  # What the library is built from
# The formats of blocks.h by number, as the macros of the other kernels name them
FORMATS = (None, "F32", "F16", "BF16", "S16", "C8")
_ENUMS = re.findall(r"^enum \{ (.*) \};$", (FOLDER / "steps.h").read_text("utf-8"), re.MULTILINE)
# The optimizers' formulas that there are in C, and the rules of rounding, by number
FORMULAS, RULES = (names.split(", ") for names in _ENUMS)

# What PyTorch finds of a processor, to the level of the library: bits of a vector
LEVELS = {"AVX2": 256, "AVX512": 512}

Defines = Mapping[str, str | None]  # Macros of a kernel: see `mprun.precision.kernels.load`


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
        except (OSError, AttributeError) as error:
            reason = str(error).strip().partition("\n")[0]
    return reason


def fingerprint() -> int:
    """A number of the sources, which is compiled into the library."""
    texts = b"\0".join((FOLDER / name).read_bytes() for name in SOURCES)
    # 32 bits: the library has them as one macro
    return int.from_bytes(hashlib.sha256(texts).digest()[:4], "little")


def levels() -> list[int]:
    """The levels in the library that this processor can run, the best one first."""
    made = library()
    if isinstance(made, str):
        return []
    # PyTorch asks the processor, and has an environment variable to forbid a level
    best = LEVELS.get(torch.backends.cpu.get_cpu_capability(), 0)
    return [n for n in (512, 256, 0) if n <= best and hasattr(made, f"mprun_update_{n}")]


def updates(defines: Defines) -> tuple[Callable[..., None], ...]:
    """The function `update` of update.c with these macros, alone; `library` must be one."""
    pointer, size, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    function = _function("update")
    function.argtypes = [*[pointer] * 9, size, word, pointer, pointer, ctypes.c_int]
    storage = _storage(defines)

    def called(*arguments: Any) -> None:
        function(storage, *arguments)

    return (called,)


def roundings(defines: Defines) -> tuple[Callable[..., None], ...]:
    """The functions `round_stochastic`, `..._twice` and `round_nearest_twice` of round.c."""
    pointer, size, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    function = _function("round")
    function.argtypes = [*[pointer] * 3, size, word, pointer, *[ctypes.c_int] * 3]
    how = FORMATS.index(defines["TO"]), int("SATURATE" in defines)

    def stochastic(
        x: int, to: int, count: int, start: int, low: int, high: int, threads: int
    ) -> None:
        function(x, to, None, count, start, _words(low, high), *how, threads)

    def stochastic_twice(
        x: int, to: int, wide: int, count: int, low: int, high: int, threads: int
    ) -> None:
        function(x, to, wide, count, 0, _words(low, high), *how, threads)

    def nearest_twice(x: int, to: int, wide: int, count: int, threads: int) -> None:
        function(x, to, wide, count, 0, None, *how, threads)

    return stochastic, stochastic_twice, nearest_twice


def _function(name: str) -> Any:
    function: Any = getattr(library(), f"mprun_{name}_{levels()[0]}")
    function.restype = None
    return function


def _words(low: int, high: int) -> Any:
    return (ctypes.c_uint32 * 2)(low, high)


def _storage(defines: Defines) -> Any:
    """The struct `Storage` of steps.h."""
    return (ctypes.c_int32 * 9)(
        FORMULAS.index(defines["FORMULA"]),
        FORMATS.index(defines["PARAM"]),
        FORMATS.index(defines["GRAD"]),
        FORMATS.index(defines["FIRST"]) if "HAS_FIRST" in defines else 0,
        FORMATS.index(defines["SECOND"]) if "HAS_SECOND" in defines else 0,
        next((n for n, name in enumerate(RULES) if f"RULE_{name}" in defines), 0),
        "FIRST_STOCHASTIC" in defines,
        "ROOT" in defines,
        "SATURATE" in defines,
    )


# What stands for the functions of another source
FUNCTIONS = {"update.c": updates, "round.c": roundings}
