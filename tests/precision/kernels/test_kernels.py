"""The compiled loops: the bits of the PyTorch versions, and what happens where nothing compiles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mprun.precision import kernels
from mprun.precision import random_bits as random_bits_module
from mprun.precision import rounding as rounding_module
from mprun.precision.kernels import prebuilt
from mprun.precision.random_bits import Key, key, random_bits
from mprun.precision.rounding import (
    DTYPES,
    OVERFLOWS,
    SERIAL,
    round_stochastic,
    stochastic,
)
from tests.each import each
from tests.precision.kernels.programs import Programs
from tests.precision.test_rounding import bits_of, floats, random_patterns

ROOT = Path(__file__).resolve().parents[3]
COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler here")
EVERY_CASE = [(dtype, overflow) for dtype in DTYPES for overflow in OVERFLOWS]
cases = each(("dtype", "overflow"), EVERY_CASE, ids=str)
KEY = key(1, 2, 3, 0)


def clear_caches() -> None:
    for cached in (
        *(kernels.why_not, kernels._load, kernels.cache_folder),
        rounding_module._library,
    ):
        cached.cache_clear()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """As in a new process with an empty cache folder and no library of the installation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MPRUN_NO_COMPILER", raising=False)
    monkeypatch.setattr(
        prebuilt, "library", lambda: "hidden: tests/precision/kernels/test_prebuilt.py"
    )
    clear_caches()
    yield monkeypatch
    clear_caches()


@pytest.fixture
def compiled() -> None:
    """Fails where there is a compiler that the loader cannot use, so that no test passes idly."""
    assert kernels.why_not() is None


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bit for bit; of a NaN only that it is one: PyTorch's own casts differ in its payload."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(bits_of(found.contiguous())[number], bits_of(expected.contiguous())[number])


def edges() -> Tensor:
    """At every exponent the mantissas where either dtype's bits or halves begin or end."""
    mantissas = [0, 1, 2, 2**23 - 1]
    for dropped in (13, 16):
        half = 1 << (dropped - 1)
        for kept in (0, 1, 2 ** (23 - dropped) - 1):
            mantissas += [(kept << dropped) + by for by in (0, 1, half - 1, half, half + 1)]
            mantissas += [(kept << dropped) + 2 * half - 1]
    patterns = (torch.arange(256)[:, None] << 23) | torch.tensor(mantissas)
    return torch.cat([floats(patterns.view(-1)), floats(patterns.view(-1) | 0x80000000)])


def in_float16s_range(count: int) -> Tensor:
    """Mostly what float16 can hold, its subnormals and its overflow included."""
    generator = torch.Generator().manual_seed(1)
    exponent = torch.randint(-42, 18, (count,), generator=generator)
    return torch.ldexp(torch.randn(count, generator=generator), exponent)


def by_pytorch(x: Tensor, dtype: torch.dtype, overflow: str, words: Key = KEY) -> Tensor:
    bits = random_bits(words, x.numel()).view(x.shape)
    return round_stochastic(x.contiguous(), dtype, bits, overflow)


# ---- the same bits ----


@needs_compiler
@pytest.mark.usefixtures("compiled")
@cases
def test_the_kernel_gives_the_bits_of_pytorch(dtype: torch.dtype, overflow: str) -> None:
    x = torch.cat([random_patterns(1_000_000), in_float16s_range(1_000_000), edges()])
    assert_same(stochastic(x, dtype, KEY, overflow), by_pytorch(x, dtype, overflow))


@needs_compiler
@pytest.mark.usefixtures("compiled")
@cases
@each("size", [0, 1, 15, 17, 100_003])
def test_sizes_that_fill_no_vector(dtype: torch.dtype, overflow: str, size: int) -> None:
    x = in_float16s_range(size)
    assert_same(stochastic(x, dtype, KEY, overflow), by_pytorch(x, dtype, overflow))


@needs_compiler
@pytest.mark.usefixtures("compiled")
@each("dtype", DTYPES, ids=str)
@each(
    ("view", "dense"),
    [
        (lambda x: x.view(300, 400).t(), True),
        (lambda x: x.view(10, 10, 30, 40).to(memory_format=torch.channels_last), True),
        (lambda x: x[7:], True),
        (lambda x: x[0], True),
        (lambda x: x[::3], False),
        (lambda x: x.view(300, 400).t()[3:9], False),
        (lambda x: x[:400].expand(100, 400), False),
        (lambda x: x.view(2, 300, 200)[:, :0], False),
    ],
)
@each("path", ["compiled", "eager"])
def test_inputs_that_do_not_lie_in_one_piece(
    dtype: torch.dtype,
    view: Callable[[Tensor], Tensor],
    dense: bool,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elements are numbered as they lie in the result's memory: that of the input where dense."""
    if path == "eager":
        monkeypatch.setattr(kernels, "why_not", lambda: "not wanted")
    whole = in_float16s_range(120_000)
    before = whole.clone()
    x = view(whole)
    found = stochastic(x, dtype, KEY)
    if dense:
        assert found.stride() == x.stride()
    order = sorted(range(x.dim()), key=found.stride, reverse=True)
    in_memory = found.permute(order)
    assert in_memory.is_contiguous()
    assert_same(in_memory, by_pytorch(x.permute(order), dtype, "infinity"))
    assert torch.equal(whole, before)


@needs_compiler
@pytest.mark.usefixtures("compiled")
@each("dtype", DTYPES, ids=str)
def test_the_number_of_threads_does_not_matter(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    try:
        for size in (SERIAL - 1, SERIAL, 100_003):
            x = in_float16s_range(size)
            expected = by_pytorch(x, dtype, "infinity")
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                assert_same(stochastic(x, dtype, KEY), expected)
    finally:
        torch.set_num_threads(before)


@each("eager", [False, True])
def test_tensors_of_several_blocks_take_the_key_of_each(
    monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    """With blocks of 2^10 elements instead of 2^31, and eager parts that do not divide them."""
    monkeypatch.setattr(random_bits_module, "BLOCK", 2**10)
    monkeypatch.setattr(rounding_module, "EAGER_BLOCK", 300)
    if eager:
        monkeypatch.setattr(kernels, "why_not", lambda: "not here")
    x = in_float16s_range(5_000)
    whole = by_pytorch(x, torch.float16, "infinity")
    assert_same(stochastic(x, torch.float16, KEY), whole)
    for start in (1, 63, 1023, 1024, 2_999):  # of a shard
        found = stochastic(x[start:], torch.float16, KEY, start=start)
        assert_same(found, whole[start:])


# ---- without a compiler ----


def assert_eager_with_the_same_bits(reason: str) -> None:
    """`why_not` gives the reason, loading raises it, and rounding works all the same."""
    why = kernels.why_not()
    assert why is not None
    assert reason in why
    with pytest.raises(kernels.NoCompilerError, match=reason.split("(")[0]):
        kernels.load("round.c", {"TO": "F16"})
    x = torch.cat([in_float16s_range(150_000), edges()])  # more than one of the eager blocks
    for dtype, overflow in EVERY_CASE:
        assert_same(stochastic(x, dtype, KEY, overflow), by_pytorch(x, dtype, overflow))


LYING = 'while [ "$1" != -o ]; do shift; done\necho nonsense > "$2"'
FAILING: dict[str, tuple[str, str]] = {
    "says nothing": ("exit 3", "exit status 3"),
    "writes a text in place of the library": (LYING, "cannot compile round.c"),
    "a text that is no UTF-8": (
        r"printf '\377 bad\n' >&2" + "\nexit 1",
        "cannot compile round.c: \N{REPLACEMENT CHARACTER} bad",
    ),
}
"""What a compiler does, as a script, and the reason that is given."""
VARIABLES: dict[str, tuple[dict[str, str | None], str]] = {
    "CC names none": ({"CC": "/nowhere/cc"}, kernels.NO_COMPILER),
    "an empty path": ({"CC": None, "PATH": "/nowhere"}, kernels.NO_COMPILER),
    "not wanted": ({"MPRUN_NO_COMPILER": "1"}, "MPRUN_NO_COMPILER is set"),
    "CC is not a command line": (
        {"CC": "gcc '-DX"},
        "CC=gcc '-DX is not a command line: No closing quotation",
    ),
}


@each("kind", VARIABLES)
def test_without_a_compiler_pytorch_rounds(fresh: pytest.MonkeyPatch, kind: str) -> None:
    changes, reason = VARIABLES[kind]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        clear_caches()
        assert_eager_with_the_same_bits(reason)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@each("kind", FAILING)
def test_a_compiler_that_fails_in_any_way_is_none(
    fresh: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    text, reason = FAILING[kind]
    fresh.setenv("CC", str(script(tmp_path / "failing-cc", text)))
    clear_caches()
    before = {*kernels.cache_folder().iterdir()}
    assert_eager_with_the_same_bits(reason)
    assert text == LYING or {*kernels.cache_folder().iterdir()} == before


ZIG = """
import subprocess, sys

assert sys.argv[1] == "cc"
sys.exit(subprocess.run([{compiler!r}, *sys.argv[2:]]).returncode)
"""


@needs_compiler
def test_the_compiler_that_pip_installs_is_the_last_choice(
    fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site" / "ziglang"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(ZIG.format(compiler=COMPILER))
    fresh.setenv("PYTHONPATH", str(package.parent))  # of the process that compiles
    fresh.syspath_prepend(str(package.parent))
    assert kernels._compiler()[:1] != (sys.executable,)
    fresh.delenv("CC", raising=False)
    command = (sys.executable, "-m", "ziglang", "cc")
    fresh.setattr(kernels.shutil, "which", lambda name: None)
    assert kernels._compiler() == command
    assert kernels.why_not() is None
    assert kernels.origin() == "compiled for this machine"
    fresh.setenv("CC", "cc-of-the-user")
    assert kernels._compiler() == ()


def test_a_compiler_that_hangs_is_waited_for_once(
    fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waited: list[float] = []

    def run(command: list[str], *, timeout: float, **_: Any) -> None:
        waited.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    fresh.setenv("CC", str(script(tmp_path / "hanging-cc", "exit 1")))
    fresh.setattr(kernels.subprocess, "run", run)
    assert kernels.why_not() is not None
    assert_eager_with_the_same_bits("cannot compile round.c: not done after 60 s")
    assert waited == [60, 60]  # why_not's kernel and the one that is asked for there


ONE_ONLY = """echo once >> "{log}"
case "$*" in *-DSATURATE*) echo disk is full >&2; exit 1;; esac
exec "{compiler}" "$@"
"""


@needs_compiler
def test_a_kernel_that_fails_later_is_done_by_pytorch_and_tried_once(
    fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Others were compiled before: the disk has filled up since."""
    log = tmp_path / "compiled.log"
    compiler = script(tmp_path / "late-cc", ONE_ONLY.format(log=log, compiler=COMPILER))
    fresh.setenv("CC", str(compiler))
    assert kernels.why_not() is None
    x = in_float16s_range(1000)
    expected = by_pytorch(x, torch.bfloat16, "saturate")
    with pytest.warns(RuntimeWarning, match="cannot compile round.c: disk is full; PyTorch does"):
        assert_same(stochastic(x, torch.bfloat16, KEY, "saturate"), expected)
    before = log.read_text(encoding="utf-8")
    assert_same(stochastic(x, torch.bfloat16, KEY, "saturate"), expected)
    assert log.read_text(encoding="utf-8") == before


@needs_compiler
def test_flags_that_a_compiler_does_not_know_are_left_out(
    fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (
        'case "$*" in *-mprefer-vector-width*|*-fopenmp*) echo unknown flag >&2; exit 1;; esac\n'
        f'exec "{COMPILER}" "$@"'
    )
    fresh.setenv("CC", str(script(tmp_path / "old-cc", text)))
    assert kernels.why_not() is None
    x = in_float16s_range(100_003)
    assert_same(
        stochastic(x, torch.bfloat16, KEY), by_pytorch(x, torch.bfloat16, overflow="infinity")
    )


# ---- the cache ----


def counting_compiler(folder: Path, together: int = 1) -> tuple[Path, Callable[[], int]]:
    """A compiler that writes a line to a file each time it runs, and how often that was.

    It begins once it was called `together` times.
    """
    log = folder / "compiled.log"
    wait = f'while [ $(wc -l < "{log}") -lt {together} ]; do sleep 0.01; done'
    text = f'echo once >> "{log}"\n{wait}\nexec "{COMPILER}" "$@"'

    def count() -> int:
        return len(log.read_text(encoding="utf-8").splitlines()) if log.exists() else 0

    return script(folder / "counting-cc", text), count


@needs_compiler
def test_a_library_is_compiled_once_per_combination_and_kept(
    fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler, count = counting_compiler(tmp_path)
    fresh.setenv("CC", str(compiler))
    first = kernels.load("round.c", {"TO": "BF16"})
    once = count()
    assert once >= 1
    assert kernels.load("round.c", {"TO": "BF16"}) is first
    clear_caches()  # as in the next process
    kernels.load("round.c", {"TO": "BF16"})
    assert count() == once
    kernels.load("round.c", {"TO": "BF16", "SATURATE": None})
    assert count() > once
    assert kernels.cache_folder() == tmp_path / "cache" / "mprun" / "kernels"


@needs_compiler
def test_changed_sources_are_compiled_anew(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler, count = counting_compiler(tmp_path)
    fresh.setenv("CC", str(compiler))
    sources = tmp_path / "sources"
    shutil.copytree(kernels.SOURCES, sources)
    fresh.setattr(kernels, "SOURCES", sources)
    kernels.load("round.c", {"TO": "F16"})
    before = count()
    header = sources / "formats.h"
    header.write_text(header.read_text(encoding="utf-8") + "\n/* */\n", encoding="utf-8")
    clear_caches()
    kernels.load("round.c", {"TO": "F16"})
    assert count() > before


PROGRAM = """
import ctypes, json, sys
from mprun.precision import kernels
library = kernels.load("round.c", {"TO": "BF16"})
count = 1000
numbers = (ctypes.c_float * count)(*[1 + n / 997 for n in range(count)])
out = (ctypes.c_uint16 * count)()
words = [ctypes.c_uint32(word) for word in (0, 5, 7)]
library.round_stochastic(numbers, out, ctypes.c_int64(count), *words, ctypes.c_int(1))
print(json.dumps({"bits": list(out), "folder": str(kernels.cache_folder())}))
"""


def expected_of_program() -> list[int]:
    x = torch.tensor([1 + n / 997 for n in range(1000)])
    bits = bits_of(by_pytorch(x, torch.bfloat16, "infinity", Key(5, 7)))
    return (bits.int() & 0xFFFF).tolist()


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    made = Programs()
    yield made
    made.close()


def printed(programs: Programs, process: int, out: Path) -> dict[str, Any]:
    """What a process of `PROGRAM` prints, once it has ended well."""
    status = programs.wait(process)
    text = out.read_text(encoding="utf-8")
    assert status == 0, text
    found: dict[str, Any] = json.loads(text)
    return found


@needs_compiler
def test_processes_that_compile_at_once_both_work(programs: Programs, tmp_path: Path) -> None:
    """The compiler of the first waits for that of the second; each loads a whole library."""
    compiler, count = counting_compiler(tmp_path, together=2)
    environment = {"CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    outs = [tmp_path / "first.txt", tmp_path / "second.txt"]
    processes = [programs.start(PROGRAM, environment, out) for out in outs]
    for process, out in zip(processes, outs, strict=True):
        assert printed(programs, process, out)["bits"] == expected_of_program()
    assert count() == 2
    folder = tmp_path / "cache" / "mprun" / "kernels"
    assert all(file.suffix == ".so" for file in folder.iterdir())


@needs_compiler
def test_a_library_that_was_cut_short_is_compiled_again(programs: Programs, tmp_path: Path) -> None:
    """A process that calls into the missing part of a library ends with SIGBUS."""
    folder, whole = tmp_path / "cache" / "mprun" / "kernels", b""
    for length in (None, 5000, 0):
        if length is not None:
            (library,) = folder.iterdir()
            library.write_bytes(whole[:length])
        out = tmp_path / f"{length}.txt"
        process = programs.start(PROGRAM, {"XDG_CACHE_HOME": str(tmp_path / "cache")}, out)
        assert printed(programs, process, out)["bits"] == expected_of_program()
        (library,) = folder.iterdir()
        whole = whole or library.read_bytes()
        assert library.read_bytes() == whole


@needs_compiler
@pytest.mark.usefixtures("fresh")
def test_what_a_killed_process_left_of_its_compiler_is_removed_after_a_while(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "cache" / "mprun" / "kernels"
    abandoned, of_another = folder / "compiling-abandoned", folder / "compiling-now"
    for scratch in (abandoned, of_another):
        scratch.mkdir(parents=True)
    os.utime(abandoned, (0, 0))
    kernels.load("round.c", {"TO": "BF16"})
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["compiling-now"]


@pytest.fixture
def scratch(fresh: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    fresh.setattr("tempfile.tempdir", str(folder))
    return folder


def assert_compiled_in(scratch: Path) -> None:
    assert kernels.why_not() is None
    assert kernels.cache_folder().parent == scratch
    x = in_float16s_range(1000)
    assert_same(stochastic(x, torch.float16, KEY), by_pytorch(x, torch.float16, "infinity"))


@needs_compiler
def test_a_folder_for_one_process_is_removed_at_its_end(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    (tmp_path / "scratch").mkdir()
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "scratch")}
    process = programs.start(PROGRAM, environment, tmp_path / "out.txt")
    found = printed(programs, process, tmp_path / "out.txt")
    assert Path(found["folder"]).parent == tmp_path / "scratch"
    assert list((tmp_path / "scratch").iterdir()) == []


@needs_compiler
@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder closed to root as well")
def test_a_cache_folder_that_is_there_but_takes_no_files_is_replaced(
    tmp_path: Path, scratch: Path
) -> None:
    """As one that another user made; the root user may write to any, but not to /proc."""
    (tmp_path / "cache" / "mprun").mkdir(parents=True)
    (tmp_path / "cache" / "mprun" / "kernels").symlink_to("/proc/self")
    assert_compiled_in(scratch)
