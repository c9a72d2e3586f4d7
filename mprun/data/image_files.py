"""The files of MNIST and FashionMNIST: their folder, and whether they are the published ones.

A set is four files, in the data folder's layout of torchvision:

    MNIST/raw/train-images-idx3-ubyte    MNIST/raw/t10k-images-idx3-ubyte
    MNIST/raw/train-labels-idx1-ubyte    MNIST/raw/t10k-labels-idx1-ubyte

A file is good if it has the published SHA-256. The size only distinguishes an interrupted download
(truncated) from changed bytes (corrupt).
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from mprun.errors import UsageError
from mprun.records.reader import open_regular

SHA256 = {
    "MNIST": {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "FashionMNIST": {
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
}

SIZE_BYTES = {
    "train-images-idx3-ubyte": 16 + 60_000 * 28 * 28,
    "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 10_000 * 28 * 28,
    "t10k-labels-idx1-ubyte": 8 + 10_000,
}
"""Of either set's files: a header (4 bytes of type, 4 per dimension), then a byte per value."""

MAX_TIMES = 16
"""A file that is larger than the published one by this factor is not read."""


@dataclass(frozen=True)
class FileState:
    """The state of one file of a set."""

    path: Path
    """Where it belongs."""
    state: Literal["ok", "missing", "damaged"]
    """ok is what has the published SHA-256."""
    detail: str = ""
    """Actual and expected content in one line; empty for a good file."""


def find_root(root: str | None) -> Path:
    """The folder of the data sets: `root`, else MPRUN_DATA, else mprun's cache folder.

    Raises:
        UsageError: it starts with `~` and there is no such home folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = root or os.environ.get("MPRUN_DATA") or f"{cache}/mprun"
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise UsageError(
            f"the data folder {folder}: there is no such home folder; set data.root or MPRUN_DATA"
        ) from None


def raw_folder(name: str, root: Path) -> Path:
    """The folder of a set's files."""
    return root / name / "raw"


def is_complete(name: str, root: Path) -> bool:
    """Whether all four files of the set exist; `check` tests whether they are good."""
    return all((raw_folder(name, root) / file).is_file() for file in SHA256[name])


def check(name: str, root: Path) -> list[FileState]:
    """The state of each of the set's files, in the order of the table."""
    return [
        _check_file(raw_folder(name, root) / file, SIZE_BYTES[file], expected)
        for file, expected in SHA256[name].items()
    ]


def _check_file(path: Path, size: int, expected: str) -> FileState:
    published = f"expected {size} bytes with SHA-256 {expected}"
    try:
        with open_regular(path, MAX_TIMES * size) as file:
            actual_size = os.fstat(file.fileno()).st_size
            actual = _sha256(file)
    except (FileNotFoundError, NotADirectoryError):
        return FileState(path, "missing", published)
    except OSError as error:
        return FileState(path, "damaged", f"cannot be read ({error.strerror}), {published}")
    if actual == expected:
        return FileState(path, "ok")
    kind = "truncated" if actual_size < size else "too long" if actual_size > size else "corrupt"
    return FileState(
        path, "damaged", f"{kind}: {actual_size} bytes with SHA-256 {actual}, {published}"
    )


def sha256(path: Path) -> str:
    """The SHA-256 of a regular file's content in hexadecimal, read a megabyte at a time."""
    with open_regular(path) as file:
        return _sha256(file)


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def fetch_command(names: Iterable[str], root: Path) -> str:
    """The command that repairs these sets, quoted for a shell."""
    return shlex.join(["mprun", "data", "fetch", *names, f"data.root={root}"])
