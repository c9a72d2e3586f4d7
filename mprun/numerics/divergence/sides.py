"""A side of a comparison: its model, its step on the batch, its ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mprun._torch import is_compiled, original_module
from mprun.nested import map_tensors
from mprun.numerics.divergence.boundaries import Recording, floating, record
from mprun.numerics.divergence.ops import op_errors
from mprun.numerics.passes import ready
from mprun.records.capture_record import OpError

SEED = 0


@dataclass(frozen=True)
class Side:
    """A model, and the casts around its call."""

    model: nn.Module
    autocast: torch.dtype | None = None
    """The dtype of an autocast region around the call."""
    region: Callable[[], AbstractContextManager[object]] | None = None
    """Another region around it."""
    low: torch.dtype | None = None
    """The dtype that `region` casts to."""

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """That of the first floating parameter."""
        floats = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return next(floats, torch.float32)

    @property
    def is_compiled(self) -> bool:
        """Whether a part of it is."""
        return any(map(is_compiled, self.model.modules()))

    def around(self) -> AbstractContextManager[object]:
        """A new region."""
        if self.region is not None:
            return self.region()
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast)


class SharedStep:
    """The same batch and loss for both sides.

    Args:
        forward: `forward(model, inputs)`, the output.
        inputs: floating tensors are brought to each side's dtype.
        loss: `loss(output)`, a scalar; None for that of `own_loss`.
    """

    def __init__(
        self,
        forward: Callable[[nn.Module, Any], Any],
        inputs: Any,
        loss: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self._forward, self._inputs, self._loss = forward, inputs, loss or own_loss

    def run(self, device: torch.device, dtype: torch.dtype, model: nn.Module) -> Any:
        """The output of a model for the inputs in a dtype."""
        inputs = map_tensors(
            lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), self._inputs
        )
        return self._forward(model, inputs)

    def exactly(self, side: Side) -> Callable[[nn.Module], Any]:
        """Runs a float64 model on the device of a side."""
        return partial(self.run, side.device, torch.float64)

    def record(self, side: Side) -> Recording:
        """A step of a side."""
        run = partial(self.run, side.device, side.dtype, side.model)
        with ready(original_module(side.model), SEED):
            return record(side.model, run, self._loss, side.around(), side.low)

    def ops(self, side: Side) -> list[OpError]:
        """The ops of a side; none of a compiled one."""
        if side.is_compiled:
            return []

        def step() -> None:
            with side.around():
                output = self.run(side.device, side.dtype, side.model)
            self._loss(output).backward()

        with ready(side.model, SEED):
            return op_errors(side.model, step)


def own_loss(output: Any) -> Tensor:
    """The output's own `loss`, else a fixed random projection of it: a scalar."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    generator = torch.Generator().manual_seed(SEED)
    sums = []
    for x in floating(output):
        if x.requires_grad:
            weights = torch.randn(x.shape, generator=generator).to(x.device)
            sums.append((x.to(torch.promote_types(x.dtype, torch.float32)) * weights).mean())
    if not sums:
        raise ValueError("the model's output has no floating tensor with a gradient: give a loss")
    return torch.stack(sums).sum()
