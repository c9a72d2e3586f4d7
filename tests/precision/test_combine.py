"""Clipping and skipped steps where two processes have a shard each; here they are two threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.optim import SGD, AdamW, MasterWeights, mark_shard
from mprun.optim.masters import masters_of
from mprun.precision import (
    Combine,
    DynamicLossScale,
    DynamicRule,
    LossScale,
    Precision,
    StaticLossScale,
)
from tests.each import each
from tests.optim import normal
from tests.waiting import PATIENCE_S

CPU = torch.device("cpu")
HALF, BRAIN = torch.float16, torch.bfloat16
SIZE = 25


class Meeting(Combine):
    """Two processes of the test; each waits for the other, so a missing call is an error."""

    def __init__(self) -> None:
        self._barrier, self._values = Barrier(2), [torch.zeros(())] * 2
        self.calls: list[list[str]] = [[], []]

    def exchange(self, rank: int, name: str, value: Tensor) -> Tensor:
        self.calls[rank].append(name)
        self._values[rank] = value
        self._barrier.wait(PATIENCE_S)
        values = torch.stack(self._values)
        self._barrier.wait(PATIENCE_S)
        return values


class OneOfTwo(Combine):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def total_norm(self, norm: Tensor) -> Tensor:
        return torch.linalg.vector_norm(self._meeting.exchange(self._rank, "norm", norm))

    def overflow(self, flag: Tensor) -> Tensor:
        return self._meeting.exchange(self._rank, "overflow", flag).amax()


Make = Callable[[nn.Parameter], Optimizer]


def with_masters(p: nn.Parameter) -> MasterWeights:
    masters = masters_of([p])
    return MasterWeights(torch.optim.SGD([*masters], lr=2.0**-6), masters)


OPTIMIZERS: dict[str, tuple[torch.dtype, Make]] = {
    "sgd": (BRAIN, lambda p: SGD([p], lr=2.0**-6)),
    "adamw": (HALF, lambda p: AdamW([p], momentum_dtype=BRAIN, variance_dtype=HALF)),
    "masters": (BRAIN, with_masters),
    "torch": (torch.float32, lambda p: torch.optim.SGD([p], lr=2.0**-6)),
}
SCALES: dict[str, Callable[[], LossScale]] = {
    "none": LossScale,
    "static": lambda: StaticLossScale(8.0, CPU),
    "dynamic": lambda: DynamicLossScale(8.0, DynamicRule(), CPU),
}


def precision(scale: LossScale, max_norm: float, combine: Combine) -> Precision:
    return Precision("fp32", device=CPU, loss_scale=scale, max_norm=max_norm, combine=combine)


def train(
    part: slice, kind: str, scale: str, early: bool, gradient: Tensor, combine: Combine
) -> tuple[Tensor, Any, Any]:
    """Two steps on a part; the parameter, the last step's flag, and the loss scale after it."""
    dtype, make = OPTIMIZERS[kind]
    p = nn.Parameter(normal((SIZE,), 1, dtype)[part])
    mark_shard(p, "weight", part.start)
    ours = precision(SCALES[scale](), 0.5, combine)
    optimizer, skipped = make(p), None
    for _ in range(2):
        factor = 1.0 if scale == "none" else ours.loss_scale.tensor
        assert factor is not None
        p.grad = (gradient[part] * factor).to(dtype)
        if early:
            ours.unscale(optimizer)
        skipped = ours.step(optimizer)
        ours.update()
    tensor = ours.loss_scale.tensor
    return p.detach(), *(None if x is None else x.item() for x in (skipped, tensor))


def train_two(cut: int, *how: Any) -> tuple[list[tuple[Tensor, Any, Any]], list[list[str]]]:
    """As `train` by two processes, cut in two at `cut`; and what they have combined."""
    meeting, parts = Meeting(), (slice(0, cut), slice(cut, SIZE))
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(train, part, *how, OneOfTwo(meeting, rank))
            for rank, part in enumerate(parts)
        ]
        return [x.result(2 * PATIENCE_S) for x in running], meeting.calls


SCALED = [(scale, early) for scale in ("static", "dynamic") for early in (False, True)]
"""Loss scales, each with the gradients unscaled in the step or before it."""


@each(("scale", "early"), [("none", False), *SCALED])
@each("cut", [9, SIZE])
@each("kind", OPTIMIZERS)
def test_clipped_shards_are_the_clipped_whole_bit_for_bit(
    kind: str, scale: str, early: bool, cut: int
) -> None:
    """Ones have exact norms: 3 and 4 of the shards, 5 of the whole. One shard may be empty."""
    gradient = torch.ones(SIZE)
    whole, flag, factor = train(slice(0, SIZE), kind, scale, early, gradient, Combine())
    found, calls = train_two(cut, kind, scale, early, gradient)
    assert torch.equal(torch.cat([p for p, *_ in found]), whole)
    assert [x[1:] for x in found] == [(flag, factor)] * 2
    assert flag == (None if scale == "none" else 0)
    assert calls[0] == calls[1] == (["norm"] if scale == "none" else ["overflow", "norm"]) * 2
    alone, *_ = train(slice(9, SIZE), kind, scale, early, gradient, Combine())
    assert not torch.equal(alone, whole[9:]) or kind == "adamw"  # whose step forgets the size


@each("planted", [float("inf"), float("nan")])
@each("place", [0, SIZE - 1])
@each(("scale", "early"), SCALED)
@each("kind", OPTIMIZERS)
def test_an_overflow_of_one_shard_skips_the_steps_of_both(
    kind: str, scale: str, early: bool, place: int, planted: float
) -> None:
    gradient = torch.ones(SIZE)
    gradient[place] = planted
    found, calls = train_two(9, kind, scale, early, gradient)
    before = normal((SIZE,), 1, OPTIMIZERS[kind][0])
    assert torch.equal(torch.cat([p for p, *_ in found]), before)
    assert [x[1:] for x in found] == [(1, 2.0 if scale == "dynamic" else 8.0)] * 2
    assert calls[0] == calls[1]


def test_a_process_without_any_gradient_takes_part() -> None:
    """Its norm is 0 and nothing overflowed, on the device of its parameters."""

    class Seen(Combine):
        def total_norm(self, norm: Tensor) -> Tensor:
            values.append(norm)
            return norm

        def overflow(self, flag: Tensor) -> Tensor:
            values.append(flag)
            return flag

    for dtype, make in OPTIMIZERS.values():
        values: list[Tensor] = []
        optimizer = make(nn.Parameter(torch.ones(3, dtype=dtype)))
        assert precision(StaticLossScale(8.0, CPU), 1.0, Seen()).step(optimizer) == 0
        assert [x.item() for x in values] == [0, 0]
        assert all(x.dtype == torch.float32 and x.device == CPU for x in values)
