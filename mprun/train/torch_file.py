"""Tensors in files, which may come from anyone: of `torch.save`, and safetensors.

`torch.load(weights_only=True)` runs no code. It does not bound the work: a byte of a pickle makes
an object of 200 bytes, and a call of `bytearray` one of any size. So the archive is checked
(`records/reader.py`), and then the size of its pickles, before anything is made of them.

A safetensors file holds no code. Its weights may be divided over several files, with an index: a
JSON file whose `weight_map` has the file of each tensor. Tied parameters are saved once.
"""

from __future__ import annotations

import json
import pickletools
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mprun.records.reader import ZIP, DamagedArchiveError, check_archive, open_regular, read_bytes

# A tensor takes about 150; a checkpoint of a model with 1,000 parameters half a million
MAX_PICKLE_BYTES = 2**23
# An older file begins with as many: magic number, version, system, content, keys of storages
LEGACY_PICKLES = 5
MAX_REPEATED_BYTES = 2**28  # An expanded tensor stores a value once; copying it stores all


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
    with warnings.catch_warnings():  # of an archive of TorchScript, which it refuses
        warnings.simplefilter("ignore")
        content = torch.load(path, map_location="cpu", weights_only=True)
    _check_sizes(content)
    return content


def _check_pickles(path: Path) -> None:
    """Refuse pickles that are large, or that name the one function that makes large objects."""
    with path.open("rb") as file:
        is_archive = file.read(len(ZIP)) == ZIP  # how PyTorch decides
        file.seek(0)
        content = _pickles_of(file) if is_archive else _legacy_pickles(file)
    if len(content) > MAX_PICKLE_BYTES:
        raise NotTensorsError(f"it has more than {MAX_PICKLE_BYTES:,} bytes beside its tensors")
    if b"bytearray" in content:
        raise NotTensorsError("it contains a bytearray")


def _pickles_of(file: BinaryIO) -> bytes:
    with zipfile.ZipFile(file) as archive:
        entries = [x for x in archive.infolist() if x.filename.endswith(".pkl")]
        return b"".join(archive.read(entry) for entry in entries)


def _legacy_pickles(file: BinaryIO) -> bytes:
    """The beginning of an older file, up to its storages: the ends of pickles say where."""
    for _ in range(LEGACY_PICKLES):
        for _ in pickletools.genops(file):
            if file.tell() > MAX_PICKLE_BYTES:
                break
    size = file.tell()
    file.seek(0)
    return file.read(size)


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
            if repeated_bytes > MAX_REPEATED_BYTES:
                raise NotTensorsError("tensors in it repeat few values many times")
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value


SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
# Names of the weights in a folder that Hugging Face's libraries wrote
IN_FOLDER = (f"model{SUFFIX}", f"model{INDEX_SUFFIX}")
MAX_INDEX_BYTES = 2**26
# Keys under which training programs keep the weights in a dictionary
NESTED = ("state_dict", "model_state_dict", "model")
# What DistributedDataParallel and torch.compile put before the names of a model
PREFIXES = ("module.", "_orig_mod.")


def is_safetensors(file: Path) -> bool:
    """Whether a file's name is that of safetensors, or of their index."""
    return file.name.endswith((SUFFIX, INDEX_SUFFIX))


def load_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors by name, on the CPU.

    Raises:
        OSError: it cannot be read.
        DamagedArchiveError: it is no such file.
    """
    state: dict[str, Tensor] = {}
    for part in _parts(file):
        open_regular(part).close()
        try:
            state |= load_file(part)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise DamagedArchiveError(f"{part.name}: {error}") from None
    return state


def _parts(file: Path) -> list[Path]:
    """The file, or those that an index names, which lie beside it."""
    if not file.name.endswith(INDEX_SUFFIX):
        return [file]
    data = read_bytes(file, MAX_INDEX_BYTES)
    try:
        names = sorted(set(json.loads(data)["weight_map"].values()))
        plain = all(Path(name).name == name and name.endswith(SUFFIX) for name in names)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedArchiveError("it has no weight_map from names to files") from None
    if not plain or not names:
        raise DamagedArchiveError("its weight_map names other files than *.safetensors here")
    return [file.parent / name for name in names]


def nested(content: Any) -> Any:
    """The weights in a dictionary of a training program, or `content` itself."""
    if isinstance(content, Mapping) and not _all_tensors(content):
        for key in NESTED:
            if _all_tensors(content.get(key)):
                return content[key]
    return content


def _all_tensors(content: Any) -> bool:
    is_mapping = isinstance(content, Mapping) and len(content) > 0
    return is_mapping and all(isinstance(x, Tensor) for x in content.values())


def without_prefix(loaded: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights without the prefixes of wrappers, unless the model's names begin so too."""
    state = dict(loaded)
    while state and not set(state) & set(model):
        prefix = next((x for x in PREFIXES if all(key.startswith(x) for key in state)), None)
        if prefix is None:
            return dict(loaded)
        state = {key.removeprefix(prefix): tensor for key, tensor in state.items()}
    return state


def with_tied(loaded: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights with every name of a tied parameter of which one name is known."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    state = dict(loaded)
    for tied in names.values():
        if known := [name for name in tied if name in loaded]:
            state |= {name: loaded[known[0]] for name in tied if name not in loaded}
    return state
