"""Shards in files: each process writes its parts, by `torch.distributed.checkpoint`.

A checkpoint of a sharded run has two places. `last.pt`, which the first process writes, has all
that is small, and in place of each cut tensor one on the device meta, of the same shape and dtype.
The folder beside it has the parts, as safetensors, which hold no code:

    checkpoints/last.pt
    checkpoints/shards-120/shard-00001-model-00001-of-00004.safetensors    of the first process

No process ever holds a whole tensor while it writes, and any number of processes reads: a file says
where in the whole tensor its part lies. Training goes on while a thread writes a copy. So a process
holds its parts twice meanwhile, and one file's bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from mprun.train.parallel.ranks import lost

# Files of each process, if its tensors are of one size: safetensors makes a file in memory before
# it writes it. A file begins to be written when a sixteenth of the parts are in it, so it is larger
# only where one tensor is.
FILES = 16


class DamagedShardsError(ValueError):
    """Why the files of shards cannot be read."""


def without_shards(state: Any) -> tuple[Any, dict[str, str], dict[str, DTensor]]:
    """Take the shards out of a state.

    Returns:
        The state with a tensor on the device meta, of the whole shape, in place of each shard;
        names of shards that are others under another name, to those others' names; and the shards
        by their names: their places in the state.
    """
    shards: dict[str, DTensor] = {}
    names: dict[int, str] = {}
    tied: dict[str, str] = {}

    def take(name: str, value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value
        first = names.setdefault(id(value), name)  # a tied parameter is one object in the state
        if first == name:
            part: Any = value.detach()
            shards[name] = part
        else:
            tied[name] = first
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return _mapped(take, state), tied, shards


def write(shards: Mapping[str, DTensor], folder: Path, group: ProcessGroup | None) -> Future[None]:
    """Copy this process's parts, and begin to write them; all processes call it.

    Args:
        shards: by name, in the same order in all processes.
        folder: a new folder, the same one for all.
        group: processes that are connected for this alone; it works on the CPU.

    Returns:
        Done when all processes have written; its error is that of any of them (OSError), or that
        another process is gone (PeerLostError).
    """
    # safetensors takes no tensor that is not contiguous
    local = {name: as_part(x.to_local().contiguous(), x) for name, x in shards.items()}
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_number_files(shards), save_distributed=True
    )
    written: Any = async_save(
        dict(local),
        storage_writer=writer,
        process_group=group,
        # neither pinned nor shared memory, no thread, no copy beside the device's work: some of
        # them need CUDA, and the next step may change the tensors once this returns
        async_stager=DefaultStager(StagingOptions(False, False, False, False)),
    )
    ended: Future[None] = Future()

    def end(written: Future[Any]) -> None:
        error = written.exception()
        if isinstance(error, CheckpointException):  # by process; any of the errors will do
            error = next(iter(error.failures.values()))[0]
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(lost(error) or error)

    written.add_done_callback(end)
    return ended


def read(
    state: Any, tied: Mapping[str, str], folder: Path, empty: Callable[[Tensor], Tensor]
) -> Any:
    """The state with its shards.

    Args:
        state: as `without_shards` left it.
        tied: the names that it gave.
        folder: the shards.
        empty: makes what a shard is read into, whole or this process's part of it; its argument has
            the whole shape, and no values.

    Raises:
        OSError: a file cannot be read.
        DamagedShardsError: a shard is missing, or has another shape or dtype.
    """
    wanted: dict[str, Tensor] = {}

    def note(name: str, value: Tensor) -> None:
        if value.is_meta:
            wanted[tied.get(name, name)] = value

    _mapped(note, state)
    for file in folder.iterdir():
        if file.is_symlink():  # in a stranger's checkpoint it may lead out of the folder
            raise DamagedShardsError(f"{file} is a link")
    reader = HuggingFaceStorageReader(str(folder))
    try:
        saved = reader.read_metadata().state_dict_metadata
        for name, x in wanted.items():
            _check(name, x, saved.get(name))
        filled: dict[str, Any] = {name: empty(x) for name, x in wanted.items()}
        with warnings.catch_warnings():  # each process reads on its own, and DCP says so
            warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
            load(filled, storage_reader=reader, no_dist=True)
    except (SafetensorError, KeyError, TypeError, AttributeError, CheckpointException) as error:
        raise DamagedShardsError(f"{folder} is damaged: {error}") from None
    return _mapped(lambda name, x: filled[tied.get(name, name)] if x.is_meta else x, state)


def _check(name: str, wanted: Tensor, saved: Any) -> None:
    """Refuse a shard that is not there as a whole: what it lacks would be left to chance."""
    if saved is None:
        raise DamagedShardsError(f"the shards lack {name}")
    values = sum(prod(chunk.sizes) for chunk in saved.chunks)
    if saved.size != wanted.shape or values != wanted.numel():
        raise DamagedShardsError(
            f"the shards of {name} have {values:,} values of {list(saved.size)}, not of "
            f"{list(wanted.shape)}"
        )
    if saved.properties.dtype != wanted.dtype:
        raise DamagedShardsError(
            f"the shards of {name} are {saved.properties.dtype}, not {wanted.dtype}"
        )


def as_part(local: Tensor, whole: DTensor) -> DTensor:
    """This process's tensor as its part of one that is cut as `whole` is."""
    mesh, cut, shape, stride = whole.device_mesh, whole.placements, whole.shape, whole.stride()
    # shape and stride are given, because parts may differ in size, and a check would be an exchange
    return DTensor.from_local(local, mesh, cut, run_check=False, shape=shape, stride=stride)


def _number_files(shards: Mapping[str, DTensor]) -> dict[str, int]:
    """The number of the file of each tensor, from 1."""
    most = sum(x.nbytes for x in shards.values()) / FILES
    numbers: dict[str, int] = {}
    number, nbytes = 1, 0
    for name, value in shards.items():
        if nbytes and nbytes + value.nbytes > most:
            number, nbytes = number + 1, 0
        numbers[name] = number
        nbytes += value.nbytes
    return numbers


def _mapped(convert: Callable[[str, Tensor], Any], value: Any, name: str = "") -> Any:
    """A state with `convert(its place's name, tensor)` in place of each tensor."""
    if isinstance(value, Tensor):
        return convert(name, value)
    if isinstance(value, Mapping):
        return {k: _mapped(convert, v, f"{name}.{k}" if name else str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_mapped(convert, v, f"{name}.{k}") for k, v in enumerate(value)]
    return value
