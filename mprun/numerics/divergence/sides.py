"""A side of a comparison: its model, its step on the batch, its ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mprun._torch import is_compiled
from mprun.nested import map_tensors
from mprun.numerics.divergence.boundaries import Recording, floating, original, record
from mprun.numerics.divergence.ops import OpError, op_errors
from mprun.numerics.passes import ready

SEED = 0


@dataclass(frozen=True)
class Side:
    """A model under autocast."""

    model: nn.Module
    autocast: torch.dtype | None = None
    """The dtype of a region around its call."""


class SharedStep:
    """The batch and the loss, for a side."""

    def __init__(self, inputs: Any, target: Any, loss: Callable[[Any, Any], Tensor] | None) -> None:
        self._inputs, self._target, self._loss = inputs, target, loss

    def arguments(self, side: Side) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of the model's call, floating ones in its parameters' dtype."""
        first = next((p for p in side.model.parameters() if p.is_floating_point()), None)

        def moved(x: Tensor) -> Tensor:
            if first is None:
                return x
            return x.to(first.device, first.dtype if x.is_floating_point() else x.dtype)

        given = map_tensors(moved, self._inputs)
        if isinstance(given, Mapping):
            return (), dict(given)
        return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}

    def loss(self, output: Any) -> Tensor:
        """A scalar of the model's output."""
        if self._loss is not None:
            return self._loss(output, self._target)
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, Tensor):
            return own
        parts = [x for x in floating(output) if x.requires_grad]
        generator = torch.Generator().manual_seed(SEED)
        sums = []
        for x in parts:
            weights = torch.randn(x.shape, generator=generator).to(x.device)
            sums.append((x.to(torch.promote_types(x.dtype, torch.float32)) * weights).mean())
        return torch.stack(sums).sum()

    def record(self, side: Side) -> Recording:
        """A step of a side."""
        args, kwargs = self.arguments(side)
        with ready(original(side.model), SEED):
            return record(side.model, args, kwargs, self.loss, side.autocast)

    def ops(self, side: Side) -> list[OpError]:
        """The ops of a side; none of a compiled one."""
        if any(map(is_compiled, side.model.modules())):
            return []
        args, kwargs = self.arguments(side)
        device = next((p.device for p in side.model.parameters()), torch.device("cpu"))

        def step() -> None:
            dtype = side.autocast or torch.bfloat16
            with torch.autocast(device.type, dtype, enabled=side.autocast is not None):
                output = side.model(*args, **kwargs)
            self.loss(output).backward()

        with ready(side.model, SEED):
            return op_errors(side.model, step)
