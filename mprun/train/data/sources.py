"""MNIST and FashionMNIST: from disk, else downloaded, else (if asked for) generated.

Files are read from one folder: `data.root`, else the environment's MPRUN_DATA, else mprun's cache.
A set is four files there, in the layout of torchvision (MNIST/raw/train-images-idx3-ubyte, ...).
Each file's SHA-256 is compared with the published one before it is used. Otherwise a truncated
download, which trains to a worse accuracy, could be mistaken for an effect of the precision.

The generated set has ten classes, each a glyph of a few strokes; it is drawn from a seed. A sample
is its class's glyph under a random rotation, scale, shear, shift and stroke width, with the
strokes' ends wobbling, dimmed and with noise.

Its purpose is to show that a run works. Accuracies on it are not those of MNIST, and every place
that shows one is labelled "generated".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from mprun.errors import UsageError
from mprun.records.reader import open_regular
from mprun.train.data.batches import TensorSet
from mprun.train.data.loader_sets import LoadedSet

SEED = 20_240_229  # Another one draws other images, whose accuracies compare with no earlier run's
TRAIN_SAMPLES = 60_000  # These sizes are MNIST's
TEST_SAMPLES = 10_000
SIDE = 28
CHUNK = 2_000  # samples drawn at once: some 30 MB of distances; another size draws other samples

# Strokes (x0, y0, x1, y1) in a frame from -1 to 1; y points down.
GLYPHS: tuple[tuple[tuple[float, float, float, float], ...], ...] = (
    (
        (-0.6, -0.8, 0.6, -0.8),
        (0.6, -0.8, 0.6, 0.8),
        (0.6, 0.8, -0.6, 0.8),
        (-0.6, 0.8, -0.6, -0.8),
    ),
    ((0.0, -0.9, 0.0, 0.9), (-0.4, -0.5, 0.0, -0.9)),
    ((-0.6, -0.8, 0.6, -0.8), (0.6, -0.8, -0.6, 0.8), (-0.6, 0.8, 0.6, 0.8)),
    ((-0.7, -0.7, 0.7, 0.7), (-0.7, 0.7, 0.7, -0.7)),
    ((-0.6, -0.8, -0.6, 0.1), (-0.6, 0.1, 0.6, 0.1), (0.5, -0.8, 0.5, 0.8)),
    ((-0.8, 0.0, 0.8, 0.0), (0.0, -0.8, 0.0, 0.8)),
    ((0.0, -0.9, -0.8, 0.7), (-0.8, 0.7, 0.8, 0.7), (0.8, 0.7, 0.0, -0.9)),
    ((-0.7, -0.8, 0.7, -0.8), (0.0, -0.8, 0.0, 0.9)),
    ((-0.6, -0.9, -0.6, 0.9), (0.6, -0.9, 0.6, 0.9), (-0.6, 0.0, 0.6, 0.0)),
    ((-0.8, -0.8, 0.0, 0.8), (0.0, 0.8, 0.8, -0.8)),
)


@cache
def draw() -> tuple[TensorSet, TensorSet]:
    """The training and the test part: images [N, 1, 28, 28] of bytes, classes [N] (int64)."""
    generator = torch.Generator().manual_seed(SEED)
    train, test = (_draw_part(n, generator) for n in (TRAIN_SAMPLES, TEST_SAMPLES))
    return train, test


def _draw_part(samples: int, generator: torch.Generator) -> TensorSet:
    classes = torch.randint(0, len(GLYPHS), (samples,), generator=generator)
    images = torch.empty(samples, 1, SIDE, SIDE, dtype=torch.uint8)
    strokes, used = _glyph_table()
    for start in range(0, samples, CHUNK):
        part = classes[start : start + CHUNK]
        images[start : start + CHUNK, 0] = _draw_chunk(strokes[part], used[part], generator)
    return TensorSet(images, classes)


def _glyph_table() -> tuple[Tensor, Tensor]:
    """Strokes padded to one length [10, S, 2 ends, 2], and which of them are real [10, S]."""
    most = max(len(g) for g in GLYPHS)
    strokes = torch.zeros(len(GLYPHS), most, 2, 2)
    used = torch.zeros(len(GLYPHS), most, dtype=torch.bool)
    for i, glyph in enumerate(GLYPHS):
        strokes[i, : len(glyph)] = torch.tensor(glyph).view(-1, 2, 2)
        used[i, : len(glyph)] = True
    return strokes, used


def _draw_chunk(strokes: Tensor, used: Tensor, generator: torch.Generator) -> Tensor:
    """Images [B, 28, 28] of bytes from strokes [B, S, 2, 2] and their mask [B, S].

    The brightness of a pixel is a soft step of its distance to the nearest stroke.
    """
    n = len(strokes)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(n, *shape, generator=generator) * (high - low) + low

    # enough variation that a model has to learn, little enough that the recipes reach over 90 %
    angle, shear = uniform(-0.25, 0.25), uniform(-0.2, 0.2)  # in radians: at most 14 degrees
    scale_x, scale_y = uniform(0.5, 0.8), uniform(0.5, 0.8)
    cos, sin = angle.cos(), angle.sin()
    column_x = torch.stack([cos, sin], dim=1) * scale_x[:, None]
    column_y = torch.stack([shear * cos - sin, shear * sin + cos], dim=1) * scale_y[:, None]
    transform = torch.stack([column_x, column_y], dim=2).unsqueeze(1)
    # the transform moves the strokes' ends, so their widths stay round
    ends = (strokes + uniform(-0.12, 0.12, *strokes.shape[1:])) @ transform.mT
    ends = ends + uniform(-0.12, 0.12, 1, 1, 2)

    distance = _distance(ends[:, :, 0], ends[:, :, 1])
    distance = distance.masked_fill(~used[:, :, None], torch.inf).amin(1)
    width = uniform(0.05, 0.13, 1)
    # 30: the edge of a stroke is one to two pixels wide; a pixel is 2/28
    ink = torch.sigmoid((width - distance) * 30) * uniform(0.6, 1.0, 1)
    noise = torch.randn(n, SIDE * SIDE, generator=generator) * uniform(0.0, 0.12, 1)
    return ((ink + noise).clamp(0, 1) * 255).to(torch.uint8).view(n, SIDE, SIDE)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Distance [B, S, 784] of each pixel's centre to the segments from a to b [B, S, 2].

    For a pixel p, with t = clamp((p - a).(b - a) / |b - a|^2, 0, 1), it is |p - (a + t (b - a))|.
    """
    axis = (torch.arange(SIDE) + 0.5) * (2 / SIDE) - 1
    x, y = axis.repeat(SIDE), axis.repeat_interleave(SIDE)
    (ax, ay), (dx, dy) = a.unsqueeze(-1).unbind(2), (b - a).unsqueeze(-1).unbind(2)
    # strokes that pad a glyph have no length; their distances are left out afterwards
    length = (dx.square() + dy.square()).clamp_min(1e-6)
    t = (((x - ax) * dx + (y - ay) * dy) / length).clamp(0, 1)
    return torch.hypot(x - ax - t * dx, y - ay - t * dy)


# Of the unpacked files: torchvision has only the MD5 of the packed ones
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

# Of either set's files: a header (4 bytes of type, 4 per dimension), then a byte per value
SIZE_BYTES = {
    "train-images-idx3-ubyte": 16 + 60_000 * 28 * 28,
    "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 10_000 * 28 * 28,
    "t10k-labels-idx1-ubyte": 8 + 10_000,
}

MAX_TIMES = 16  # A file that is larger than the published one by this factor is not read


@dataclass(frozen=True)
class FileState:
    """The state of one file of a set."""

    path: Path  # Where it belongs
    state: Literal["ok", "missing", "damaged"]  # ok is what has the published SHA-256
    detail: str = ""  # Actual and expected content in one line; empty for a good file


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
    return [_check_file(raw_folder(name, root) / file, name) for file in SHA256[name]]


def _check_file(path: Path, name: str) -> FileState:
    size, expected = SIZE_BYTES[path.name], SHA256[name][path.name]
    published = f"expected {size} bytes with SHA-256 {expected}"
    try:
        actual = sha256(path, MAX_TIMES * size)
    except (FileNotFoundError, NotADirectoryError):
        return FileState(path, "missing", published)
    except OSError as error:
        return FileState(path, "damaged", f"cannot be read ({error.strerror}), {published}")
    if actual == expected:
        return FileState(path, "ok")
    found = f"{path.stat().st_size} bytes with SHA-256 {actual}"
    return FileState(path, "damaged", f"{found}, {published}")


def sha256(path: Path, most_bytes: int | None = None) -> str:
    """The SHA-256 of a regular file's content in hexadecimal, read a megabyte at a time."""
    digest = hashlib.sha256()
    with open_regular(path, most_bytes) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch_command(names: Iterable[str], root: Path) -> str:
    """The command that repairs these sets, quoted for a shell."""
    return shlex.join(["mprun", "data", "fetch", *names, f"data.root={root}"])


# Servers by set; torchvision knows FashionMNIST's first one as a plain HTTP address
MIRRORS = {
    "MNIST": ("https://ossci-datasets.s3.amazonaws.com/mnist/",),
    "FashionMNIST": (
        "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
}
LOCK_TIMEOUT_S = 600.0  # How long to wait for another process that downloads the same set
DOWNLOAD = ".download-"  # How the names of temporary folders begin
DOWNLOAD_TIMEOUT_S = 20.0  # How long a silent connection is waited for


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
    train: TensorSet | LoadedSet
    validation: TensorSet | LoadedSet
    test: TensorSet | LoadedSet
    shuffle: bool = True
    """Whether epochs visit the training samples in random order."""
    notice: str | None = None
    """A sentence the user must see before the run, or None."""

    def limited(self, request: DataRequest) -> Splits:
        """The first samples of each part, as many as the request wants."""
        train, most = self.train.first(request.train_limit), request.eval_limit
        validation, test = self.validation.first(most), self.test.first(most)
        return replace(self, train=train, validation=validation, test=test)


def image_splits(name: str, request: DataRequest) -> Splits:
    """MNIST or FashionMNIST as bytes [N, 1, 28, 28] and class indices [N] (int64).

    Raises:
        UsageError: a file is damaged, or none is available and no fallback was asked for.
    """
    train, test, source, notice = _load(name, request)
    name = name if source != "generated" else "generated glyphs"
    return replace(held_out(name, source, train, test, request), notice=notice)


def held_out(
    name: str, source: str, known: TensorSet, test: TensorSet, request: DataRequest
) -> Splits:
    """Splits whose validation samples are the last of the known ones, within the request's limits.

    Raises:
        UsageError: the request leaves no training sample.
    """
    held_in = len(known) - round(len(known) * request.validation_fraction)
    if held_in < 1:
        raise UsageError(
            f"data.validation_fraction={request.validation_fraction} leaves no training sample"
        )
    train, validation = known.split(held_in)
    return Splits(name, source, train, validation, test).limited(request)


def image_sample() -> TensorSet:
    """One sample shaped like those of `image_splits`, of any value."""
    return TensorSet(
        torch.empty(1, 1, 28, 28, dtype=torch.uint8), torch.empty(1, dtype=torch.int64)
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
            notice = f"{name} is not available ({error}); training on the GENERATED set instead"
            return *draw(), "generated", notice
        raise UsageError(
            f"{name} is not in {root} and its download failed ({error}); "
            f"try again with `{fetch_command([name], root)}`, put the files there as torchvision "
            f"does ({name}/raw/...), set data.root or MPRUN_DATA, or take data.source=generated"
        ) from None


class DownloadError(Exception):
    """The set could not be downloaded; the text is the reason."""


def download(name: str, root: Path) -> str:
    """Bring what is missing or damaged of the set into `root`; one process at a time.

    Good files are not touched. The result is "download", or "local" if nothing was downloaded.

    Raises:
        DownloadError: no network, a full disk, a folder that cannot be written, a wrong checksum.
    """
    raw = raw_folder(name, root)
    with fetching(raw, root / f".{name}.lock") as folder:
        missing = [f.path.name for f in check(name, root) if f.state != "ok"]
        for file in missing:
            _obtain(name, file, folder)
        # not before all are whole: a reader without the lock never gets half of a file
        for file in missing:
            (folder / file).replace(raw / file)
    return "download" if missing else "local"


@contextlib.contextmanager
def fetching(target: Path, lock: Path) -> Iterator[Path]:
    """Inside, this process alone brings files into the folder `target`; others wait for `lock`.

    It gives a temporary folder in `target`, from which files are moved to their places.

    Raises:
        DownloadError: no network, a full disk, a folder that cannot be written, a wrong checksum.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        before = socket.getdefaulttimeout()  # of the process: torchvision passes none to urllib
        with FileLock(lock, timeout=LOCK_TIMEOUT_S), contextlib.ExitStack() as stack:
            stack.callback(socket.setdefaulttimeout, before)
            socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
            for left in target.glob(f"{DOWNLOAD}*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with TemporaryDirectory(prefix=DOWNLOAD, dir=target) as folder:
                yield Path(folder)
    except Timeout:
        raise DownloadError(
            f"another process has held the lock for {LOCK_TIMEOUT_S:.0f} s"
        ) from None
    # the second is torchvision's, of a wrong checksum; the third is no OSError
    except (OSError, RuntimeError, HTTPException) as error:
        raise DownloadError(reason(error)) from None


def _obtain(name: str, file: str, folder: Path) -> None:
    """Download a file into `folder`."""
    from torchvision import datasets
    from torchvision.datasets.utils import download_and_extract_archive

    resources = getattr(datasets, name).resources
    packed, md5 = next(r for r in resources if r[0] == f"{file}.gz")
    # Unpacked is only what has the published MD5, so an archive that unpacks to terabytes is not.
    failure: Exception = DownloadError("no server is known")
    for mirror in MIRRORS[name]:
        try:
            with contextlib.redirect_stdout(None):  # some versions print what they do
                download_and_extract_archive(f"{mirror}{packed}", folder, folder, packed, md5)
            break
        except (OSError, RuntimeError, HTTPException) as error:
            failure = error
    else:
        raise failure
    if sha256(folder / file) != SHA256[name][file]:
        raise DownloadError(f"{packed} does not hold the published file")


def reason(error: Exception) -> str:
    """The last line of a message, without urllib's wrapping."""
    line = (str(error).strip() or type(error).__name__).splitlines()[-1]
    reason = re.sub(r"^<urlopen error (.*)>$", r"\1", line)
    reason = re.sub(r"^\[Errno -?\d+\] ", "", reason).rstrip(".")
    return f"no answer in {DOWNLOAD_TIMEOUT_S:g} s" if reason == "timed out" else reason


def read(name: str, root: Path) -> tuple[TensorSet, TensorSet]:
    """The set's training and test part from local files.

    Raises:
        UsageError: a file is missing or differs from the published one.
    """
    for file in check(name, root):
        if file.state != "ok":
            raise UsageError(
                f"{file.path} is {file.state}: {file.detail}; "
                f"repair it with `{fetch_command([name], root)}`"
            )
    # Not by torchvision's readers: to import them takes 1.2 s of a run's start. The files were
    # checked, so a header of 4 bytes for the magic number and 4 for each size is left out.
    raw = raw_folder(name, root)
    tensors = [
        torch.from_numpy(
            np.fromfile(raw / file, dtype=np.uint8, offset=16 if "idx3" in file else 8)
        )
        for file in SHA256[name]
    ]
    train, test = (
        TensorSet(images.view(-1, 1, SIDE, SIDE), labels.long())
        for images, labels in (tensors[:2], tensors[2:])
    )
    return train, test
