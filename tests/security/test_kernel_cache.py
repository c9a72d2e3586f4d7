"""Compiled kernels are code: only this user may have written what is loaded."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mprun.precision import kernels
from mprun.precision.kernels import prebuilt

needs_compiler = pytest.mark.skipif(not kernels._compiler(), reason="there is no C compiler here")
needs_users = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="the system has no users")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, which new files are open to all in; as in a new process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MPRUN_NO_COMPILER", raising=False)
    monkeypatch.setattr(prebuilt, "library", lambda: "hidden")  # compiled here, or not at all
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    before = os.umask(0)
    anew()
    yield tmp_path / "cache" / "mprun" / "kernels"
    os.umask(before)
    anew()


def anew() -> None:
    for cached in (kernels.why_not, kernels._load, kernels.cache_folder):
        cached.cache_clear()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def make_cache(cache: Path) -> None:
    """The folder as an earlier version made it, its parents closed to others."""
    cache.mkdir(parents=True)
    for path in (cache, *cache.parents[:2]):
        path.chmod(0o755)


def assert_private(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cache is not used, with one line about it; the process has a folder of its own."""
    folder = kernels.cache_folder()
    assert folder != cache
    assert folder.parent == Path(tempfile.gettempdir())
    assert mode(folder) == 0o700
    line, *rest = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {cache} is not used for compiled kernels: ")
    assert not rest


@needs_compiler
def test_folder_and_libraries_are_closed_to_others(cache: Path) -> None:
    make_cache(cache)
    cache.chmod(0o777)  # of an earlier version, under such a umask
    assert kernels.why_not() is None
    assert kernels.cache_folder() == cache
    assert mode(cache) == 0o700
    assert [mode(library) & 0o077 for library in cache.iterdir()] == [0]


@needs_compiler
@pytest.mark.parametrize("kind", ["open to others", "link"])
def test_a_library_that_others_may_have_written_is_not_loaded(
    cache: Path, kind: str, tmp_path: Path
) -> None:
    make_cache(cache)
    assert kernels.why_not() is None
    (library,) = cache.iterdir()
    planted = bytes(library.stat().st_size)
    (tmp_path / "planted").write_bytes(planted)
    if kind == "link":
        library.unlink()
        library.symlink_to(tmp_path / "planted")
    else:  # another file: this process has loaded the first one
        (tmp_path / "planted").chmod(0o722)
        (tmp_path / "planted").replace(library)
    anew()
    assert kernels.why_not() is None  # compiled again: the planted file is no library
    (library,) = cache.iterdir()
    assert library.read_bytes() != planted
    assert not library.is_symlink()


@needs_users
def test_a_folder_of_another_user_is_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_cache(cache)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert_private(cache, capsys)


@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_that_others_may_replace_is_not_used(
    cache: Path, above: int, capsys: pytest.CaptureFixture[str]
) -> None:
    make_cache(cache)
    parent = cache.parents[above]
    before = mode(parent)
    parent.chmod(0o777)
    try:
        assert_private(cache, capsys)
    finally:
        parent.chmod(before)


def test_a_sticky_folder_above_is_no_reason(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_cache(cache)
    cache.parents[1].chmod(0o1777)  # as /tmp
    assert kernels.cache_folder() == cache
    assert capsys.readouterr().err == ""


def test_a_linked_folder_is_not_used(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_cache(cache)
    cache.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    cache.symlink_to(tmp_path / "elsewhere")
    assert_private(cache, capsys)
    assert mode(tmp_path / "elsewhere") == 0o755
