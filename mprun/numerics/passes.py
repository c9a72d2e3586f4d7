"""Forward and backward passes of a model whose ops are cast in one way or another.

The model runs in training mode, so that batch normalisation takes the batch's statistics, but
without dropout, whose choice of elements may differ between dtypes. Its flags, buffers and
gradients are put back after each pass, so that passes can be compared, and leave nothing behind.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mprun.errors import first_line
from mprun.numerics.float64 import in_float64
from mprun.precision import Arithmetic, Caster, NativeArithmetic, NoCaster
from mprun.precision.caster import LayerRegions
from mprun.precision.layers import computing_in

Loss = Callable[[Any, Any], Tensor]
Batch = tuple[Any, Any]
"""What the model takes (a tensor, a tuple of arguments, or a mapping of named ones), and what the
loss takes beside the model's output."""


class NotMeasurableError(ValueError):
    """A model or a loss that nothing can be said of."""


BATCH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Layers that take statistics of what they are given in training, and kept ones otherwise."""


@dataclass(frozen=True)
class Way:
    """How a model's ops get their dtype: from a caster, and in some modules otherwise."""

    caster: Caster
    modules: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Modules with a dtype of their own, as `precision.layers` gives them one."""
    layer_region: LayerRegions | None = None
    """The regions in them; None for the caster's own."""
    arithmetic: Arithmetic = field(default_factory=NativeArithmetic)
    """Whose kernels compute."""

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """The modules of `model` are wrapped; enter `caster.region` for each forward pass."""
        with computing_in(model, self.modules, self.layer_region or self.caster.layer_region):
            yield


FLOAT32 = Way(NoCaster())
"""Nothing is cast."""


class Pass(NamedTuple):
    """What a forward and a backward pass gave."""

    loss: float
    gradients: list[Tensor] | None
    """Of each parameter that is trained, zeros where it has none; None where the loss is not
    finite."""
    failure: str = ""
    """What went wrong where an op cannot be computed in this way at all."""


class Passes:
    """Runs a model on fixed batches.

    Args:
        model: its parameters are float32, or float64 where it wants them so.
        loss: `loss(output, target)`, a scalar; 16-bit outputs are brought to float32 before it.
        batches: inputs and target each, on the model's device.
        seed: of the random numbers that the model may draw; the same in each pass.

    Raises:
        NotMeasurableError: no batches, no parameters to train, or 16-bit ones.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, batches: Iterable[Batch], seed: int = 0
    ) -> None:
        self.model = model
        self.batches = list(batches)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self._loss = loss
        self._seed = seed
        if not self.batches:
            raise NotMeasurableError("there is no batch to measure on")
        if not named:
            raise NotMeasurableError("the model has no parameter that is trained")
        for name, p in named:
            if p.dtype in (torch.float16, torch.bfloat16):
                raise NotMeasurableError(
                    f"parameter {name} is {p.dtype}: ops are chosen for a model whose parameters "
                    "are float32"
                )

    def run(self, way: Way, n: int, scale: float = 1.0) -> Pass:
        """Loss and gradients on batch number `n`.

        Args:
            way: how ops are cast.
            n: which batch.
            scale: the loss is multiplied by it before the backward pass, the gradients divided.
        """
        with ready(self.model, self._seed), way.on(self.model):
            try:
                loss = self._forward(way, n)
                value = float(loss.detach())
                if not math.isfinite(value):
                    return Pass(value, None)
                self._backward(way, loss * scale)
            except RuntimeError as error:  # there is no kernel for a dtype, or none for two
                if way is FLOAT32 or is_out_of_memory(error):
                    raise
                return Pass(math.nan, None, first_line(error))
            return Pass(value, [_gradient(p, scale) for p in self.parameters])

    def run_in_float64(self, n: int) -> Pass:
        """The same on batch number `n` with everything in float64, and the same random numbers.

        Raises:
            Exception: whatever the model raises where it does not run in float64.
        """
        with in_float64(self.model):
            return self.run(FLOAT32, n)

    def time_s(self, way: Way, scale: float = 1.0) -> float:
        """Seconds of a forward and a backward pass on the first batch."""
        with ready(self.model, self._seed), way.on(self.model):
            self._wait()
            began = time.perf_counter()
            self._backward(way, self._forward(way, 0) * scale)
            self._wait()
            return time.perf_counter() - began

    def _forward(self, way: Way, n: int) -> Tensor:
        inputs, target = self.batches[n]
        with way.arithmetic.region():
            with way.caster.region():
                output = call(self.model, inputs)
            return self._loss(tree_map(_widened, output), target).float()

    def _backward(self, way: Way, loss: Tensor) -> None:
        with way.arithmetic.region():
            way.caster.backward(loss)

    def _wait(self) -> None:
        if self.parameters[0].device.type == "cuda":
            torch.cuda.synchronize(self.parameters[0].device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an op failed for want of memory and not for its dtypes."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output for the inputs of a batch."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@contextmanager
def ready(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """`model` as it trains but for dropout, without gradients; afterwards as it was before."""
    trained = [m for m in model.modules() if m.training]
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [
        (m, name, b, b.detach().clone())
        for m in model.modules()
        for name, b in m.named_buffers(recurse=False)
    ]
    cuda = [p.device for p, _ in gradients if p.device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda[:1]):
        torch.manual_seed(seed)
        try:
            for module in trained:
                module.training = _is_deterministic(module)
            for p, _ in gradients:
                p.grad = None
            yield
        finally:
            for module in trained:
                module.training = True
            for p, gradient in gradients:
                p.grad = gradient
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    setattr(module, name, buffer.copy_(before))


def _is_deterministic(module: nn.Module) -> bool:
    """Whether a module draws no random numbers in training, and is another without it."""
    recurrent = isinstance(module, nn.RNNBase) and not module.dropout  # cuDNN's backward pass
    return recurrent or isinstance(module, BATCH_STATISTICS)


def _widened(x: Any) -> Any:
    low = isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if low else x


def _gradient(p: Tensor, scale: float) -> Tensor:
    if p.grad is None:
        return torch.zeros_like(p)
    gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
    return gradient if scale == 1 else gradient / scale
