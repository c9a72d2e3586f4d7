"""Stochastic rounding of a whole tensor, by the fastest means there is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from mprun import kernels
from mprun.precision.random_bits import BLOCK, Key, random_bits
from mprun.precision.rounding import round_stochastic

C_TYPES = {torch.float16: "F16", torch.bfloat16: "BF16"}
EAGER_BLOCK = 2**16
"""Elements rounded at a time without a compiler: what stays in a core's cache."""
SERIAL = 2**15
"""Elements below which starting threads costs more than they save."""


def stochastic(x: Tensor, dtype: torch.dtype, key: Key, overflow: str = "infinity") -> Tensor:
    """`x` (float32) stochastically rounded with the bits of `key`; the same bits on every path.

    Args:
        x: float32, any shape.
        dtype: float16 or bfloat16.
        key: see `random_bits`.
        overflow: infinity or saturate.

    Returns:
        The rounded numbers, in the layout of `x` where it is dense; elements are counted as they
        lie in memory.
    """
    # With its dimensions in the order of its strides a dense tensor, however permuted, is flat.
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    x = x.permute(order).contiguous()
    rounded = torch.empty_like(x, dtype=dtype)
    flat, out = x.view(-1), rounded.view(-1)
    in_c = x.device.type == "cpu" and kernels.why_not() is None
    kernel = _kernel(dtype, overflow) if in_c else None
    by = _eagerly if kernel is None else partial(_in_c, kernel)
    for start in range(0, flat.numel(), BLOCK):
        stop = start + BLOCK
        by(flat[start:stop], out[start:stop], key.at(start), overflow)
    return rounded.permute([order.index(d) for d in range(len(order))])


def _in_c(kernel: Callable[..., None], x: Tensor, out: Tensor, key: Key, overflow: str) -> None:
    threads = 1 if x.numel() < SERIAL else torch.get_num_threads()
    kernel(x.data_ptr(), out.data_ptr(), x.numel(), 0, *key, threads)


@lru_cache
def _kernel(dtype: torch.dtype, overflow: str) -> Callable[..., None] | None:
    defines: dict[str, str | None] = {"TO": C_TYPES[dtype]}
    if overflow == "saturate":
        defines["SATURATE"] = None
    library = kernels.load_or_warn("round.c", defines)
    if library is None:
        return None
    made: Any = library.round_stochastic
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    made.argtypes = [pointer, pointer, ctypes.c_int64, word, word, word, ctypes.c_int]
    made.restype = None
    return made  # type: ignore[no-any-return]


def _eagerly(x: Tensor, out: Tensor, key: Key, overflow: str) -> None:
    block = EAGER_BLOCK if x.device.type == "cpu" else x.numel()
    for start in range(0, x.numel(), block):
        part = x[start : start + block]
        bits = random_bits(key, part.numel(), x.device, start)
        out[start : start + block] = round_stochastic(part, out.dtype, bits, overflow)
