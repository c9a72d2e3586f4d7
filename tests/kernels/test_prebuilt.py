"""The library of a wheel: built with a compiler, used without one, with the bits of PyTorch."""

from __future__ import annotations

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

from mprun import kernels
from mprun.kernels import prebuilt
from mprun.optim import LowPrecisionOptimizer, engines
from mprun.precision import rounding as rounding_module
from mprun.precision.random_bits import key, random_bits
from mprun.precision.rounding import DTYPES as LOW
from mprun.precision.rounding import OVERFLOWS, SERIAL, round_twice, stochastic
from tests.kernels.test_kernels import assert_same, by_pytorch, edges, random_patterns
from tests.optim import DTYPES, MAKE, RULES, STORED, moment_options, unlike
from tests.optim.test_engines import ran
from tests.optim.test_shards import CUTS, FAR, SIZE, check_far, stepped, unlike_entries

ROOT = Path(__file__).resolve().parents[2]
KEY = key(1, 2, 3, 0)
PARTS = ("setup.py", "pyproject.toml", "README.md", "mprun", "conf", "recipes")
LEVELS = (0, 256, 512)

needs_compiler = pytest.mark.skipif(not kernels._compiler(), reason="there is no C compiler here")


def wheel(folder: Path, **environment: str) -> Path:
    """A wheel of a copy of the sources, unpacked; its name is the folder's."""
    copy = folder / "sources"
    for part in PARTS:
        if (ROOT / part).is_file():
            copy.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / part, copy)
        else:
            ignored = shutil.ignore_patterns("_prebuilt.*", "__pycache__")
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-q"]
    done = subprocess.run(
        [*command, "-w", str(folder), str(copy)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (made,) = folder.glob("*.whl")
    zipfile.ZipFile(made).extractall(folder / made.stem)
    return folder / made.stem


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels' folder of a wheel that was built here."""
    return wheel(tmp_path_factory.mktemp("wheel")) / "mprun" / "kernels"


def forget() -> None:
    for cached in (
        *(kernels.why_not, kernels._load, prebuilt.library),
        *(rounding_module._library, engines._library, engines._compiles),
    ):
        cached.cache_clear()


@pytest.fixture
def without_compiler(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of that wheel, on a machine without a compiler."""
    monkeypatch.setattr(prebuilt, "FOLDER", installed)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(installed / "nowhere"))
    forget()
    yield
    forget()


@pytest.fixture(params=LEVELS)
def level(
    request: pytest.FixtureRequest, without_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Each level in turn, as on a processor that has no more."""
    wanted: int = request.param
    if wanted not in prebuilt.levels():
        pytest.skip(f"this processor has no vectors of {wanted} bits")
    monkeypatch.setattr(prebuilt, "levels", lambda: [wanted])
    return wanted


@needs_compiler
@pytest.mark.usefixtures("without_compiler")
def test_the_wheels_library_is_used_where_there_is_no_compiler() -> None:
    assert kernels.why_not() is None
    assert kernels.origin() == (f"compiled at installation ({kernels.NO_COMPILER})")
    assert engines.fastest(torch.device("cpu")) == "c"
    assert prebuilt.levels()[-1] == 0


@needs_compiler
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", MAKE)
def test_a_step_has_the_bits_of_eager_for_every_storage_and_rule(name: str) -> None:
    """Three formats of each moment, in turn: all of them meet each storage and rule somewhere."""
    moments = list(product(DTYPES, DTYPES))
    for number, (stored, rule) in enumerate(product(STORED, RULES)):
        options: dict[str, Any] = {"rounding": rule[0], "overflow": rule[1]}
        options |= moment_options(name, *moments[number % len(moments)])
        a, b = (ran(name, engine, stored, options, (1, 1003)) for engine in ("c", "eager"))
        assert unlike(a, b) == [], (stored, options)


@needs_compiler
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", MAKE)
def test_shards_have_the_bits_of_the_whole(name: str) -> None:
    moments = list(product(LOW, LOW))
    for number, (stored, rule) in enumerate(product(STORED, RULES)):
        options: dict[str, Any] = {"rounding": rule[0], "overflow": rule[1]}
        options |= moment_options(name, *moments[number % len(moments)])
        whole = stepped(name, "eager", stored, options, (0, SIZE))
        shards = stepped(name, "c", stored, options, CUTS)
        assert unlike_entries(shards, whole) == [], (stored, options)


@needs_compiler
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_shards_far_into_a_parameter(dtype: torch.dtype) -> None:
    for start in FAR:
        check_far(start, dtype, "c")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.usefixtures("without_compiler", "threads")
def test_neither_sizes_nor_threads_change_a_bit() -> None:
    sizes = (511, 512, 513, SERIAL - 1, SERIAL, 2**16 + 3)
    options: dict[str, Any] = {"rounding": "kahan", **moment_options("adamw", *LOW)}

    def steps(engine: str) -> LowPrecisionOptimizer:
        return ran("adamw", engine, (torch.float16, torch.float16), options, sizes)

    expected = steps("eager")
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        assert unlike(steps("c"), expected) == [], count


@needs_compiler
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_rounding_has_the_bits_of_pytorch(dtype: torch.dtype, overflow: str) -> None:
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


@pytest.mark.parametrize("kind", BROKEN)
def test_an_installation_never_fails_for_want_of_a_compiler(kind: str, tmp_path: Path) -> None:
    made = wheel(tmp_path, CC=BROKEN[kind])
    assert made.name.endswith("py3-none-any")
    assert not list((made / "mprun" / "kernels").glob("_prebuilt*"))
    assert (made / "mprun" / "kernels" / "prebuilt.c").is_file()


@needs_compiler
def test_a_wheel_is_for_one_platform_and_every_python(installed: Path) -> None:
    name = installed.parents[1].name
    assert "-py3-none-" in name
    assert not name.endswith("any")


@needs_compiler
@pytest.mark.usefixtures("without_compiler")
def test_a_library_of_other_sources_is_refused(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a checkout whose sources changed after it was installed."""
    other = tmp_path / "kernels"
    shutil.copytree(installed, other)
    source = other / "prebuilt.c"
    source.write_text(source.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    monkeypatch.setattr(prebuilt, "FOLDER", other)
    forget()
    reason = kernels.why_not()
    assert reason == kernels.NO_COMPILER
    assert "was built from other sources: install mprun again" in kernels.origin()
    (library,) = other.glob("_prebuilt.*")
    library.unlink()  # this process has loaded it
    library.write_bytes(b"no library")
    forget()
    assert kernels.why_not() == reason
    library.unlink()
    forget()
    assert kernels.origin().endswith("mprun was installed without compiled kernels")


@needs_compiler
@pytest.mark.usefixtures("without_compiler")
def test_no_kernels_when_none_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPRUN_NO_KERNELS", "1")
    forget()
    assert kernels.why_not() == "MPRUN_NO_KERNELS is set"
    assert engines.fastest(torch.device("cpu")) == "eager"


REQUIRES = "from setuptools import build_meta; print(build_meta.get_requires_for_build_wheel())"


@pytest.mark.parametrize("command", ["", "no-such-compiler -m64", f"'{sys.executable}' -O"])
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
    monkeypatch.setattr(prebuilt, "FOLDER", installed)
    prebuilt.library.cache_clear()
    made = [n for n in LEVELS if hasattr(prebuilt.library(), f"mprun_update_{n}")]
    for capability, best in (("DEFAULT", 0), ("AVX2", 256), ("AVX512", 512), ("SVE256", 0)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        assert prebuilt.levels() == [n for n in reversed(made) if n <= best]
    prebuilt.library.cache_clear()
