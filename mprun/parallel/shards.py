"""Shards: each process holds a part of every parameter, by PyTorch's FSDP2 (`fully_shard`).

A block's parameters are gathered before it runs, and its gradients are summed and cut afterwards
(Zhao et al., "PyTorch FSDP", 2023). A parameter is cut along its first dimension into one
contiguous part per process.

What is gathered in which dtype follows the policy. Stored parameters keep their dtype. Under
autocast, the weights of linear layers and convolutions are gathered in the 16-bit dtype: autocast
would cast them to it anyway. All other modules (norms, embeddings, layers with products of 8 bits
or fewer) are wrapped on their own and gathered in float32, since they compute with their weights as
they are.

The optimizer gets each process's part as an ordinary tensor. So every optimizer that computes
element by element works, mprun's rounding ones too: they draw random bits by the element's index in
the whole parameter (`mark_shard`). The norm for clipping, and whether a gradient overflowed, are
those of all parts (`ShardCombine`).

Checkpoints hold each process's parts (see below): any number of processes resumes from them,
and one process too.

Shards in files: each process writes its parts, by `torch.distributed.checkpoint`.

A checkpoint of a sharded run has two places. `last.pt`, which the first process writes, has all
that is small, and the outline of the rest: in place of each cut tensor one on the device meta, of
the same shape and dtype. The folder beside it has the parts, as safetensors, which hold no code:

    checkpoints/last.pt
    checkpoints/shards-120/shard-00001-model-00001-of-00004.safetensors    of the first process

No process ever holds a whole tensor while it writes, and any number of processes reads: a file says
where in the whole tensor its part lies.

Writing has two phases. The tensors are copied, and training goes on; a thread writes the copy.
A process holds its parts twice meanwhile, and one file's bytes: safetensors makes a file in memory
before it writes it. So parts go into several files, `PIECES` for each process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as empty_parts
from torch.optim import Optimizer

from mprun._torch import own_parameters
from mprun.errors import RunFailedError
from mprun.numerics.model_blocks import blocks_of, cast_modules
from mprun.parallel.layouts import Compute, GroupLayout, Outline
from mprun.parallel.ranks import GroupRanks, Ranks, lost
from mprun.parallel.replicas import BufferMean, time_collectives
from mprun.precision import Combine
from mprun.precision.policy import Policy, torch_dtype
from mprun.precision.products import LOW
from mprun.precision.random_bits import NAME, mark_shard

Dtypes = tuple[torch.dtype, torch.dtype]
"""What a module's parameters are stored and gathered in."""


class ShardCombine(Combine):
    """Figures of all processes' parts."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def total_norm(self, norm: Tensor) -> Tensor:
        square = norm.detach().float().square()
        self._ranks.sum_tensors([square])
        return square.sqrt().to(norm.dtype)

    def overflow(self, flag: Tensor) -> Tensor:
        return self._ranks.largest(flag)


class ShardLayout(GroupLayout):
    """A part of every parameter in each process.

    Args:
        ranks: the processes.
        device: what they compute on.
        file_group: connects them, when all call it, to write checkpoints beside training.
    """

    kind = "fsdp2"

    def __init__(
        self,
        ranks: GroupRanks,
        device: torch.device,
        file_group: Callable[[], ProcessGroup | None] = lambda: None,
    ) -> None:
        super().__init__(ranks)
        self._file_group = file_group
        self.combine = ShardCombine(ranks)
        self._group = ranks
        self._mesh = init_device_mesh(device.type, (ranks.size,))
        self._own: dict[nn.Parameter, DTensor] = {}
        """Each process's parts, and the parameters that they are parts of."""

    def arrange(self, model: nn.Module, policy: Policy) -> None:
        names = {name: getattr(p, NAME, name) for name, p in model.named_parameters()}
        self._buffers = BufferMean(model, self.ranks)
        self._took_part = False
        for module, dtype in units(model, policy):
            rule = MixedPrecisionPolicy(
                param_dtype=dtype,
                reduce_dtype=torch_dtype(policy.reduce_dtype),
                cast_forward_inputs=False,
            )
            fully_shard(module, mesh=self._mesh, mp_policy=rule)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gradients are summed: the loss is a share
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                if self._mesh.device_type == "cpu":
                    time_collectives(module, self._group)
        parameters: Any = model.named_parameters()  # they are `DTensor`s now
        self._own = {self._part(p, names[name]): p for name, p in parameters}

    def _part(self, p: Any, name: str) -> nn.Parameter:
        own = nn.Parameter(p.to_local().detach(), requires_grad=p.requires_grad)
        mark_shard(own, name, self._rows(p)[0] * (p.numel() // max(1, len(p))))
        return own

    def _rows(self, p: Tensor) -> tuple[int, int]:
        """The first row of this process's part, and the end."""
        each = -(-len(p) // self.ranks.size)
        return min(self.ranks.rank * each, len(p)), min((self.ranks.rank + 1) * each, len(p))

    @contextmanager
    def trainable(self, model: nn.Module) -> Iterator[None]:
        part_of = {id(whole): own for own, whole in self._own.items()}
        places = [
            (own, name, p)
            for own in map(own_parameters, model.modules())
            for name, p in own.items()
            if p is not None
        ]
        try:
            for own, name, p in places:
                own[name] = part_of[id(p)]
            yield
        finally:
            for own, name, p in places:
                own[name] = p

    def compute(self, compute: Compute, size: int, is_last: bool) -> tuple[Tensor, Any]:
        result = compute()
        self._took_part |= size > 0
        if is_last:
            self._buffers.begin(self._took_part)
        return result

    def end_backward(self) -> None:
        for own, whole in self._own.items():
            gradient: Any = whole.grad
            own.grad = None if gradient is None else gradient.to_local()
            whole.grad = None
        self._buffers.finish()
        self._took_part = False

    def model_state(self, model: nn.Module) -> Mapping[str, Any]:
        return model.state_dict(keep_vars=True)  # a tied parameter is one object

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        own = model.state_dict()
        if own.keys() != state.keys():
            missing = sorted(own.keys() ^ state.keys())
            raise ValueError(f"the model's state differs in {', '.join(missing)[:200]}")
        with torch.no_grad():
            for name, value in own.items():
                target = value.to_local() if isinstance(value, DTensor) else value
                whole = state[name]
                target.copy_(self._cut(whole, value) if isinstance(value, DTensor) else whole)

    def _cut(self, whole: Tensor, p: Tensor) -> Tensor:
        if isinstance(whole, DTensor):
            return whole.to_local()
        first, end = self._rows(p)
        return whole[first:end]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = self._converted(optimizer, optimizer.state_dict(), self._placed)
        return state

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(self._converted(optimizer, state, self._taken))

    def write_shards(self, state: dict[str, Any], folder: Path) -> tuple[Outline, Future[None]]:
        rest, shards = outline(state)
        return rest, write(shards, folder, self._file_group())

    def fetch(self, outline: Outline, folder: Path) -> Any:
        def empty(whole: Tensor) -> DTensor:
            return empty_parts(
                whole.shape, dtype=whole.dtype, device_mesh=self._mesh, placements=[Shard(0)]
            )

        return read_parts(outline, folder, empty)

    def _converted(self, optimizer: Optimizer, state: dict[str, Any], convert: Any) -> Any:
        """A state with `convert(entry, part, whole)` in place of each tensor of a parameter."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        entries = {
            index: {
                name: convert(entry, held[index], self._own[held[index]])
                for name, entry in own.items()
            }
            for index, own in state["state"].items()
        }
        converted = {**state, "state": entries}
        if "masters" in state:
            low = [p for p in held if p.dtype in LOW]
            converted["masters"] = [
                convert(master, p, self._own[p])
                for master, p in zip(state["masters"], low, strict=True)
            ]
        return converted

    def _placed(self, entry: Any, own: nn.Parameter, whole: DTensor) -> Any:
        if not isinstance(entry, Tensor) or not entry.dim():
            return entry
        if entry.shape != own.shape:
            raise RunFailedError(
                f"parallel=fsdp2 keeps a part of each parameter, {list(own.shape)} here, and the "
                f"optimizer keeps a state of {list(entry.shape)} for it; legal: an optimizer that "
                "computes element by element, such as AdamW, or parallel=ddp"
            )
        return _as_part(entry, whole)

    def _taken(self, entry: Any, own: nn.Parameter, whole: DTensor) -> Any:
        if not isinstance(entry, Tensor) or entry.shape != whole.shape:
            return entry
        return self._cut(entry, whole).clone()


def units(model: nn.Module, policy: Policy) -> list[tuple[nn.Module, torch.dtype]]:
    """The modules to shard, inner ones first, each with the dtype that it is gathered in.

    They are the model's blocks and the model itself. Inside each of them, modules whose parameters
    are stored or gathered in another dtype than most are on their own.
    """
    tied = _tied(model)
    cast = cast_modules(model) if policy.casting == "autocast" else []
    low = {id(model.get_submodule(path)) for path in cast}
    found: list[tuple[nn.Module, torch.dtype]] = []
    blocks = [m for _, m in blocks_of(model) if not tied & {*m.parameters()}]
    for unit in [*blocks, model]:
        done = {id(m) for m, _ in found if m is not unit}
        inner = [m for m in _inside(unit, done) if any(True for _ in m.parameters(recurse=False))]
        kinds = {id(m): _dtypes(m, id(m) in low, policy) for m in inner}
        most = _most(inner, kinds)
        apart: set[int] = set()
        for module in inner:
            if id(module) in apart or module is unit or kinds[id(module)] == most:
                continue
            if tied & {*module.parameters()}:
                continue
            apart |= {id(m) for m in module.modules()}
            found.append((module, kinds[id(module)][1]))
        found.append((unit, most[1]))
    return found


def _inside(unit: nn.Module, done: set[int]) -> Iterator[nn.Module]:
    """`unit` and the modules inside it, without those that are sharded already."""
    yield unit
    for child in unit.children():
        if id(child) not in done:
            yield from _inside(child, done)


def _tied(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that several modules share; they have to be in one unit."""
    seen: set[nn.Parameter] = set()
    tied: set[nn.Parameter] = set()
    for module in model.modules():
        own = {p for p in own_parameters(module).values() if p is not None}
        tied |= own & seen
        seen |= own
    return tied


def _dtypes(module: nn.Module, is_cast: bool, policy: Policy) -> Dtypes:
    stored = next(p.dtype for p in own_parameters(module).values() if p is not None)
    is_cast &= stored == torch.float32
    return stored, torch_dtype(policy.compute_dtype) if is_cast else stored


def _most(modules: Iterable[nn.Module], kinds: Mapping[int, Dtypes]) -> Dtypes:
    """The dtypes of most parameters."""
    sizes: dict[Dtypes, int] = {}
    for module in modules:
        numel = sum(p.numel() for p in own_parameters(module).values() if p is not None)
        sizes[kinds[id(module)]] = sizes.get(kinds[id(module)], 0) + numel
    return max(sizes, key=lambda kind: sizes[kind], default=(torch.float32, torch.float32))


PIECES = 16
"""Files of each process, if its tensors are of one size. Each begins to be written when a sixteenth
of the parts are in it, so it is larger only where one tensor is."""


class DamagedShardsError(ValueError):
    """Why the files of shards cannot be read."""


def outline(state: Any) -> tuple[Outline, dict[str, DTensor]]:
    """Take the shards out of a state: its outline, and the shards by their places in it."""
    shards: dict[str, DTensor] = {}
    names: dict[int, str] = {}
    tied: dict[str, str] = {}

    def take(name: str, value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value
        first = names.setdefault(id(value), name)
        if first == name:
            part: Any = value.detach()
            shards[name] = part
        else:
            tied[name] = first
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return Outline(_mapped(take, state), tied), shards


def write(
    shards: Mapping[str, DTensor], folder: Path, group: dist.ProcessGroup | None
) -> Future[None]:
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
    local = {name: _as_part(x.to_local().contiguous(), x) for name, x in shards.items()}
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_pieces(shards), save_distributed=True
    )
    written: Any = async_save(
        dict(local),
        storage_writer=writer,
        process_group=group,
        async_stager=DefaultStager(StagingOptions(False, False, False, False)),
    )
    ended: Future[None] = Future()

    def end(written: Future[Any]) -> None:
        error = written.exception()
        if isinstance(error, CheckpointException):
            error = next(iter(error.failures.values()))[0]
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(lost(error) or error)

    written.add_done_callback(end)
    return ended


def read_whole(outline: Outline, folder: Path) -> Any:
    """The state of an outline, with whole tensors on the CPU.

    Raises:
        OSError: a file cannot be read.
        DamagedShardsError: a shard is missing, or has another shape or dtype.
    """
    return read_parts(outline, folder, lambda x: torch.empty(x.shape, dtype=x.dtype))


def read_parts(outline: Outline, folder: Path, empty: Callable[[Tensor], Tensor]) -> Any:
    """The state of an outline, with this process's part of each shard.

    Args:
        outline: the outline.
        folder: its shards.
        empty: makes what a shard is read into; its argument has the whole shape, and no values.

    Raises:
        OSError: a file cannot be read.
        DamagedShardsError: a shard is missing, or has another shape or dtype.
    """
    state, tied = outline.state, outline.tied or {}
    wanted: dict[str, Tensor] = {}
    _mapped(lambda name, x: _note(wanted, tied.get(name, name), x), state)
    for file in folder.iterdir():
        if file.is_symlink():
            raise DamagedShardsError(f"{file} is a link")
    reader = HuggingFaceStorageReader(str(folder))
    try:
        saved = reader.read_metadata().state_dict_metadata
        for name, x in wanted.items():
            _check(name, x, saved.get(name))
        found: dict[str, Any] = {name: empty(x) for name, x in wanted.items()}
        with warnings.catch_warnings():  # each process reads on its own, and DCP says so
            warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
            load(found, storage_reader=reader, no_dist=True)
    except (SafetensorError, KeyError, TypeError, AttributeError, CheckpointException) as error:
        raise DamagedShardsError(f"{folder} is damaged: {error}") from None
    return _mapped(lambda name, x: found[tied.get(name, name)] if x.is_meta else x, state)


def _note(wanted: dict[str, Tensor], name: str, value: Tensor) -> Tensor:
    if value.is_meta:
        wanted[name] = value
    return value


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


def _as_part(local: Tensor, whole: DTensor) -> DTensor:
    """This process's tensor as its part of one that is cut as `whole` is."""
    mesh, cut, shape, stride = whole.device_mesh, whole.placements, whole.shape, whole.stride()
    return DTensor.from_local(local, mesh, cut, run_check=False, shape=shape, stride=stride)


def _pieces(shards: Mapping[str, DTensor]) -> dict[str, int]:
    """The number of the file of each tensor, from 1."""
    most = sum(x.nbytes for x in shards.values()) / PIECES
    pieces: dict[str, int] = {}
    number, filled = 1, 0
    for name, value in shards.items():
        if filled and filled + value.nbytes > most:
            number, filled = number + 1, 0
        pieces[name] = number
        filled += value.nbytes
    return pieces


def _mapped(convert: Callable[[str, Tensor], Any], value: Any, name: str = "") -> Any:
    """A state with `convert(its place's name, tensor)` in place of each tensor."""
    if isinstance(value, Tensor):
        return convert(name, value)
    if isinstance(value, Mapping):
        return {k: _mapped(convert, v, f"{name}.{k}" if name else str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_mapped(convert, v, f"{name}.{k}") for k, v in enumerate(value)]
    return value
