"""Compiled loops for the CPU: stochastic rounding and optimizer steps in one pass over memory.

In PyTorch a stochastic rounding takes some fifteen passes over a tensor. One C loop that loads,
computes, hashes, rounds and stores is limited by memory bandwidth alone. The sources are small.
They are compiled on the machine where they run, by its C compiler, for its processor (a quarter of
a second), once for each combination of dtypes; the result is stored in the user's cache folder.
Where there is no compiler, the library that was compiled at installation (`prebuilt`) does the
work, and without it PyTorch versions of the same operations, several times slower. All give the
same bits: contraction to fused multiply-add and unsafe math are switched off.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from mprun.precision.kernels import prebuilt
from mprun.precision.kernels.prebuilt import Defines

SOURCES = Path(__file__).resolve().parent
HEADERS = ("formats.h", "blocks.h", "steps.h")
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # A fused multiply-add rounds once, PyTorch's two ops round twice
    "-fno-math-errno",  # `sqrtf` is one instruction, not a call that sets errno
    "-fno-trapping-math",  # Both sides of a choice may be computed, so loops become vectors
    "-shared",
    "-fPIC",
    "-std=c11",  # Of stdatomic.h
)
# Tried in turn: not every compiler and processor knows the flag
VARIANTS = (("-mprefer-vector-width=512", "-lm"), ("-lm",))
_POINTER, _SIZE, _WORD = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
# The functions of each source, and their arguments; none returns anything
ARGUMENTS: dict[str, dict[str, list[Any]]] = {
    "update.c": {
        "update": [*[_POINTER] * 8, _SIZE, _WORD, _POINTER, _POINTER, ctypes.c_int],
    },
    "round.c": {
        "round_stochastic": [*[_POINTER] * 2, _SIZE, *[_WORD] * 3, ctypes.c_int],
        "round_stochastic_twice": [*[_POINTER] * 3, _SIZE, *[_WORD] * 2, ctypes.c_int],
        "round_nearest_twice": [*[_POINTER] * 3, _SIZE, ctypes.c_int],
    },
}
NO_COMPILER = "there is no C compiler (CC, cc, gcc, clang, or pip install 'mprun[compiler]')"
PATIENCE_S = 60  # Time limit of the compiler, which needs a quarter of a second
SCRATCH = "compiling-"  # How the names of the folders begin that compilers work in


class NoCompilerError(Exception):
    """There is no C compiler here, or it cannot compile for this machine; the text is why."""


def load(source: str, defines: Defines) -> ctypes.CDLL:
    """The library made of `source` (a file of this folder) with macros (None: without a value).

    Raises:
        NoCompilerError: there is no library. A process tries each library once.
    """
    flags = (f"-D{name}" + (f"={value}" if value else "") for name, value in defines.items())
    library = _load(source, tuple(sorted(flags)))
    if isinstance(library, str):
        raise NoCompilerError(library)
    return library


def functions(source: str, defines: Defines) -> tuple[Callable[..., None], ...]:
    """The functions of `source`, compiled for these macros here, or else those of the wheel.

    Raises:
        NoCompilerError: there are neither.
    """
    try:
        library = load(source, defines)
    except NoCompilerError:
        if isinstance(prebuilt.library(), str):
            raise
        return prebuilt.FUNCTIONS[source](defines)
    made = []
    for name, types in ARGUMENTS[source].items():
        function: Any = getattr(library, name)
        function.argtypes, function.restype = types, None
        made.append(function)
    return tuple(made)


def functions_or_warn(source: str, defines: Defines) -> tuple[Callable[..., None], ...] | None:
    """As `functions`, but with a warning and None instead of an error; one kernel may fail."""
    try:
        return functions(source, defines)
    except NoCompilerError as error:
        text = f"{error}; PyTorch does its work, several times slower, with the same bits"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None


@lru_cache
def why_not() -> str | None:
    """Why there are no compiled kernels here; None where there are. Tries to compile one."""
    reason = why_not_compiled()
    return reason if isinstance(prebuilt.library(), str) else None


def why_not_compiled() -> str | None:
    """Why nothing can be compiled here; None where it can. Tries it."""
    try:
        load("round.c", {"TO": "BF16"})
    except NoCompilerError as error:
        return str(error)
    return None


def origin() -> str:
    """Where the kernels come from, in words; why there are none, where there are none."""
    reason = why_not_compiled()
    if reason is None:
        return "compiled for this machine"
    if isinstance(missing := prebuilt.library(), str):
        return f"none: {reason}; {missing}"
    return f"compiled at installation ({reason})"


@cache
def _load(source: str, defines: tuple[str, ...]) -> ctypes.CDLL | str:
    """The library, or the reason why it cannot be made."""
    for name in ("MPRUN_NO_KERNELS", "MPRUN_NO_COMPILER"):
        if os.environ.get(name):
            return f"{name} is set"
    try:
        compiler = _compiler()
    except ValueError as error:
        return f"CC={os.environ['CC']} is not a command line: {error}"
    if not compiler:
        return NO_COMPILER
    reason = ""
    for variant in VARIANTS:
        try:
            return ctypes.CDLL(str(_compiled(compiler, source, (*FLAGS, *defines), variant)))
        except subprocess.TimeoutExpired:
            reason = f"not done after {PATIENCE_S} s"
            break  # other flags would not make it faster
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(getattr(error, "stderr", None) or error).strip() or "no message"
    return f"{compiler[0]} cannot compile {source}: {reason.splitlines()[0]}"


def _compiler() -> tuple[str, ...]:
    """The C compiler of CC with arguments, else the first that is installed; empty for none."""
    given = shlex.split(os.environ.get("CC", ""))
    commands = [given] if given else [["cc"], ["gcc"], ["clang"]]
    installed = ((path, *rest) for name, *rest in commands if (path := shutil.which(name)))
    by_pip = not given and importlib.util.find_spec("ziglang") is not None
    return next(installed, (sys.executable, "-m", "ziglang", "cc") if by_pip else ())


def _compiled(
    compiler: tuple[str, ...], source: str, flags: tuple[str, ...], last: tuple[str, ...]
) -> Path:
    """The shared library, from the cache where it was made before."""
    texts = [(SOURCES / name).read_text(encoding="utf-8") for name in (*HEADERS, source)]
    # All that decides on the machine code: another compiler or processor gets another file
    parts = (*texts, *compiler, *flags, *last, _processor())
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = cache_folder()
    stem = f"{Path(source).stem}-{name}"
    if (cached := _cached(folder, stem)) is not None:
        return cached
    # Someone may have emptied the cache meanwhile.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
        out = Path(scratch) / f"{stem}.so"
        command = [*compiler, *flags, str(SOURCES / source), "-o", str(out), *last]
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
            # What a compiler that is killed leaves behind goes with the folder
            env={**os.environ, "TMPDIR": scratch, "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig")},
        )
        out.chmod(0o700)  # whatever the umask: see _is_ours
        with out.open("rb") as file:
            # Else a crash could leave a whole name and no content
            os.fsync(file.fileno())
        library = folder / f"{stem}-{out.stat().st_size}.so"
        out.replace(library)  # atomic: two runs may compile at once
    return library


def _remove_abandoned(folder: Path) -> None:
    """Remove the compilers' folders that processes left which were killed."""
    oldest = time.time() - 10 * PATIENCE_S  # no compiler of a living process works as long
    for scratch in folder.glob(f"{SCRATCH}*"):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if scratch.stat().st_mtime < oldest:
                shutil.rmtree(scratch, ignore_errors=True)


def _cached(folder: Path, stem: str) -> Path | None:
    """The library in the cache, if it is whole and ours; its size is the end of its name.

    A process that calls into one that was cut short, by a crash, ends at once with SIGBUS.
    """
    for library in folder.glob(f"{stem}-*.so"):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if _is_ours(library) and library.stem == f"{stem}-{library.stat().st_size}":
                return library
            library.unlink()
    return None


@lru_cache
def cache_folder() -> Path:
    """Where libraries are stored: XDG_CACHE_HOME or ~/.cache, else a folder of this process.

    A library is code that this process runs. So the folder is closed to other users, and one that
    they own or could replace is not used.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "mprun" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (owner := _other_owner(folder)) is None:
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) & 0o700)
            tempfile.TemporaryDirectory(dir=folder).cleanup()  # it may be there and take nothing
            return folder
        from mprun.records.console import warn  # brings rich, which a user's own loop does not need

        warn([f"{folder} is not used for compiled kernels: {owner}"])
    except (OSError, RuntimeError):
        pass
    folder = Path(tempfile.mkdtemp(prefix="mprun-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _other_owner(folder: Path) -> str | None:
    """Why another user decides what is in `folder`, or None.

    Who owns a folder above, or may write into it, can replace this one; in a sticky folder (/tmp)
    only the owner can. Writing by a group is no reason: many systems give each user an own group.
    """
    if folder.is_symlink() or folder.stat().st_uid != _user():
        return "it belongs to another user, or is a link"
    for level, parent in enumerate(folder.resolve().parents):
        status = parent.stat()
        by_anyone = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        if by_anyone or (level < 2 and status.st_uid not in (0, _user())):
            return f"another user may replace it in {parent}"
    return None


def _is_ours(library: Path) -> bool:
    """Whether the file exists, belongs to this user, and nobody else may have written into it."""
    try:
        status = library.lstat()
    except FileNotFoundError:
        return False
    by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(status.st_mode) and status.st_uid == _user() and not by_others


def _user() -> int:
    """This process's user; 0, which every file has, on systems without users."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _processor() -> str:
    """What `-march=native` depends on; unlike machines may share a home folder."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        flags = next((x for x in text.splitlines() if x.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    return f"{platform.machine()} {flags}"
