"""The blocks of a model: the parts that FSDP2 shards and activation checkpointing recomputes.

A transformer's blocks are its layers. They are recognized by their class: it is repeated, has parts
of its own, and holds the most parameters.

A rule turns the memory of a step in a single process into that of one of several
(`ReplicatedModel`, `ShardedModel`). Each process computes the same ops on its own batch, so
activations and buffers are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mprun.precision import same_rounding
from mprun.precision.gemms import has_own_products
from mprun.watch.memory_recorder import LiveStorage, MemoryPoint

# Modules whose weights autocast casts wherever they are used
CASTS_WEIGHTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # Modules that only hold others


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of each block, in the order of the model.

    Blocks are the outermost modules of the class that appears at least twice and holds the most
    parameters. Classes whose modules have parts with parameters come before layers such as
    `nn.Linear`, containers such as `nn.Sequential` do not count. Without such a class, blocks are
    the model's direct children with parameters.
    """
    classes = _repeated(model)
    composite = [own for own in classes if any(_has_parts(module) for _, module in own)]
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


def _has_parts(module: nn.Module) -> bool:
    return any(_parameters([child]) for child in module.children())


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


@contextmanager
def checkpointed(model: nn.Module, random_states: bool = True) -> Iterator[None]:
    """Inside, a block's activations are recomputed in the backward pass instead of stored.

    Each block runs in PyTorch's `checkpoint`, which stores the block's inputs. Gradients are the
    same, bit for bit. With `random_states` dropout is recomputed too; fake tensors have none.
    """
    with ExitStack() as stack:
        for _, block in blocks_of(model):
            run: Any = partial(
                checkpoint,
                block.forward,
                use_reentrant=False,  # the other variant wants an input that has a gradient
                preserve_rng_state=random_states,
                context_fn=same_rounding,  # stochastic rounding draws the same bits again
            )
            stack.callback(_restore_forward, block, block.__dict__.get("forward"))
            block.forward = run
        yield


def _restore_forward(block: nn.Module, own: Any) -> None:
    """Undo `checkpointed`; `own` is what the module itself had, else its class has it."""
    if own is None:
        del block.forward
    else:
        block.forward = own


# ---- the memory of one of several processes ------------------------------------------------------

# A bucket of DistributedDataParallel is complete with so many bytes (PyTorch's defaults). The first
# is a small one, so that sending begins early in the backward pass
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
ROOT = ""  # The unit of everything outside of blocks


@dataclass(frozen=True)
class ReplicatedModel:
    """DDP: each process has the whole model, and gradients are summed during the backward pass.

    Gradients lie in buckets, which stay from step to step.
    """

    reduce_itemsize: int  # Bytes of a number in the reduction

    def __call__(
        self, storages: Sequence[LiveStorage], points: Sequence[MemoryPoint]
    ) -> Sequence[LiveStorage]:
        """The same, with gradients in buckets."""
        visits = _BlockVisits(points)
        last = {p.owner: n for n, p in enumerate(points) if p.phase == "backward"}
        gradients = [h for h in visits.in_step(storages) if h.category == "gradients"]
        # Temporary between the op that makes it and its copy into the bucket
        copied_at = [max(h.born, last.get(h.owner, h.born)) for h in gradients]
        copies = [
            replace(h, category="temporary", died=at + 1)
            for h, at in zip(gradients, copied_at, strict=True)
        ]
        others = [h for h in storages if h.category != "gradients"]
        buckets = [replace(h, born=0, died=None) for h in gradients]
        return [*others, *copies, *buckets, *self._converted(gradients, copied_at, visits.end)]

    def _converted(
        self, gradients: Sequence[LiveStorage], copied_at: Sequence[int], end: int
    ) -> Iterator[LiveStorage]:
        """Buckets in the dtype of the sum; they fill in the order of the backward pass."""
        limit, filled, nbytes, at = FIRST_BUCKET_BYTES, 0, 0, 0
        for h, at in sorted(zip(gradients, copied_at, strict=True), key=itemgetter(1)):
            filled += h.nbytes
            if h.dtype.itemsize != self.reduce_itemsize:
                nbytes += _numel(h) * self.reduce_itemsize
            if filled >= limit:
                # at most until the end of the backward pass: it is freed when it is sent
                yield _flat(nbytes, at, end + 1, ROOT)
                limit, filled, nbytes = BUCKET_BYTES, 0, 0
        yield _flat(nbytes, at, end + 1, ROOT)


@dataclass(frozen=True)
class ShardedModel:
    """FSDP2: each process has a part of each parameter, and gathers a block where it runs.

    A unit is a block of the model, or all else. Its parameters, gradients and
    state are cut along dimension 0. Gathered parameters, whole gradients and what is reduced count
    as temporary. The rules are those of PyTorch's `fully_shard` with its defaults (2.15); tests
    compare with it. That of 2.12 holds a unit's reduction for one block longer.
    """

    world_size: int
    blocks: Sequence[str]  # Paths of the blocks
    gathered_itemsizes: Mapping[str, int]
    """Module to the bytes of a number of its gathered parameters, where they are cast."""
    reduce_itemsize: int  # Bytes of a number in the reduction

    def __call__(
        self, storages: Sequence[LiveStorage], points: Sequence[MemoryPoint]
    ) -> Sequence[LiveStorage]:
        """Parts of the model, gathered blocks, and what a unit reduces."""
        visits = _BlockVisits(points, self.blocks)
        held = self._without_casts(visits.in_step(storages), points)
        parts = [part for h in held for part in self._parts(h, visits)]
        gathered = self._unit_bytes(held, "parameters", self._compute_itemsize, visits)
        reduced = self._unit_bytes(held, "gradients", lambda _: self.reduce_itemsize, visits)
        return [
            *parts,
            *self._gathered(gathered, visits),
            *self._reductions(reduced, gathered, visits),
        ]

    def _without_casts(
        self, storages: Sequence[LiveStorage], points: Sequence[MemoryPoint]
    ) -> list[LiveStorage]:
        """The storages without autocast's copies of parameters, and the gradients of those.

        FSDP2 gathers the parameters in the dtype of autocast, so nothing is left to cast.
        """
        cast = [h for h in storages if h.cast_of is not None and h.owner in self.gathered_itemsizes]
        copied = {id(h.cast_of) for h in cast if h.category == "gradients"}
        copies = {
            id(h)
            for h in cast
            if h.cast_of is not None
            and h.cast_of.category == "parameters"
            and points[h.born].phase in ("forward", "backward")
        }
        return [h for h in storages if id(h) not in copied | copies]

    def _parts(self, h: LiveStorage, visits: _BlockVisits) -> Iterator[LiveStorage]:
        part = replace(h, nbytes=h.nbytes * self._rows(h) // _rows(h))
        if h.category in ("parameters", "optimizer_state"):
            yield part
        elif h.category == "gradients":
            at = visits.reduced_at(h)
            if h.born <= at:  # whole until its unit's backward pass ends; then the part is left
                whole_bytes = _numel(h) * self._compute_itemsize(h)
                until = at + 1 if h.died is None else min(at + 1, h.died)
                is_cast = h.cast_of is not None and h.owner in self.gathered_itemsizes
                born = h.cast_of.born if is_cast and h.cast_of is not None else h.born
                yield replace(h, nbytes=whole_bytes, category="temporary", born=born, died=until)
                part.born = at + 1
            if part.died is None or part.born < part.died:
                yield part
        elif h.category == "temporary" and h.born > visits.end:  # of the optimizer
            yield part
        else:
            yield h

    def _gathered(self, sizes: Mapping[str, int], visits: _BlockVisits) -> Iterator[LiveStorage]:
        # Outside of blocks: from the first op of the forward pass to the end of the backward pass
        yield _flat(sizes[ROOT], visits.begin, visits.end + 1, ROOT)
        before = None
        for visit in visits.visits:
            born = visit.first
            if before is not None:  # gathered in advance, while the block before it runs (prefetch)
                born = before.first if before.unit != visit.unit else before.last + 1
            yield _flat(sizes[visit.unit], born, visit.last + 1, visit.unit)
            before = visit

    def _reductions(
        self, sizes: Mapping[str, int], gathered: Mapping[str, int], visits: _BlockVisits
    ) -> Iterator[LiveStorage]:
        backward = [visit for visit in visits.visits if visit.is_backward]
        ends = [*(visit.last for visit in backward[1:]), visits.end]
        before = 0
        for (unit, _, _, last), died in zip(backward, ends, strict=False):  # without any, one end
            # The copy is made when the block's parameters and the copy before are gone.
            more = max(0, sizes[unit] - gathered[unit] - before)
            yield _flat(more, last, last + 1, unit)
            # A flat copy in the reduction's dtype, until the next block's backward pass is over
            yield _flat(sizes[unit], last + 1, max(died, last) + 1, unit)
            before = sizes[unit]
        more = max(0, sizes[ROOT] - gathered[ROOT] - before)
        yield _flat(more, visits.end, visits.end + 1, ROOT)

    def _unit_bytes(
        self,
        held: Sequence[LiveStorage],
        category: str,
        itemsize: Callable[[LiveStorage], int],
        visits: _BlockVisits,
    ) -> dict[str, int]:
        """Unit to the bytes of its parameters or gradients, the chunks of all processes."""
        sizes = dict.fromkeys((*self.blocks, ROOT), 0)
        for h in held:
            if h.category == category:
                sizes[visits.unit(h.owner)] += self._padded(h) * itemsize(h)
        return sizes

    def _rows(self, h: LiveStorage) -> int:
        """Rows of the largest chunk."""
        return ceil(_rows(h) / self.world_size)

    def _padded(self, h: LiveStorage) -> int:
        """Numbers in the chunks of all processes: all are as large as the largest."""
        if not h.shape:
            return _numel(h)
        return _numel(h) // _rows(h) * self._rows(h) * self.world_size

    def _compute_itemsize(self, h: LiveStorage) -> int:
        own = h.dtype.itemsize
        return min(own, self.gathered_itemsizes.get(h.owner, own))


class _Visit(NamedTuple):
    """Ops of one block, one after the other, in one pass."""

    unit: str
    is_backward: bool
    first: int
    last: int


class _BlockVisits:
    """When the blocks of a step run."""

    def __init__(self, points: Sequence[MemoryPoint], blocks: Sequence[str] = ()) -> None:
        self.unit = cache(lambda owner: _unit(owner, blocks))
        numbered = [(n, p) for n, p in enumerate(points) if p.phase in ("forward", "backward")]
        self.begin = numbered[0][0] if numbered else 0
        self.end = max((n for n, p in numbered if p.phase == "backward"), default=0)
        """The last op of the backward pass."""
        self.visits: list[_Visit] = []
        for n, point in numbered:
            self._visit(n, self.unit(point.owner), point.phase == "backward")

    def in_step(self, storages: Iterable[LiveStorage]) -> list[LiveStorage]:
        """Those that are not gone before the forward pass, as gradients of the step before."""
        return [h for h in storages if h.died is None or h.died > self.begin]

    def reduced_at(self, gradient: LiveStorage) -> int:
        """The op after which a gradient is reduced with its unit, the first time in a step.

        Smaller than `gradient.born` for a gradient that an earlier step left.
        """
        if gradient.born <= self.begin:
            return -1
        unit = self.unit(gradient.owner)
        ends = (v.last for v in self.visits if v.is_backward and v.unit == unit)
        return next((n for n in ends if n >= gradient.born), max(self.end, gradient.born))

    def _visit(self, n: int, unit: str, is_backward: bool) -> None:
        if unit == ROOT:
            return
        last = self.visits[-1] if self.visits else None
        if last is not None and (last.unit, last.is_backward) == (unit, is_backward):
            self.visits[-1] = last._replace(last=n)
        else:
            self.visits.append(_Visit(unit, is_backward, n, n))


def _unit(owner: str, blocks: Iterable[str]) -> str:
    return next((b for b in blocks if owner == b or owner.startswith(f"{b}.")), ROOT)


def _flat(nbytes: int, born: int, died: int, owner: str) -> LiveStorage:
    return LiveStorage(nbytes, "temporary", owner, born, (nbytes,), torch.uint8, died)


def _rows(h: LiveStorage) -> int:
    return max(h.shape[0], 1) if h.shape else 1


def _numel(h: LiveStorage) -> int:
    return h.nbytes // h.dtype.itemsize
