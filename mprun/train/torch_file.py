"""Reading files of `torch.save`, which may come from anyone.

`weights_only=True` runs no code. It does not bound the work: a byte of a pickle makes an object of
200 bytes, or one of any size by a call such as `bytearray(10**10)`. So the archive is checked
(`records/torch_archive.py`), and then its pickles, before anything is made of them. A file of
`torch.save` calls a few functions alone.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from mprun.records.torch_archive import ZIP, check_archive

MOST_OPCODES = 4_000_000
"""A tensor takes about 40; a checkpoint of a model with 1,000 parameters 100,000."""
LEGACY_PICKLES = 5
"""An older file begins with as many: magic number, version, system, content, keys of storages."""
MOST_REPEATED_BYTES = 2**28
"""An expanded tensor stores a value once; copying it stores all."""
GLOBALS = re.compile(
    r"collections OrderedDict"
    r"|torch (\w+Storage|Tensor|Size|device|b?float\d+\w*|u?int\d+|bool|complex\d+)"
    r"|torch\.storage (Untyped|Typed)Storage"
    r"|torch\._utils _rebuild_(tensor(_v[23])?|parameter(_with_state)?)"
    r"|torch\._utils _rebuild_(sparse_tensor|meta_tensor_no_storage)"
    r"|torch\.serialization _get_layout"
    r"|torch\.nn\.parameter Parameter"
    r"|torch\._tensor _rebuild_from_type_v2"
    r"|_codecs encode"
    r"|(builtins|__builtin__) (set|complex)"
)
"""Names, as `module name`, that a file may take from Python: tensors and plain values."""


class NotTensorsError(ValueError):
    """The file is no collection of tensors and plain values; the text is the reason."""


def load_torch_file(path: Path) -> Any:
    """The content of a file of `torch.save`, on the CPU.

    Raises:
        OSError: it cannot be read.
        DamagedArchiveError: it is no whole archive.
        NotTensorsError: it contains anything but tensors and plain values, or would become much
            larger in memory than it is.
        Exception: of any other kind, for a damaged file.
    """
    check_archive(path)
    _check_pickles(path)
    content = torch.load(path, map_location="cpu", weights_only=True)
    _check_sizes(content)
    return content


def _check_pickles(path: Path) -> None:
    """Refuse pickles with other names than `GLOBALS`, or with too many objects."""
    budget = iter(range(MOST_OPCODES))
    with path.open("rb") as file:
        is_archive = file.read(len(ZIP)) == ZIP  # how PyTorch decides
        file.seek(0)
        if not is_archive:
            for _ in range(LEGACY_PICKLES):
                _check_pickle(file, budget)
            return
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(".pkl"):
                    _check_pickle(io.BytesIO(archive.read(entry)), budget)


def _check_pickle(file: IO[bytes], budget: Iterator[int]) -> None:
    for opcode, argument, _ in pickletools.genops(file):
        if next(budget, None) is None:
            raise NotTensorsError(f"it makes more than {MOST_OPCODES:,} objects")
        if opcode.name == "GLOBAL" and not GLOBALS.fullmatch(str(argument)):
            raise NotTensorsError(f"it contains {str(argument).replace(' ', '.')}")


def _check_sizes(content: Any) -> None:
    """Refuse tensors that stand for many more values than the file has."""
    seen: set[int] = set()
    repeated_bytes = 0
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            strided = value.layout == torch.strided and not value.is_meta
            if strided:
                repeated_bytes += max(0, value.nbytes - value.untyped_storage().nbytes())
            if repeated_bytes > MOST_REPEATED_BYTES:
                raise NotTensorsError("tensors in it repeat few values many times")
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
