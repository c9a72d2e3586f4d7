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

For a checkpoint one tensor after the other is made whole, on the CPU of the first process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mprun.errors import RunFailedError
from mprun.precision import Combine
from mprun.precision._torch import own_parameters, parameters_replaced
from mprun.precision.gemms import has_own_products
from mprun.precision.policy import Policy, torch_dtype
from mprun.precision.products import LOW
from mprun.precision.random_bits import NAME, mark_shard
from mprun.train.parallel.layouts import GroupLayout
from mprun.train.parallel.ranks import GroupRanks, Ranks

Dtypes = tuple[torch.dtype, torch.dtype]  # What a module's parameters are stored and gathered in

# Modules whose weights autocast casts wherever they are used
CASTS_WEIGHTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # Modules that only hold others


class ShardCombine(Combine):
    """Figures of all processes' parts."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def total_norm(self, norm: Tensor) -> Tensor:
        square = norm.detach().float().square()
        self._ranks.begin_sum(square)()
        return square.sqrt().to(norm.dtype)

    def overflow(self, flag: Tensor) -> Tensor:
        return self._ranks.largest(flag)


class _TimedCollective:
    """What FSDP2 asks of a collective, by PyTorch's own, timed as communication.

    FSDP2 gathers parameters and scatters gradients by itself, so their time would count as
    computation.
    """

    def __init__(self, ranks: GroupRanks, name: str) -> None:
        self._ranks, self._name = ranks, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor that receives the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        with self._ranks.communicating():
            return getattr(dist, self._name)(output_tensor, input_tensor, **options)


class ShardLayout(GroupLayout):
    """A part of every parameter in each process."""

    kind = "fsdp2"

    def __init__(self, ranks: GroupRanks, device: torch.device) -> None:
        super().__init__(ranks)
        self.combine = ShardCombine(ranks)
        self._group = ranks
        self._mesh = init_device_mesh(device.type, (ranks.size,))
        self._own: dict[nn.Parameter, DTensor] = {}
        """Each process's parts, and the parameters that they are parts of."""

    def arrange(self, model: nn.Module, policy: Policy) -> None:
        # a parameter's random bits follow its name, which `fully_shard` does not carry over
        names = {name: getattr(p, NAME, name) for name, p in model.named_parameters()}
        super().arrange(model, policy)
        for module, dtype in units(model, policy):
            rule = MixedPrecisionPolicy(
                param_dtype=dtype,
                reduce_dtype=torch_dtype(policy.reduce_dtype),
                cast_forward_inputs=False,  # casts of inputs are the policy's alone
            )
            fully_shard(module, mesh=self._mesh, mp_policy=rule)
        gather: Any = _TimedCollective(self._group, "all_gather_into_tensor")
        scatter: Any = _TimedCollective(self._group, "reduce_scatter_tensor")
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gradients are summed: the loss is a share
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # on a CPU a collective returns when the data are there, so the time of the call is
                # that of the communication; on a GPU it only enqueues kernels
                if self._mesh.device_type == "cpu":
                    module.set_custom_all_gather(gather)
                    module.set_custom_reduce_scatter(scatter)
        parameters: Any = model.named_parameters()  # they are `DTensor`s now
        self._own = {self._part(p, names[name]): p for name, p in parameters}

    def _part(self, p: Any, name: str) -> nn.Parameter:
        own = nn.Parameter(p.to_local().detach(), requires_grad=p.requires_grad)
        # where the part begins in the flat whole: its first row times the numbers of a row
        mark_shard(own, name, self._rows(p)[0] * (p.numel() // max(1, len(p))))
        return own

    def _rows(self, p: Tensor) -> tuple[int, int]:
        """The first row of this process's part, and the end."""
        each = -(-len(p) // self.ranks.size)  # as FSDP2 cuts: the last processes may have no row
        return min(self.ranks.rank * each, len(p)), min((self.ranks.rank + 1) * each, len(p))

    @contextmanager
    def trainable(self, model: nn.Module) -> Iterator[None]:
        with parameters_replaced(model, {whole: own for own, whole in self._own.items()}):
            yield

    def end_backward(self) -> None:
        for own, whole in self._own.items():
            gradient: Any = whole.grad
            own.grad = None if gradient is None else gradient.to_local()
            whole.grad = None  # FSDP2 would add the next step's to it
        super().end_backward()

    def model_state(self, model: nn.Module) -> Mapping[str, Any]:
        whole: dict[int, Any] = {}
        state = model.state_dict(keep_vars=True)  # a tied parameter is one object
        for value in state.values():
            if isinstance(value, DTensor) and id(value) not in whole:
                whole[id(value)] = self._gathered(value)
        return {name: whole.get(id(value), value) for name, value in state.items()}

    def _gathered(self, part: DTensor) -> Tensor:
        """The whole tensor on the CPU in the first process, nothing in the others."""
        own: Any = part.detach()
        with self._group.communicating():
            whole: Tensor = own.full_tensor()
        return whole.cpu() if self.ranks.is_first else whole.new_empty(0)

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        parts = dict(state)
        for name, own in model.state_dict().items():
            if isinstance(own, DTensor) and name in parts:
                parts[name] = _as_part(self._cut(parts[name], own), own)
        model.load_state_dict(parts)

    def _cut(self, whole: Tensor, p: Tensor) -> Tensor:
        first, end = self._rows(p)
        return whole[first:end]

    def held(self, model: nn.Module) -> dict[str, Tensor]:
        model.state_dict()  # its hooks cut what a forward pass has left whole
        held = super().held(model).items()
        return {k: x.to_local() if isinstance(x, DTensor) else x for k, x in held}

    def made_whole(self, model: nn.Module, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = dict(parts)
        for name, own in self._cut_ones(model).items():
            if name in parts:  # only the device can exchange it
                whole[name] = self._gathered(_as_part(parts[name].to(own.device), own))
        return whole

    def cut(self, model: nn.Module, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        cut = {k: self._cut(whole[k], own) for k, own in self._cut_ones(model).items()}
        return {**whole, **cut}

    def _cut_ones(self, model: nn.Module) -> dict[str, DTensor]:
        return {k: x for k, x in super().held(model).items() if isinstance(x, DTensor)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = self._converted(optimizer, optimizer.state_dict(), self._made_whole)
        return state

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(self._converted(optimizer, state, self._taken))

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

    def _made_whole(self, entry: Any, own: nn.Parameter, whole: DTensor) -> Any:
        if not isinstance(entry, Tensor) or not entry.dim():  # a count of steps, the same for all
            return entry
        if entry.shape != own.shape:
            raise RunFailedError(
                f"parallel=fsdp2 keeps a part of each parameter, {list(own.shape)} here, and the "
                f"optimizer keeps a state of {list(entry.shape)} for it; legal: an optimizer that "
                "computes element by element, such as AdamW, or parallel=ddp"
            )
        return self._gathered(_as_part(entry, whole))

    def _taken(self, entry: Any, own: nn.Parameter, whole: DTensor) -> Any:
        if not isinstance(entry, Tensor) or entry.shape != whole.shape:
            return entry
        return self._cut(entry, whole).clone()  # not a view, which keeps the whole in memory


def _as_part(local: Tensor, whole: DTensor) -> DTensor:
    """This process's tensor as its part of one that is cut as `whole` is."""
    mesh, cut, shape, stride = whole.device_mesh, whole.placements, whole.shape, whole.stride()
    # shape and stride are given, because parts may differ in size, and a check would be an exchange
    return DTensor.from_local(local, mesh, cut, run_check=False, shape=shape, stride=stride)


def units(model: nn.Module, policy: Policy) -> list[tuple[nn.Module, torch.dtype]]:
    """The modules to shard, inner ones first, each with the dtype that it is gathered in.

    They are the model's blocks and the model itself. Inside each of them, modules whose parameters
    are stored or gathered in another dtype than most are on their own.
    """
    # parameters that several modules share have to be in one unit
    users = Counter(p for module in model.modules() for p in {*own_parameters(module).values()})
    tied = {p for p, count in users.items() if p is not None and count > 1}
    cast = cast_modules(model) if policy.casting == "autocast" else []
    low = {id(model.get_submodule(path)) for path in cast}
    sharded: list[tuple[nn.Module, torch.dtype]] = []
    blocks = [m for _, m in blocks_of(model) if not tied & {*m.parameters()}]
    for unit in [*blocks, model]:
        done = {id(m) for m, _ in sharded if m is not unit}
        inner = [m for m in _inside(unit, done) if any(True for _ in m.parameters(recurse=False))]
        kinds = {id(m): _dtypes(m, id(m) in low, policy) for m in inner}
        most = _most(inner, kinds)
        apart: set[int] = set()
        for module in inner:
            if id(module) in apart or module is unit or kinds[id(module)] == most:
                continue
            if tied & {*module.parameters()}:  # they stay with the unit that all their users are in
                continue
            apart |= {id(m) for m in module.modules()}
            sharded.append((module, kinds[id(module)][1]))
        sharded.append((unit, most[1]))
    return sharded


def _inside(unit: nn.Module, done: set[int]) -> Iterator[nn.Module]:
    """`unit` and the modules inside it, without those that are sharded already."""
    yield unit
    for child in unit.children():
        if id(child) not in done:
            yield from _inside(child, done)


def _dtypes(module: nn.Module, is_cast: bool, policy: Policy) -> Dtypes:
    stored = next(p.dtype for p in own_parameters(module).values() if p is not None)
    is_cast &= stored == torch.float32
    return stored, torch_dtype(policy.compute_dtype) if is_cast else stored


def _most(modules: Iterable[nn.Module], kinds: Mapping[int, Dtypes]) -> Dtypes:
    """The dtypes of most parameters."""
    sizes = Counter[Dtypes]()
    for module in modules:
        numel = sum(p.numel() for p in own_parameters(module).values() if p is not None)
        sizes[kinds[id(module)]] += numel
    return max(sizes, key=lambda kind: sizes[kind], default=(torch.float32, torch.float32))


# ---- the blocks of a model -----------------------------------------------------------------------

# A transformer's blocks are its layers. They are recognized by their class: it is repeated, has
# parts of its own, and holds the most parameters.


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of each block, in the order of the model.

    Blocks are the outermost modules of the class that appears at least twice and holds the most
    parameters. Classes whose modules have parts with parameters come before layers such as
    `nn.Linear`, containers such as `nn.Sequential` do not count. Without such a class, blocks are
    the model's direct children with parameters.
    """
    classes = _repeated(model)
    composite = [
        own for own in classes if any(_parameters([x]) for _, m in own for x in m.children())
    ]
    best = max(composite or classes, key=lambda own: _parameters([m for _, m in own]), default=[])
    if best:
        return best
    return [(path, m) for path, m in model.named_children() if _parameters([m])]


def _repeated(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The outermost modules of each class that has two or more with parameters."""
    by_class: dict[type, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        own = by_class.setdefault(type(module), [])
        outer = [f"{name}." for name, _ in own]  # a block inside one of its class belongs to that
        if path and not path.startswith(tuple(outer)) and _parameters([module]):
            own.append((path, module))
    return [
        own for kind, own in by_class.items() if len(own) > 1 and not issubclass(kind, CONTAINERS)
    ]


def _parameters(modules: Sequence[nn.Module]) -> int:
    """Numbers in the parameters of the modules, shared ones once."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


def cast_modules(model: nn.Module) -> list[str]:
    """Paths of the modules whose parameters autocast casts, without those that share some.

    Layers whose products have formats of their own read their weights as they are stored.
    """
    uses = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, CASTS_WEIGHTS)
        and not has_own_products(module)
        and all(uses[p] == 1 for p in module.parameters())
    ]
