"""The published files: where they are looked for, and how their state is told."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from mprun.errors import UsageError
from mprun.train.data import sources

IMAGES = "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("argument", "environment", "found"),
    [
        ("given", {"MPRUN_DATA": "set", "XDG_CACHE_HOME": "cache"}, "given"),
        (None, {"MPRUN_DATA": "set", "XDG_CACHE_HOME": "cache"}, "set"),
        (None, {"MPRUN_DATA": "", "XDG_CACHE_HOME": "cache"}, "cache/mprun"),
        (None, {"XDG_CACHE_HOME": "cache"}, "cache/mprun"),
        (None, {"HOME": "home"}, "home/.cache/mprun"),
        ("~/sets", {"HOME": "home"}, "home/sets"),
        (None, {"HOME": "home", "MPRUN_DATA": "~/sets"}, "home/sets"),
    ],
)
def test_the_root_is_the_argument_else_the_environments_else_the_cache(
    argument: str | None,
    environment: dict[str, str],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MPRUN_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert sources.find_root(argument) == Path(found)


def test_a_home_folder_that_does_not_exist_is_named() -> None:
    with pytest.raises(UsageError, match=r"the data folder ~nobody-here/x: there is no such home"):
        sources.find_root("~nobody-here/x")


def test_checksums_are_of_different_files_and_each_has_a_size() -> None:
    sums = [s for by_file in sources.SHA256.values() for s in by_file.values()]
    assert len(set(sums)) == 8
    assert all(re.fullmatch("[0-9a-f]{64}", s) for s in sums)
    assert all(list(by_file) == list(sources.SIZE_BYTES) for by_file in sources.SHA256.values())


@pytest.mark.parametrize(
    "content",
    [lambda b: b"", lambda b: b + b"?", lambda b: b[:-1] + bytes([b[-1] ^ 1])],
)
def test_damage_is_told_with_both_sizes_and_checksums(
    root: Path, published: dict[str, bytes], content: Callable[[bytes], bytes]
) -> None:
    good, path = published[IMAGES], root / "MNIST" / "raw" / IMAGES
    bad = content(good)
    path.write_bytes(bad)
    first, *others = sources.check("MNIST", root)
    assert first == sources.FileState(
        path,
        "damaged",
        f"{len(bad)} bytes with SHA-256 {sha256(bad).hexdigest()}, "
        f"expected {len(good)} bytes with SHA-256 {sha256(good).hexdigest()}",
    )
    assert {f.state for f in others} == {"ok"}


def test_what_is_not_there_is_missing(root: Path, published: dict[str, bytes]) -> None:
    raw = root / "MNIST" / "raw"
    for path in raw.iterdir():
        path.unlink()
    (raw / IMAGES).symlink_to("nowhere")
    found = sources.check("MNIST", root)
    assert {f.state for f in found} == {"missing"}
    size, known = len(published[IMAGES]), sha256(published[IMAGES]).hexdigest()
    assert found[0].detail == f"expected {size} bytes with SHA-256 {known}"
    raw.rename(root / "MNIST" / "elsewhere")
    raw.touch()
    assert {f.state for f in sources.check("MNIST", root)} == {"missing"}


def test_what_cannot_be_read_is_damaged(root: Path) -> None:
    path = root / "MNIST" / "raw" / IMAGES
    path.unlink()
    path.mkdir()
    found = sources.check("MNIST", root)[0]
    assert found.state == "damaged"
    assert found.detail.startswith("cannot be read (Is a directory), expected ")


def test_the_command_that_mends_can_be_pasted_into_a_shell() -> None:
    root = Path("my sets") / "it's"
    command = sources.fetch_command(["MNIST", "FashionMNIST"], root)
    assert shlex.split(command) == [
        *("mprun", "data", "fetch", "MNIST", "FashionMNIST"),
        f"data.root=my sets{os.sep}it's",
    ]


@pytest.mark.real_data
def test_the_real_files_have_the_known_sizes(real_root: Path) -> None:
    for name in sources.SHA256:
        for found in sources.check(name, real_root):
            assert found.state == "ok"
            assert found.path.stat().st_size == sources.SIZE_BYTES[found.path.name]
