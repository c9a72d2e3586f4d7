"""Measures how fast a device computes in each number format.

A kernel for a dtype is not hardware for it: on a CPU without AMX-BF16 or AVX512-BF16, bfloat16 runs
up to a hundred times slower than float32. A list of processors is no answer: kernels change with
PyTorch's version, and environment variables can forbid instructions. So the op is timed in both
formats.

Calls that are compared take turns. A round times each call once, in alternating order, and a ratio
is that of two times of the same round. A slowdown longer than a round affects both times; the
median over rounds ignores a disturbance of a single time. One time is the mean of as many calls in
a row as last a millisecond, so that the clock's resolution does not matter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mprun.precision import devices
from mprun.precision._torch_switches import switches

SAMPLE_S = 1e-3  # Seconds for which calls are repeated to get one time
ROUNDS, TRIAL_ROUNDS = 9, 5  # Rounds of `accelerated`, and of `slowdown`, which times three ops
# Sizes of its matmul: one that takes a slow kernel milliseconds, one that fills a GPU
SIDE = {"cpu": 256, "cuda": 2048}


class TimedOp(NamedTuple):
    """An op to time."""

    shapes: tuple[tuple[int, ...], ...]  # Of the tensors it takes
    function: Callable[..., object]


def matmul(side: int) -> TimedOp:
    """[side, side] by [side, side]."""
    return TimedOp(((side, side), (side, side)), torch.matmul)


def convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
    """The gradients of a convolution with padding 1 to its input and its 3x3 weight."""
    ones, mask = [1, 1], [True, True, False]
    return torch.ops.aten.convolution_backward(
        gradient, x, weight, None, ones, ones, ones, False, [0, 0], 1, mask
    )


_IMAGES, _WEIGHT = (4, 16, 16, 16), (16, 16, 3, 3)
# Small ones, because a slow kernel takes up to a hundred times as long as float32
TRIED = (
    matmul(128),
    TimedOp((_IMAGES, _WEIGHT), partial(torch.conv2d, padding=1)),
    TimedOp((_IMAGES, _IMAGES, _WEIGHT), convolution_backward),
)


@dataclass(frozen=True)
class Timer:
    """An op in one format on a device, warmed up, to be timed repeatedly."""

    call: Callable[[], object]
    device: torch.device
    tf32: bool
    repeats: int  # Calls in a row for one time
    call_s: float  # Seconds of one call, measured once: for planning

    @property
    def round_s(self) -> float:
        """Seconds of a round, estimated."""
        return self.repeats * self.call_s

    def time_s(self) -> float:
        """The time of one call, the mean over `repeats`."""
        # As in a run: float32 is IEEE unless `tf32`, and 16-bit matmuls add up in float32
        with switches(self.tf32):
            # On CUDA a call returns before its work is done: the time is that between two events on
            # the stream, and calls in a row hide the cost of a launch
            timed = _device_s if devices.backend(self.device).events else _host_s
            return timed(self.call, self.repeats, self.device) / self.repeats


def timer(
    op: TimedOp,
    dtype: torch.dtype,
    device: torch.device,
    tf32: bool = False,
    images: torch.memory_format = torch.contiguous_format,
) -> Timer:
    """A timer of `op` on inputs of a dtype drawn from the normal distribution, in TF32 if `tf32`.

    `images` is the memory format of inputs with four dimensions.

    Raises:
        torch.OutOfMemoryError: they do not fit the device.
    """
    # Drawn on the CPU: the same numbers for each device and dtype
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(s, generator=generator).to(device, dtype) for s in op.shapes)
    inputs = [x.contiguous(memory_format=images) if x.dim() == 4 else x for x in drawn]
    return warm(lambda: op.function(*inputs), device, tf32)


def warm(call: Callable[[], object], device: torch.device, tf32: bool = False) -> Timer:
    """Call once to warm up (kernels are selected, some compiled) and once to measure how long."""
    first = Timer(call, device, tf32, repeats=1, call_s=math.nan)
    first.time_s()
    call_s = max(first.time_s(), 1e-9)  # a coarse clock may say 0
    return replace(first, repeats=max(1, math.ceil(SAMPLE_S / call_s)), call_s=call_s)


def alternate(
    timers: Sequence[Timer], rounds: int, begin_round: Callable[[int], None] = lambda _: None
) -> list[list[float]]:
    """Seconds of one call of each, a list with an entry per round for each of `timers`, in turn.

    `begin_round` is called with the number of rounds that are done.
    """
    times: list[list[float]] = [[] for _ in timers]
    order = list(range(len(timers)))
    for done in range(rounds):
        begin_round(done)
        for i in order:
            times[i].append(timers[i].time_s())
        order.reverse()  # a drift within a round then favours neither
    return times


@cache
def accelerated(dtype: torch.dtype, device: torch.device, tolerance: float = 1.0) -> bool:
    """Whether a matmul in `dtype` is faster here than in float32, by a short measurement.

    It compares the fastest round of each: a run needs an answer on a busy machine too, and other
    processes can only add time. A process tries once, so that its runs agree. `tolerance` is the
    largest ratio to float32's time that still counts as faster.
    """
    if dtype == torch.float32:
        return True
    op = matmul(SIDE.get(device.type, SIDE["cuda"]))
    return _times_float32(op, dtype, device, ROUNDS) < tolerance


@cache
def slowdown(dtype: torch.dtype, device: torch.device) -> float:
    """How many times as long as float32 `dtype` takes here, by a trial of a fraction of a second.

    The geometric mean over a matmul, a convolution and its gradients, each by the fastest of a few
    rounds, in one thread (see `accelerated`). A process tries once, so that its runs agree.
    """
    ratios = [_times_float32(op, dtype, device, TRIAL_ROUNDS) for op in TRIED]
    return math.prod(ratios) ** (1 / len(ratios))


def _times_float32(op: TimedOp, dtype: torch.dtype, device: torch.device, rounds: int) -> float:
    """The fastest round in a dtype over the fastest one in float32; images are channels-last."""
    # Several threads beside another process slow down tenfold, one dtype or the other by chance.
    with in_threads(1):
        pair = [timer(op, d, device, images=torch.channels_last) for d in (torch.float32, dtype)]
        single, other = alternate(pair, rounds)
    return min(other) / min(single)


@contextmanager
def in_threads(count: int) -> Iterator[None]:
    """Inside, PyTorch computes on the CPU in `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _host_s(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    devices.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    devices.synchronize(device)
    return time.perf_counter() - start


def _device_s(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    begin = devices.event(device)
    for _ in range(repeats):
        call()
    end = devices.event(device)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3  # of milliseconds
