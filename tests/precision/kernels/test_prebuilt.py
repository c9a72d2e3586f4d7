"""The library of a wheel: built with a compiler, used without one, with the bits of PyTorch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from mprun.optim import engines
from mprun.precision import kernels
from mprun.precision import rounding as rounding_module
from mprun.precision.random_bits import key, random_bits
from mprun.precision.rounding import DTYPES as LOW
from mprun.precision.rounding import OVERFLOWS, round_twice, stochastic
from tests.each import each
from tests.optim import DTYPES, MAKE, RULES, STORED, moment_options
from tests.optim.test_shards import CUTS, FAR, SIZE, check_far, stepped, unlike_entries
from tests.precision.kernels.test_kernels import assert_same, by_pytorch, edges
from tests.precision.test_rounding import random_patterns

ROOT = Path(__file__).resolve().parents[3]
KEY = key(1, 2, 3, 0)
PARTS = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "mprun", "conf", "recipes")
LEVELS = (0, 256, 512)

COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler here")


def sources(folder: Path) -> Path:
    """A copy of the sources."""
    copy = folder / "sources"
    for part in PARTS:
        if (ROOT / part).is_file():
            copy.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / part, copy)
        else:
            ignored = shutil.ignore_patterns("_prebuilt.*", "__pycache__")
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
    return copy


def unpacked(folder: Path) -> Path:
    """The one wheel in a folder, unpacked; its name is the folder's."""
    (made,) = folder.glob("*.whl")
    zipfile.ZipFile(made).extractall(folder / made.stem)
    return folder / made.stem


def wheel(folder: Path, **environment: str) -> Path:
    """A wheel of a copy of the sources, unpacked."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-q"]
    done = subprocess.run(
        [*command, "-w", str(folder), str(sources(folder))],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return unpacked(folder)


@pytest.fixture(
    scope="module", params=["installed", pytest.param("built", marks=pytest.mark.exhaustive)]
)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels' folder with the library of this installation, or else of a wheel built here.

    Compiling takes seven seconds. An installation of other sources does not count.
    """
    kernels.library.cache_clear()
    if request.param == "installed" and not isinstance(kernels.library(), str):
        return kernels.FOLDER
    return wheel(tmp_path_factory.mktemp("wheel")) / "mprun" / "precision" / "kernels"


@pytest.fixture(scope="module")
def fresh_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels' folder of a wheel that was built here, by a compiler that optimizes nothing."""
    folder = tmp_path_factory.mktemp("fresh")
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" -O0\n')
    compiler.chmod(0o755)
    return wheel(folder, CC=str(compiler)) / "mprun" / "precision" / "kernels"


def use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on as if mprun was installed with the kernels of this folder."""
    monkeypatch.setattr(kernels, "FOLDER", folder)
    forget()


def forget() -> None:
    kernels.library.cache_clear()
    kernels._function.cache_clear()


@pytest.fixture
def without_compiler(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of that installation, on a machine without a compiler."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(installed / "nowhere"))
    use(installed, monkeypatch)
    yield
    forget()


@pytest.fixture
def levels(without_compiler: None) -> list[int]:
    """Those that this processor has."""
    found = kernels.levels()
    assert 0 in found
    return found


def only(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on as on a processor that has this one alone."""
    monkeypatch.setattr(kernels, "levels", lambda: [level])


@needs_compiler
@pytest.mark.usefixtures("without_compiler")
def test_the_wheels_library_is_used_where_there_is_no_compiler(
    fresh_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(fresh_wheel, monkeypatch)
    assert kernels.why_not() is None
    assert kernels.origin() == "compiled at installation"
    assert engines.fastest(torch.device("cpu"), "adamw") == "c"
    assert kernels.levels()[-1] == 0
    x = torch.cat([random_patterns(1000), edges()])
    for dtype, overflow in product(LOW, OVERFLOWS):
        found = stochastic(x, dtype, KEY, overflow)
        assert_same(found, by_pytorch(x, dtype, overflow))


@needs_compiler
@each("name", MAKE)
def test_shards_have_the_bits_of_the_whole(
    name: str, levels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three formats of each moment, in turn: all of them meet each storage and rule somewhere."""
    moments = list(product(DTYPES, DTYPES))
    for number, (stored, rule) in enumerate(product(STORED, RULES)):
        options: dict[str, Any] = {"rounding": rule[0], "overflow": rule[1]}
        options |= moment_options(name, *moments[number % len(moments)])
        whole = stepped(name, "eager", stored, options, (0, SIZE))
        for level in levels:
            only(level, monkeypatch)
            shards = stepped(name, "c", stored, options, CUTS)
            assert unlike_entries(shards, whole) == [], (level, stored, options)


@needs_compiler
def test_shards_far_into_a_parameter(levels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for level in levels:
        only(level, monkeypatch)
        for dtype, start in product(LOW, FAR):
            check_far(start, dtype, "c")


@needs_compiler
@each("overflow", OVERFLOWS)
@each("dtype", LOW, ids=str)
def test_a_rounding_has_the_bits_of_pytorch(
    dtype: torch.dtype, overflow: str, levels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for level in levels:
        only(level, monkeypatch)
        check_rounding(dtype, overflow)


def check_rounding(dtype: torch.dtype, overflow: str) -> None:
    x = torch.cat([random_patterns(300_000), random_patterns(1000).half().float(), edges()])
    expected = by_pytorch(x, dtype, overflow)
    assert_same(stochastic(x, dtype, KEY, overflow), expected)
    for start in FAR:  # of a shard
        part, bits = x[:SIZE], random_bits(KEY, SIZE, start=start)
        of_part = rounding_module.round_stochastic(part, dtype, bits, overflow)
        assert_same(stochastic(part, dtype, KEY, overflow, start), of_part)
    for words in (KEY, None):
        wide = torch.empty_like(x)
        rounded = round_twice(x, dtype, words, overflow, wide)
        assert rounded is not None
        if words is not None:
            assert_same(rounded, expected)
        else:
            assert_same(rounded, rounding_module.round_nearest(x, dtype, overflow))
        assert_same(wide, rounded.float())


BROKEN = {
    "missing": "/nowhere/cc",
    "failing": "false",
    "no command line": "cc '-DX",
}


# What pip calls, each time in a process of its own: it keeps what it found.
BUILDS = """
import json, os, sys
from setuptools import build_meta

for compiler, folder in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        os.environ["CC"] = compiler
        build_meta.build_wheel(folder)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, compiler
"""


def test_an_installation_never_fails_for_want_of_a_compiler(tmp_path: Path) -> None:
    folders = [tmp_path / kind for kind in BROKEN]
    for folder in folders:
        folder.mkdir()
    jobs = [(cc, str(folder)) for cc, folder in zip(BROKEN.values(), folders, strict=True)]
    done = subprocess.run(
        [sys.executable, "-c", BUILDS, json.dumps(jobs)],
        cwd=sources(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for folder in folders:
        made = unpacked(folder)
        assert made.name.endswith("py3-none-any"), folder.name
        assert not list((made / "mprun" / "precision" / "kernels").glob("_prebuilt*")), folder.name
        assert (made / "mprun" / "precision" / "kernels" / "prebuilt.c").is_file()


@needs_compiler
def test_a_wheel_is_for_one_platform_and_every_python(fresh_wheel: Path) -> None:
    name = fresh_wheel.parents[2].name
    assert "-py3-none-" in name
    assert not name.endswith("any")


@needs_compiler
@pytest.mark.usefixtures("without_compiler")
def test_a_library_of_other_sources_is_refused(
    fresh_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a checkout whose sources changed after it was installed."""
    other = tmp_path / "kernels"
    shutil.copytree(fresh_wheel, other)
    source = other / "prebuilt.c"
    source.write_text(source.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    monkeypatch.setattr(kernels, "FOLDER", other)
    forget()
    with pytest.warns(RuntimeWarning, match="was built from other sources: install mprun again"):
        reason = kernels.why_not()
    assert reason is not None
    assert kernels.origin() == f"none: {reason}"


@needs_compiler
@pytest.mark.usefixtures("without_compiler")
def test_no_kernels_when_none_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPRUN_NO_KERNELS", "1")
    forget()
    assert kernels.why_not() == "MPRUN_NO_KERNELS is set"
    assert engines.fastest(torch.device("cpu"), "adamw") == "eager"


REQUIRES = "from setuptools import build_meta; print(build_meta.get_requires_for_build_wheel())"


@each("command", ["", "no-such-compiler -m64", f"'{sys.executable}' -O"])
def test_an_installation_without_a_compiler_asks_pip_for_one(tmp_path: Path, command: str) -> None:
    """CC names a compiler that is there, or one that is not, or there is no CC and no PATH."""
    for part in PARTS:
        (tmp_path / part).symlink_to(ROOT / part)
    done = subprocess.run(
        [sys.executable, "-c", REQUIRES],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": "", "CC": command},
        check=True,
    )
    wanted = "[]" if "python" in command else "['ziglang>=0.13']"
    assert done.stdout.splitlines()[-1] == wanted


def test_the_level_is_what_pytorch_finds_of_the_processor(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "FOLDER", installed)
    kernels.library.cache_clear()
    made = [n for n in LEVELS if hasattr(kernels.library(), f"mprun_update_{n}")]
    for capability, best in (("DEFAULT", 0), ("AVX2", 256), ("AVX512", 512), ("SVE256", 0)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        assert kernels.levels() == [n for n in reversed(made) if n <= best]
    kernels.library.cache_clear()
