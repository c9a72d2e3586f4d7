"""Weights as other programs save them: safetensors, nested in a dictionary, with prefixed names.

A safetensors file begins with the length of a JSON header (8 bytes), which has each tensor's dtype,
shape and place. It holds no code. Its weights may be divided over several files, with an index: a
JSON file whose `weight_map` has the file of each tensor. Tied parameters are saved once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mprun.records.reader import open_regular

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
IN_FOLDER = (f"model{SUFFIX}", f"model{INDEX_SUFFIX}")
"""Names of the weights in a folder that Hugging Face's libraries wrote."""
MOST_INDEX_BYTES = 2**26
NESTED = ("state_dict", "model_state_dict", "model")
"""Keys under which training programs keep the weights in a dictionary."""
PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before the names of a model."""


class DamagedSafetensorsError(ValueError):
    """Why a file or index is damaged."""


def is_safetensors(file: Path) -> bool:
    """Whether a file's name is that of safetensors, or of their index."""
    return file.name.endswith((SUFFIX, INDEX_SUFFIX))


def load_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors by name, on the CPU.

    Raises:
        OSError: it cannot be read.
        DamagedSafetensorsError: it is no such file.
    """
    state: dict[str, Tensor] = {}
    for part in _parts(file):
        open_regular(part).close()
        try:
            state |= load_file(part)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise DamagedSafetensorsError(f"{part.name}: {error}") from None
    return state


def _parts(file: Path) -> list[Path]:
    """The file, or those that an index names, which lie beside it."""
    if not file.name.endswith(INDEX_SUFFIX):
        return [file]
    if file.stat().st_size > MOST_INDEX_BYTES:
        raise DamagedSafetensorsError(f"an index is at most {MOST_INDEX_BYTES:,} bytes")
    try:
        names = sorted(set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()))
        plain = all(Path(name).name == name and name.endswith(SUFFIX) for name in names)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedSafetensorsError("it has no weight_map from names to files") from None
    if not plain or not names:
        raise DamagedSafetensorsError("its weight_map names other files than *.safetensors here")
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
