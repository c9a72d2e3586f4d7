"""The weights of a run's last checkpoint, written for other programs.

    model.safetensors    tensors by name, without code (`safetensors`)
    model.pt             `torch.save(model.state_dict())`
    a folder             what the model's own `save_pretrained` writes (Hugging Face)

Weights keep the dtype that the run stored them in. Names of one tied parameter share memory, which
safetensors refuses: it gets the first name; `train.init_from` and Hugging Face's libraries know the
others from the model.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from mprun.errors import UsageError, first_line
from mprun.records.files import write_atomic
from mprun.train import checkpoint
from mprun.train.weights_file import SUFFIX

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
LEGAL = "legal is NAME.safetensors, NAME.pt (a state_dict), or a folder for save_pretrained"


def weights_of(run: Path) -> dict[str, Tensor]:
    """The model's state in a run's last checkpoint, on the CPU, by name.

    Raises:
        UsageError: there is no checkpoint, or it is damaged.
    """
    saved = checkpoint.load(run)
    if saved is None:
        raise UsageError(
            f"{run} has no checkpoint ({checkpoint.path_in(run)} is missing); a run writes one at "
            "its end, or earlier with train.checkpoint_every_steps"
        )
    state = checkpoint.weights(saved, checkpoint.path_in(run))
    known = isinstance(state, Mapping) and len(state) > 0
    if not known or not all(isinstance(x, Tensor) for x in state.values()):
        raise UsageError(f"{checkpoint.path_in(run)} contains no weights by name")
    return {str(name): tensor.detach() for name, tensor in state.items()}


def write_file(state: Mapping[str, Tensor], path: Path, facts: Mapping[str, str]) -> None:
    """Write weights into a file whose name says in which form.

    Args:
        state: the weights.
        path: the file, which must not exist.
        facts: about the run; they become the metadata of a safetensors file.

    Raises:
        UsageError: the file exists, or its form is not known.
        OSError: it cannot be written.
    """
    if path.exists():
        raise UsageError(f"{path} exists already; choose another name")
    if path.suffix == SUFFIX:
        write_atomic(path, _safetensors(state, facts))
        return
    if path.suffix not in TORCH_SUFFIXES:
        raise UsageError(f"{path}: {LEGAL}")
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_atomic(path, buffer.getvalue())


def write_pretrained(model: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Let a model of Hugging Face's libraries write itself and its configuration into a folder.

    Args:
        model: as the recipe makes it.
        state: its weights, whose dtypes it takes over.
        folder: a new or empty one.

    Raises:
        UsageError: the model cannot do that, or the folder has files in it.
    """
    save = getattr(model, "save_pretrained", None)
    if not callable(save):
        raise UsageError(
            f"{folder} is a folder, and {type(model).__name__} has no save_pretrained; {LEGAL}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} has files in it already; choose another folder")
    own = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in state.items():
        if name in own:
            own[name].data = own[name].data.to(tensor.dtype)
    try:
        model.load_state_dict(dict(state))
    except RuntimeError as error:
        raise UsageError(
            f"the weights do not fit the recipe's model: {first_line(error)}"
        ) from None
    save(folder)


def _safetensors(state: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    places: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():  # the first name of a tied parameter
        storage = tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)
        places.setdefault((storage, tensor.storage_offset(), tuple(tensor.shape)), name)
    whole = {name: state[name].contiguous().clone() for name in places.values()}
    return save(whole, metadata={"format": "pt", **facts})
