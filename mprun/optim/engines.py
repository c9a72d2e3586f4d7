"""Engines: how a formula is computed over one tensor.

    c         one pass over memory; CPUs, where kernels were compiled, here or at installation
    inductor  `torch.compile` of the PyTorch version; GPUs
    eager     PyTorch, in blocks that stay in the cache; everywhere

All give the same bits (Inductor's fused multiply-adds on a GPU apart).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mprun.optim import formulas
from mprun.optim.formulas import FORMULAS, Storage, root
from mprun.precision import devices, kernels, rounding
from mprun.precision._torch import is_fake
from mprun.precision.kernels import prebuilt
from mprun.precision.random_bits import BLOCK, Key, hash_bits, signed, spans

ENGINES = ("c", "inductor", "eager")


class Operands(NamedTuple):
    """The tensors of one parameter's step, each in one piece, updated in place."""

    param: Tensor
    grad: Tensor
    first: Tensor | None
    second: Tensor | None
    remainder: Tensor | None
    first_scales: Tensor | None = None  # Of a first moment in 8 bits; see `formulas`
    second_scales: Tensor | None = None

    def part(self, start: int, stop: int) -> Operands:
        """The elements from `start`, where a block of codes begins, to `stop`."""
        blocks = slice(start // formulas.PER_SCALE, formulas.scales_for(stop))
        return Operands(
            *(None if x is None else x.view(-1)[start:stop] for x in self[:5]),  # type: ignore[arg-type]
            *(None if x is None else x[blocks] for x in self[5:]),
        )


class _Work(NamedTuple):
    """A part of a parameter whose random bits have one key, and how it is updated: see `run`."""

    storage: Storage
    operands: Operands
    hyper: Tensor
    keys: tuple[Key, ...]
    skip: Tensor | None
    first: int  # The index of its first element, which the random bits are counted from


def fastest(device: torch.device, formula: str, storage: Storage | None = None) -> str:
    """The fastest engine of a device; c for a formula that `kernels/steps.h` has.

    With `storage`, c only if its kernel compiles.
    """
    if device.type == "cuda":
        return "inductor"
    in_c = formula.upper() in prebuilt.FORMULAS
    if device.type != "cpu" or not in_c or kernels.why_not() is not None:
        return "eager"
    return "c" if storage is None or _compiles(storage) else "eager"


@cache
def _compiles(storage: Storage) -> bool:
    return kernels.functions_or_warn("update.c", _defines(storage)) is not None


def run(
    engine: str,
    storage: Storage,
    operands: Operands,
    hyper: Tensor,
    keys: tuple[Key, ...],
    skip: Tensor | None,
    start: int = 0,
) -> None:
    """Update the operands by an engine of `ENGINES`.

    Args:
        hyper: float32 [HYPERS], on the device.
        keys: of parameter, first and second moment.
        skip: float32 scalar on the device; if it is not 0, nothing changes. The C engine ignores
            it; its caller checks it.
        start: the index of the first element in the whole parameter, of a shard.

    Raises:
        NoCompilerError: engine c, whose kernel for `storage` cannot be compiled.
    """
    by, count = _ENGINES[engine], operands.param.numel()
    # The common case, without slices: all elements have one key
    if 0 < count <= BLOCK - start:
        by(_Work(storage, operands, hyper, keys, skip, start))
        return
    for begin, end, block, first in spans(start, count):
        part, own_keys = operands.part(begin, end), tuple(k.at(block) for k in keys)
        by(_Work(storage, part, hyper, own_keys, skip, first))


def _in_c(work: _Work) -> None:
    storage, operands, hyper, keys, _, first = work
    count = operands.param.numel()
    tables = formulas.tables() if storage.coded else None
    _library(storage)(
        *[None if x is None else x.data_ptr() for x in (*operands, tables)],
        count,
        first,
        hyper.data_ptr(),
        _KeyWords(*[word for key in keys for word in key]),
        rounding.threads_for(count),
    )


# The dtypes of moments as the kernels' macros name them
MOMENT_C_TYPES = {**rounding.C_TYPES, formulas.DTYPE: "C8"}
# Two words for each result that is rounded: parameter, first and second moment
_KeyWords = ctypes.c_uint32 * 6


@cache
def _library(storage: Storage) -> Callable[..., None]:
    (update,) = kernels.functions("update.c", _defines(storage))
    return update


def _defines(storage: Storage) -> dict[str, str | None]:
    """The macros of update.c."""
    defines: dict[str, str | None] = {
        "PARAM": rounding.C_TYPES[storage.param],
        "GRAD": rounding.C_TYPES[storage.grad],
        "FIRST": _moment_type(storage.first, storage.first_scale),
        "SECOND": _moment_type(storage.second, storage.second_scale),
        "FORMULA": storage.formula.upper(),
    }
    flags = {
        f"RULE_{storage.rounding.upper()}": storage.param != torch.float32,
        # A moment has no remainder: with kahan and split it is rounded stochastically
        "FIRST_STOCHASTIC": storage.rounding != "nearest",
        "HAS_FIRST": storage.first is not None,
        "HAS_SECOND": storage.second is not None,
        "ROOT": storage.root,
        "SATURATE": storage.saturate,
    }
    return defines | {name: None for name, given in flags.items() if given}


def _moment_type(dtype: torch.dtype | None, scale: float) -> str:
    return "S16" if scale != 1 else MOMENT_C_TYPES[dtype or torch.float32]


def _eagerly(work: _Work) -> None:
    storage, operands, hyper, keys, skip, first = work
    key_words = _key_words(keys, hyper)
    maps = formulas.maps(hyper) if storage.coded else None
    for start in range(0, operands.param.numel(), rounding.EAGER_BLOCK):
        part = operands.part(start, start + rounding.EAGER_BLOCK)
        index = _indices(part.param, first + start)
        _update(storage, part, hyper, key_words, index, skip, maps)


def _indices(x: Tensor, first: int) -> Tensor:
    return torch.arange(first, first + x.numel(), dtype=torch.int32, device=x.device)


def _key_words(keys: tuple[Key, ...], beside: Tensor, *more: int) -> Tensor:
    words = [*[signed(w) for key in keys for w in key], *more]
    if not devices.backend(beside.device).pins or is_fake(beside):
        return torch.tensor(words, dtype=torch.int32, device=beside.device)
    pinned = torch.tensor(words, dtype=torch.int32, pin_memory=True)
    return pinned.to(beside.device, non_blocking=True)  # a copy of other memory would wait


def _update(
    storage: Storage,
    operands: Operands,
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
    change, m, v = FORMULAS[storage.formula](old, o.grad.float() * hyper[0], m, v, hyper)
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


def _by_inductor(work: _Work) -> None:
    storage, operands, hyper, keys, skip, first = work
    words = _key_words(keys, hyper, first)
    maps = formulas.maps(hyper) if storage.coded else None
    _compiled(storage, first > 0)(hyper, words, skip, maps, *operands)


@cache
def _compiled(storage: Storage, is_shard: bool) -> Callable[..., None]:
    """A function compiled for one storage, with its own code object: Dynamo's cache is per code.

    For whole parameters it does not add the index of a shard's first element to each index.
    """

    def update(
        hyper: Tensor,
        key_words: Tensor,
        skip: Tensor | None,
        maps: Tensor | None,
        param: Tensor,
        *others: Tensor | None,
    ) -> None:
        index = _indices(param, 0)
        index = index + key_words[-1] if is_shard else index
        operands = Operands(param, *others)  # type: ignore[arg-type]
        _update(storage, operands, hyper, key_words, index, skip, maps)

    # A name of its own makes a code object of its own
    update.__code__ = update.__code__.replace(co_name=f"update_{len(_seen)}")
    _seen.append(storage)
    # Without the option Inductor removes a cast down and up again, which is the rounding.
    options: dict[str, Any] = {"emulate_precision_casts": True}
    return torch.compile(update, dynamic=True, fullgraph=True, options=options)


_seen: list[Storage] = []

_ENGINES = {"c": _in_c, "inductor": _by_inductor, "eager": _eagerly}
