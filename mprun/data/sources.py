"""MNIST and FashionMNIST: found on disk, else downloaded, else (when asked) generated.

Files are looked for in one folder: `data.root`, else the environment's MPRUN_DATA, else mprun's
cache; there they lie as torchvision lays them (`MNIST/raw/train-images-idx3-ubyte`, ...). Every
file is checked against the SHA-256 of the published one before it is used: a truncated download
that trains to a worse accuracy would be taken for an effect of the precision.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout

from mprun.data.batches import TensorSet
from mprun.data.generated import draw
from mprun.errors import UsageError

LOCK_TIMEOUT_S = 600.0
"""How long to wait for another process that downloads the same set."""
DOWNLOAD_TIMEOUT_S = 20.0
"""How long a silent connection is waited for."""

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


@dataclass(frozen=True)
class DataRequest:
    """What the configuration asks of a recipe's data, in plain values."""

    source: str = "auto"
    """auto, real or generated."""
    root: str | None = None
    """Folder of the data sets, or None for MPRUN_DATA or the cache."""
    fallback: bool = False
    """Whether source=auto may end with the generated set."""
    validation_fraction: float = 0.0
    """Share of the training set, its last part, held out."""
    train_limit: int | None = None
    """At most this many training samples."""
    eval_limit: int | None = None
    """At most this many validation and test samples each."""
    seed: int = 0
    """The run's seed, for recipes that draw their data."""


@dataclass(frozen=True)
class Splits:
    """A recipe's samples, and where they came from."""

    name: str
    """The set's name."""
    source: str
    """local, download or generated."""
    train: TensorSet
    validation: TensorSet
    test: TensorSet
    shuffle: bool = True
    """Whether epochs visit the training samples in random order."""
    notice: str | None = None
    """A sentence the user must see before the run, or None."""


def image_splits(name: str, request: DataRequest) -> Splits:
    """MNIST or FashionMNIST as bytes [N, 1, 28, 28] and class indices [N] (int64).

    Raises:
        UsageError: a file is damaged, or nothing can be had and no fallback was asked for.
    """
    train, test, source, notice = _load(name, request)
    kept = len(train) - round(len(train) * request.validation_fraction)
    if kept < 1:
        raise UsageError(
            f"data.validation_fraction={request.validation_fraction} leaves no training sample"
        )
    train, validation = train.split(kept)
    return Splits(
        name if source != "generated" else "generated glyphs",
        source,
        train.first(request.train_limit),
        validation.first(request.eval_limit),
        test.first(request.eval_limit),
        notice=notice,
    )


def _load(name: str, request: DataRequest) -> tuple[TensorSet, TensorSet, str, str | None]:
    if request.source == "generated":
        return *draw(), "generated", None
    root = find_root(request.root)
    try:
        source = "local" if is_complete(name, root) else download(name, root)
        return *read(name, root), source, None
    except DownloadError as error:
        if request.source == "auto" and request.fallback:
            notice = f"{name} could not be had ({error}); training on the GENERATED set instead"
            return *draw(), "generated", notice
        raise UsageError(
            f"{name} is not in {root} and its download failed ({error}); "
            f"put the files there as torchvision does ({name}/raw/...), set data.root or "
            "MPRUN_DATA, or take data.source=generated"
        ) from None


def find_root(root: str | None) -> Path:
    """The one folder to look in: `root`, else MPRUN_DATA, else mprun's cache folder."""
    chosen = root or os.environ.get("MPRUN_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mprun"


def is_complete(name: str, root: Path) -> bool:
    """Whether all four files of the set are there (their content is checked by `read`)."""
    return all((root / name / "raw" / file).is_file() for file in SHA256[name])


class DownloadError(Exception):
    """The set could not be downloaded; the text says why, in a few words."""


def download(name: str, root: Path) -> str:
    """Fetch the set into `root` by torchvision's download; one process at a time.

    The files appear in their place when they are whole: whoever looks without the lock, or after a
    download that broke off, meets a file or none, never half of one.

    Returns:
        "download", or "local" where another process completed the set meanwhile.

    Raises:
        DownloadError: no network, a full disk, a folder that cannot be written, a wrong checksum.
    """
    raw = root / name / "raw"
    try:
        raw.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{name}.lock", timeout=LOCK_TIMEOUT_S), _timeout():
            if is_complete(name, root):
                return "local"
            with TemporaryDirectory(prefix=".download-", dir=raw) as folder:
                with contextlib.redirect_stdout(None):
                    _dataset(name)(folder, download=True)
                for file in SHA256[name]:
                    (Path(folder) / name / "raw" / file).replace(raw / file)
            return "download"
    except Timeout:
        raise DownloadError(f"another process has been at it for {LOCK_TIMEOUT_S:.0f} s") from None
    except (OSError, RuntimeError) as error:
        raise DownloadError(_reason(error)) from None
    except HTTPException as error:
        raise DownloadError(f"the server's answer is broken: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The last line of a message, which names the last mirror's error, without urllib's wrapping."""
    line = (str(error).strip() or type(error).__name__).splitlines()[-1]
    reason = re.sub(r"^<urlopen error (.*)>$", r"\1", line)
    reason = re.sub(r"^\[Errno -?\d+\] ", "", reason).rstrip(".")
    return f"no answer in {DOWNLOAD_TIMEOUT_S:g} s" if reason == "timed out" else reason


@contextlib.contextmanager
def _timeout() -> Iterator[None]:
    """torchvision opens its connections without a timeout; they take the process's default."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _dataset(name: str) -> Any:
    from torchvision import datasets

    return getattr(datasets, name)


def read(name: str, root: Path) -> tuple[TensorSet, TensorSet]:
    """The set's training and test part from local files.

    Raises:
        UsageError: a file differs from the published one.
    """
    for file, expected in SHA256[name].items():
        path = root / name / "raw" / file
        found = _sha256(path)
        if found != expected:
            raise UsageError(
                f"{path} is damaged: {path.stat().st_size} bytes with SHA-256 {found}, "
                f"expected {expected}; delete it and run again to download it anew"
            )
    return _read_part(root / name / "raw", "train"), _read_part(root / name / "raw", "t10k")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _read_part(raw: Path, prefix: str) -> TensorSet:
    """One part from the files that were checked (a dataset object may take older ones beside)."""
    from torchvision.datasets.mnist import read_image_file, read_label_file

    images = read_image_file(str(raw / f"{prefix}-images-idx3-ubyte"))
    return TensorSet(images.unsqueeze(1), read_label_file(str(raw / f"{prefix}-labels-idx1-ubyte")))
