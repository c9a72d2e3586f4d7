"""Engines: how a formula is computed over the tensors of a step.

    c       one pass over memory, by compiled kernels; CPUs
    triton  the same pass as one kernel (`triton_kernel.py`); GPUs
    eager   PyTorch, in blocks that stay in the cache; everywhere

All give the same bits. A step of many small tensors is a matter of calls, not of numbers: so the
first two take all tensors that are stored alike in one call, as a table of addresses.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mprun.optim import formulas
from mprun.optim.formulas import FORMULAS, Storage, root
from mprun.precision import devices, kernels, random_bits, rounding
from mprun.precision._torch import is_fake
from mprun.precision.kernels import CHUNK, COLUMNS
from mprun.precision.random_bits import Key, hash_bits, keys_of, signed, spans

ENGINES = ("c", "triton", "eager")
SITES = 3  # Results of a parameter's step that are rounded: the parameter and two moments


class Operands(NamedTuple):
    """The tensors of one parameter's step, each in one piece, updated in place."""

    param: Tensor
    first: Tensor | None
    second: Tensor | None
    remainder: Tensor | None
    first_scales: Tensor | None = None  # Of a first moment in 8 bits; see `formulas`
    second_scales: Tensor | None = None

    def part(self, start: int, stop: int) -> Operands:
        """The elements from `start`, where a block of codes begins, to `stop`."""
        blocks = slice(start // formulas.PER_SCALE, formulas.scales_for(stop))
        return Operands(
            *(None if x is None else x[start:stop] for x in self[:4]),  # type: ignore[arg-type]
            *(None if x is None else x[blocks] for x in self[4:]),
        )


class Row(NamedTuple):
    """A tensor of a list."""

    place: int  # Among all tensors of the step
    operands: Operands
    number: int  # Of its random bits
    start: int  # The index of its first element in the whole parameter, of a shard


@dataclass(frozen=True)
class TensorList:
    """Tensors that are stored alike, which one call of an engine updates."""

    engine: str
    storage: Storage
    rows: Sequence[Row]

    @cached_property
    def table(self) -> Tensor:
        """int64 [parts, COLUMNS] on the device, each as `Row` of kernels/steps.h, with one key."""
        lines = []
        for row in self.rows:
            for begin, end, block, first in spans(row.start, row.operands.param.numel()):
                part = row.operands.part(begin, end)
                addresses = [0 if x is None else x.data_ptr() for x in part]
                where = [end - begin, row.place, begin, signed(row.number, 64)]
                lines.append([*addresses, *where, block // random_bits.BLOCK, first])
        table = torch.tensor(lines, dtype=torch.int64).view(-1, COLUMNS)
        return table.to(self.rows[0].operands.param.device)

    @cached_property
    def chunks(self) -> Tensor:
        """int64 [chunks, 2] on the device: which part of `table`, and which chunk of it."""
        sizes = -(-self.table[:, 6].cpu() // CHUNK)
        parts = torch.arange(len(sizes)).repeat_interleave(sizes)
        first = sizes.cumsum(0) - sizes
        of_part = torch.arange(len(parts)) - first[parts]
        return torch.stack([parts, of_part], 1).to(self.table.device)

    @cached_property
    def count(self) -> int:
        """Of all elements."""
        return sum(row.operands.param.numel() for row in self.rows)


@dataclass(frozen=True)
class Step:
    """What changes from step to step, of each tensor."""

    gradients: Sequence[Tensor]
    hypers: Tensor  # float32 [tensors, HYPERS], on the device
    states: Sequence[int]  # Of the random bits: `random_bits.shared` of seed and step
    skip: Tensor | None  # float32 scalar; if it is not 0, nothing changes. Of the C engine: None

    @cached_property
    def words(self) -> Tensor:
        """int64 [tensors, 2] on the device: the address of the gradient, and its state."""
        words = array("Q", bytes(16 * len(self.states)))
        words[::2] = array("Q", [x.data_ptr() for x in self.gradients])
        words[1::2] = array("Q", self.states)
        # Several times as fast as `torch.tensor` of a list
        return sent(torch.frombuffer(words, dtype=torch.int64).view(-1, 2), self.hypers.device)


def fastest(device: torch.device, formula: str) -> str:
    """The fastest engine of a device; c for a formula that `kernels/steps.h` has."""
    if device.type == "cuda":
        return "triton" if importlib.util.find_spec("triton") else "eager"
    in_c = device.type == "cpu" and formula in kernels.FORMULAS and kernels.why_not() is None
    return "c" if in_c else "eager"


def run(tensors: TensorList, step: Step) -> None:
    """Update the tensors of a list.

    Raises:
        NoKernelsError: engine c, without compiled kernels.
    """
    if tensors.count:
        _ENGINES[tensors.engine](tensors, step)


def _in_c(tensors: TensorList, step: Step) -> None:
    maps = formulas.maps(step.hypers).data_ptr() if tensors.storage.coded else None
    kernels.call(
        "update",
        _storage_words(tensors.storage),
        tensors.table.data_ptr(),
        len(tensors.table),
        *(step.words.data_ptr(), step.hypers.data_ptr(), maps),
        rounding.threads_for(tensors.count),
    )


# The dtypes of moments as the kernels name them
MOMENT_C_TYPES = {**rounding.C_TYPES, formulas.DTYPE: "C8"}


@cache
def formats(storage: Storage) -> dict[str, str]:
    """How the tensors are stored, as the kernels name it."""
    return {
        "PARAM": rounding.C_TYPES[storage.param],
        "GRAD": rounding.C_TYPES[storage.grad],
        "FIRST": _moment_format(storage.first, storage.first_scale),
        "SECOND": _moment_format(storage.second, storage.second_scale),
    }


def _moment_format(dtype: torch.dtype | None, scale: float) -> str:
    if dtype is None:
        return "NONE"
    return "S16" if scale != 1 else MOMENT_C_TYPES[dtype]


@cache
def _storage_words(storage: Storage) -> ctypes.Array[ctypes.c_int32]:
    """The struct `Storage` of kernels/steps.h."""
    return (ctypes.c_int32 * 9)(
        kernels.FORMULAS.index(storage.formula),
        *[kernels.FORMATS.index(name) for name in formats(storage).values()],
        kernels.RULES.index(storage.rounding) if storage.param != torch.float32 else 0,
        # A moment has no remainder: with kahan and split it is rounded stochastically
        storage.rounding != "nearest",
        storage.root,
        storage.saturate,
    )


# Seconds of the first launch of each kernel in this process, which compiles or reads it from disk
FIRST_LAUNCH_S: dict[tuple[Storage, bool], float] = {}


def _by_triton(tensors: TensorList, step: Step) -> None:
    from mprun.optim import triton_kernel  # imports the compiler

    storage, skip, hypers, began = tensors.storage, step.skip, step.hypers, time.perf_counter()
    triton_kernel.update(
        len(tensors.chunks),
        *(tensors.table, tensors.chunks, step.words, hypers, hypers if skip is None else skip),
        formulas.maps(hypers) if storage.coded else hypers,
        **formats(storage),
        FORMULA=storage.formula,
        RULE="nearest" if storage.param == torch.float32 else storage.rounding,
        FIRST_DRAWN=storage.rounding != "nearest",
        ROOT=storage.root,
        SATURATE=storage.saturate,
        SKIPS=skip is not None,
    )
    FIRST_LAUNCH_S.setdefault((storage, skip is not None), time.perf_counter() - began)


def _eagerly(tensors: TensorList, step: Step) -> None:
    maps = formulas.maps(step.hypers) if tensors.storage.coded else None
    for row in tensors.rows:
        grad = step.gradients[row.place].contiguous().view(-1)
        hyper, state = step.hypers[row.place], step.states[row.place]
        for begin, end, block, first in spans(row.start, grad.numel()):
            words = _key_words([k.at(block) for k in keys_of(state, row.number, SITES)], hyper)
            for at in range(begin, end, rounding.EAGER_BLOCK):
                stop = min(end, at + rounding.EAGER_BLOCK)
                part, of_part = row.operands.part(at, stop), grad[at:stop]
                index = _indices(of_part, first + at - begin)
                _update(tensors.storage, part, of_part, hyper, words, index, step.skip, maps)


def _indices(x: Tensor, first: int) -> Tensor:
    return torch.arange(first, first + x.numel(), dtype=torch.int32, device=x.device)


def _key_words(keys: Sequence[Key], beside: Tensor) -> Tensor:
    words = [signed(w) for key in keys for w in key]
    return sent(torch.tensor(words, dtype=torch.int32, device="cpu"), beside.device)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """`x`, which is on the host, on the device, without waiting for it."""
    if is_fake(x) or not devices.backend(device).pins:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)  # a copy of other memory would wait


def _update(
    storage: Storage,
    operands: Operands,
    grad: Tensor,
    hyper: Tensor,
    key_words: Tensor,
    index: Tensor,
    skip: Tensor | None,
    maps: Tensor | None,
) -> None:
    """The body of `update_block` (kernels/steps.h); `maps` where a moment is stored in codes."""
    o = operands
    old = o.param.float() if o.remainder is None else rounding.merged(o.param, o.remainder)
    m = _loaded(o.first, o.first_scales, storage.first_scale, maps, 0, hyper.device)
    v = _loaded(o.second, o.second_scales, storage.second_scale, maps, 1, hyper.device)
    # Stored as the root, which needs half the exponents
    v = v * v if storage.root else v
    change, m, v = FORMULAS[storage.formula](old, grad.float() * hyper[0], m, v, hyper)
    v = root(v) if storage.root else v

    def bits(site: int) -> Tensor:
        return hash_bits(index, key_words[2 * site], key_words[2 * site + 1])

    def store(
        into: Tensor | None, x: Tensor, stochastic: bool, site: int, scale: float = 1.0
    ) -> None:
        if into is None:
            return
        # A scaled moment saturates always: an infinite one would stop the update for good
        if into.dtype != torch.float32:
            overflow = "saturate" if storage.saturate or scale != 1 else "infinity"
            x = x if scale == 1 else x * scale
            if stochastic:
                x = rounding.round_stochastic(x, into.dtype, bits(site), overflow)
            else:
                x = rounding.round_nearest(x, into.dtype, overflow)
        _put(into, x, skip)

    def store_moment(into: Tensor | None, scales: Tensor | None, x: Tensor, site: int) -> None:
        stochastic = site == 2 or storage.rounding != "nearest"
        if into is None or scales is None or maps is None:
            scale = storage.first_scale if site == 1 else storage.second_scale
            store(into, x, stochastic, site, scale)
            return
        coded, of_blocks = formulas.encode(x, maps[site - 1], bits(site) if stochastic else None)
        _put(into, coded, skip)
        _put(scales, of_blocks, skip)

    w, drawn = old - change, storage.rounding in ("stochastic", "split")
    if drawn and o.param.dtype != torch.float32:
        w = rounding.settle(w, old, change, bits(0))
    if o.remainder is None:
        store(o.param, w, drawn, 0)
    else:
        dtype = o.param.dtype
        rounded, rest = (
            rounding.split_master(w, dtype, bits(0)) if drawn else rounding.split(w, dtype)
        )
        _put(o.param, rounded, skip)
        _put(o.remainder, rest, skip)
    store_moment(o.first, o.first_scales, m, 1)
    store_moment(o.second, o.second_scales, v, 2)


def _loaded(
    moment: Tensor | None,
    scales: Tensor | None,
    scale: float,
    maps: Tensor | None,
    row: int,
    device: torch.device,
) -> Tensor:
    """A moment in float32; a scalar 0 for None."""
    if moment is None:
        return torch.zeros((), dtype=torch.float32, device=device)
    if scales is not None and maps is not None:
        return formulas.decode(moment, scales, maps[row])
    # A power of two: exact
    return moment.float() if scale == 1 else moment.float() * (1 / scale)


def _put(into: Tensor, x: Tensor, skip: Tensor | None) -> None:
    into.copy_(x if skip is None else torch.where(skip == 0, x, into))


_ENGINES = {"c": _in_c, "triton": _by_triton, "eager": _eagerly}
