"""Text as windows of characters: tiny-shakespeare, a file of the user's, or Python's own library.

A language model of characters learns to predict each next one. A sample is a window of T
characters with the T that follow one later. Training windows start at every character of the text,
so a batch is T characters from B random places, as in nanoGPT.

Characters are numbered in the order of their code points, as many as the vocabulary has. If the
text has more of them, the rarest share the last number: so one model fits every text.

tiny-shakespeare has 65 different characters. Without it and without a network,
`data.source=generated` takes the sources of Python's standard library, which every machine has: a
text as long, of another kind, whose losses compare with no published figure.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mprun.errors import UsageError
from mprun.records.reader import open_regular
from mprun.train.data.batches import TensorSet
from mprun.train.data.sources import (
    DataRequest,
    DownloadError,
    Splits,
    fetching,
    find_root,
    reason,
    sha256,
)

TINY_SHAKESPEARE = "TinyShakespeare"
FILE = "input.txt"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SIZE_BYTES = 1_115_394  # And characters: it is ASCII
MAX_BYTES = 1 << 30  # Of a user's file; a larger text is not one for models of this size
MAX_VOCABULARY = 256  # Characters are stored as bytes


def text_splits(
    path: str | None, context: int, vocabulary: int, request: DataRequest, targets: bool = True
) -> Splits:
    """Windows of a text as bytes.

    Args:
        path: the user's text in UTF-8; None for tiny-shakespeare.
        context: characters per window, T.
        vocabulary: numbers that a character can have, at most 256.
        request: the last part of the text, `validation_fraction`, is held out.
        targets: whether samples are pairs of inputs [N, T] and targets [N, T], the characters one
            later; else windows [N, T].

    Raises:
        UsageError: the text is not available, not UTF-8, too short, or not the published one.
    """
    text, name, source, notice = _text(path, request)
    ids, replaced = encode(text, vocabulary)
    held_out = round(len(ids) * request.validation_fraction)
    # more than `context`: the targets of a window end one character later
    if not context < min(held_out or len(ids), len(ids) - held_out):
        raise UsageError(
            f"{name} has {len(ids)} characters, {held_out} of them held out for validation "
            f"(data.validation_fraction={request.validation_fraction}); legal is more than "
            f"context={context} in either part"
        )
    if replaced:
        share = f"{replaced / len(ids):.2%} of the characters are not among the {vocabulary - 1} "
        share += "most frequent and share one number; a larger recipe.model.vocabulary keeps more"
        notice = f"{notice}; {share}" if notice else share
    train, validation = ids[: len(ids) - held_out], ids[len(ids) - held_out :]
    none = windows(train, context, 1, targets).first(0)
    # side by side, so that every held-out character counts once
    held = windows(validation, context, context, targets) if held_out else none
    splits = Splits(name, source, windows(train, context, 1, targets), held, none, notice=notice)
    return splits.limited(request)


def text_sample(context: int, targets: bool = True) -> TensorSet:
    """One sample shaped like those of `text_splits`, of any value."""
    return windows(torch.zeros(context + 1, dtype=torch.uint8), context, 1, targets)


def windows(ids: Tensor, context: int, stride: int, targets: bool) -> TensorSet:
    """Windows of `context` characters, one every `stride`; views of `ids`."""
    inputs = ids[:-1].unfold(0, context, stride)
    return TensorSet(inputs, ids[1:].unfold(0, context, stride)) if targets else TensorSet(inputs)


def encode(text: str, vocabulary: int) -> tuple[Tensor, int]:
    """The number of each character as a byte [N], and how many characters share the last number."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)  # 4 bytes per code point
    counts = np.bincount(codes)
    present = np.flatnonzero(counts)
    numbered = present
    if len(present) > vocabulary:
        # stable: of equally frequent characters the first code points, on every machine
        by_count = np.argsort(-counts[present], kind="stable")
        numbered = np.sort(present[by_count[: vocabulary - 1]])
    numbers = np.full(len(counts), vocabulary - 1, dtype=np.uint8)
    numbers[numbered] = np.arange(len(numbered))
    return torch.from_numpy(numbers[codes]), int(len(codes) - counts[numbered].sum())


def _text(path: str | None, request: DataRequest) -> tuple[str, str, str, str | None]:
    """The text, its name, its source, and a sentence that the user must see, or None."""
    if path is not None:
        text = _read(Path(path).expanduser())
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return text, f"{Path(path).name} {digest}", "local", None  # another text is other data
    if request.source == "generated":
        return python_library(), _library_name(), "local", None
    root = find_root(request.root)
    try:
        source = _obtain(root)
    except DownloadError as error:
        if request.source == "auto" and request.fallback:
            notice = f"{TINY_SHAKESPEARE} is not available ({error}); training on {_library_name()}"
            return python_library(), _library_name(), "local", notice
        raise UsageError(
            f"{TINY_SHAKESPEARE} is not in {root} and its download failed ({error}); put the file "
            f"there as {TINY_SHAKESPEARE}/{FILE}, set data.root or MPRUN_DATA, or take a text of "
            "your own by recipe.model.text=FILE, or Python's library by data.source=generated"
        ) from None
    return _read(root / TINY_SHAKESPEARE / FILE), TINY_SHAKESPEARE, source, None


def _read(path: Path) -> str:
    try:
        with open_regular(path, MAX_BYTES) as file:
            return file.read().decode("utf-8")
    except OSError as error:
        problem = error.strerror or str(error)
        raise UsageError(f"the text {path} cannot be read: {problem}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"the text {path} is not UTF-8 (byte {error.start})") from None


# ---- tiny-shakespeare ----------------------------------------------------------------------------


def _obtain(root: Path) -> str:
    """Bring the published file into `root`, one process at a time: "local" or "download".

    Raises:
        DownloadError: no network, a full disk, a folder that cannot be written, a wrong checksum.
        UsageError: the file that is there is not the published one.
    """
    folder = root / TINY_SHAKESPEARE
    if _is_published(folder / FILE):
        return "local"
    from torchvision.datasets.utils import download_url

    with fetching(folder, root / f".{TINY_SHAKESPEARE}.lock") as temporary:
        if _is_published(folder / FILE):
            return "local"
        download_url(URL, str(temporary), FILE)
        if (actual := sha256(temporary / FILE)) != SHA256:
            raise DownloadError(f"the server sent another file, with SHA-256 {actual}")
        (temporary / FILE).replace(folder / FILE)
    return "download"


def _is_published(path: Path) -> bool:
    """Whether the file is there; raises `UsageError` for another file in its place."""
    try:
        actual = sha256(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DownloadError(reason(error)) from None
    if actual != SHA256:
        raise UsageError(
            f"{path} is not the published tiny-shakespeare: it has {path.stat().st_size} bytes "
            f"with SHA-256 {actual}, expected {SIZE_BYTES} with {SHA256}; delete it, and it is "
            "downloaded again, or give a text of your own by recipe.model.text=FILE"
        )
    return True


# ---- Python's standard library -------------------------------------------------------------------


def _library_name() -> str:
    return f"Python {platform.python_version()} standard library"


@cache
def python_library() -> str:
    """The sources of Python's standard library, as many characters as tiny-shakespeare has.

    The modules and packages' `__init__.py` in the order of their names, ASCII only, joined.

    Raises:
        UsageError: this Python is without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = ""
    for path in sorted(folder.glob("*.py")):
        content = path.read_bytes()
        if content.isascii():
            text += content.decode("ascii")
        if len(text) >= SIZE_BYTES:
            return text[:SIZE_BYTES]
    raise UsageError(
        f"{folder} has {len(text)} characters of Python's standard library, too few of "
        f"{SIZE_BYTES}; give a text by recipe.model.text=FILE"
    )
