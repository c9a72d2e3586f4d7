"""Metric readback: losses and counts of steps are read when this costs no time.

On the CPU a scalar is read at once, since it is computed when the step returns. To keep thousands
of tiny tensors alive between large ones would make the allocator return memory and fault it in
again at every step (measured: 30 to 50 page faults a step on `linear`). On an accelerator, reading
a scalar makes the host wait for the step. So scalars are copied into a buffer on the device and
read together, a fraction of a second late. Where each step is waited for anyway, they are read at
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mprun import devices


class StepMetrics(NamedTuple):
    """The metrics of a step or an evaluated batch."""

    loss: float | None
    """None for an evaluated batch without a loss."""
    correct: int | None = None
    loss_scale: float = 1.0
    skipped: bool = False
    parts: Mapping[str, float] = MappingProxyType({})
    """The named parts of the loss."""


class Scalars(NamedTuple):
    """The same on the device; None for what does not apply."""

    loss: Tensor | None
    correct: Tensor | None = None
    loss_scale: Tensor | None = None
    skipped: Tensor | None = None
    parts: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def values(self) -> tuple[Tensor | None, ...]:
        """All of them, the parts last."""
        single = (self.loss, self.correct, self.loss_scale, self.skipped)
        return (*single, *self.parts.values()) if self.parts else single


SINGLE = 4
"""How many of `Scalars.values` are no parts."""


class MetricReadback(Protocol):
    """Collects the scalars of each step, and reads them."""

    @property
    def full(self) -> bool:
        """Whether `take` must be called before the next step."""

    def put(self, scalars: Scalars) -> None:
        """Add a step's scalars."""

    def take(self) -> list[StepMetrics]:
        """The metrics of the steps since the last call, in order."""


def _metrics(values: Sequence[float | None], names: Iterable[str]) -> StepMetrics:
    """The numbers of `Scalars.values`; `names` are those of the parts."""
    loss, correct, loss_scale, skipped, *parts = values
    count = None if correct is None else int(correct)
    scale = 1.0 if loss_scale is None else loss_scale
    if not parts:
        return StepMetrics(loss, count, scale, bool(skipped))
    named = {k: x for k, x in zip(names, parts, strict=False) if x is not None}
    return StepMetrics(loss, count, scale, bool(skipped), named)


class HostReadback:
    """Read at once."""

    full = False

    def __init__(self) -> None:
        self._metrics: list[StepMetrics] = []

    def put(self, scalars: Scalars) -> None:
        values = [None if x is None else x.item() for x in scalars.values]
        self._metrics.append(_metrics(values, scalars.parts))

    def take(self) -> list[StepMetrics]:
        taken, self._metrics = self._metrics, []
        return taken


class DeviceReadback:
    """For an accelerator: collected on the device, read together.

    Args:
        device: where the scalars are.
        capacity: after this many steps they must be read.
    """

    def __init__(self, device: torch.device, capacity: int = 1024) -> None:
        # float64 holds every count and every float32 exactly.
        self._buffer = torch.zeros(capacity, SINGLE, dtype=torch.float64).to(device)
        self._present: list[tuple[bool, ...]] = []
        self._names: list[tuple[str, ...]] = []

    @property
    def full(self) -> bool:
        return len(self._present) == len(self._buffer)

    def put(self, scalars: Scalars) -> None:
        values = scalars.values
        missing = len(values) - self._buffer.shape[1]
        if missing > 0:  # the loss has more parts than any before
            more = self._buffer.new_zeros(len(self._buffer), missing)
            self._buffer = torch.cat((self._buffer, more), 1)
        row = self._buffer[len(self._present)]
        for slot, value in zip(row, values, strict=False):
            if value is not None:
                slot.copy_(value.detach())
        self._present.append(tuple(x is not None for x in values))
        self._names.append(tuple(scalars.parts))

    def take(self) -> list[StepMetrics]:
        (present, self._present), (names, self._names) = (self._present, []), (self._names, [])
        rows = self._buffer[: len(present)].tolist()
        return [
            _metrics([x if there else None for x, there in zip(row, is_there, strict=False)], own)
            for row, is_there, own in zip(rows, present, names, strict=True)
        ]


def readback_for(device: torch.device) -> MetricReadback:
    """The readback for a device."""
    known = devices.backend(device)
    return DeviceReadback(device) if known.events and known.float64 else HostReadback()
