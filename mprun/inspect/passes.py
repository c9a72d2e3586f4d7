"""Forward and backward passes of a model whose ops are cast by one plan or another.

The model runs in training mode, so that batch normalisation takes the batch's statistics, but
without dropout, whose choice of elements may differ between dtypes. Its flags, buffers and
gradients are restored after each pass, so that passes are comparable and leave nothing behind.

Inside `in_float64` weights, buffers and every tensor that the model's code makes or uses in float32
are float64: for the true loss and gradients.
"""

from __future__ import annotations

import dis
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mprun.errors import NotMeasurableError, first_line
from mprun.precision import (
    Arithmetic,
    Caster,
    NativeArithmetic,
    NoCaster,
    Precision,
    StaticLossScale,
    devices,
)
from mprun.precision._torch import DispatchMode, tree_map
from mprun.precision.apply import call, forward_backward
from mprun.precision.caster import LayerRegions
from mprun.precision.gemms import LinearGemms, computing_with
from mprun.precision.layers import computing_in
from mprun.precision.nested import with_items
from mprun.precision.policy import policy
from mprun.train.recipe_quantities import Quantity, values_of

Loss = Callable[[Any, Any], Tensor]
# What `forward` takes (by default a tensor, a tuple of arguments, or a mapping of named ones), and
# the second argument of the loss, after the output
Batch = tuple[Any, Any]
Forward = Callable[[nn.Module, Any], Any]  # Gives a model's output for the inputs of a batch


class _LossNotFiniteError(Exception):
    """The loss is not finite; there is no backward pass."""


# Layers that use the batch's statistics in training, and running statistics otherwise
BATCH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


@dataclass(frozen=True)
class CastPlan:
    """Which ops of a model run in which dtype."""

    caster: Caster
    modules: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Modules with a dtype of their own, as with `precision.layers`."""
    layer_region: LayerRegions | None = None  # The regions inside them; None for the caster's own
    arithmetic: Arithmetic = field(default_factory=NativeArithmetic)  # Computes the ops
    gemms: Mapping[str, LinearGemms] = field(default_factory=dict)
    """Linear layers whose products have formats of their own."""

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """The modules of `model` are wrapped; enter `caster.region` for each forward pass."""
        region = self.layer_region or self.caster.layer_region
        with computing_with(model, self.gemms, 0), computing_in(model, self.modules, region):
            yield


FLOAT32 = CastPlan(NoCaster())  # Nothing is cast


class Pass(NamedTuple):
    """The result of a forward and a backward pass."""

    loss: float
    gradients: list[Tensor] | None
    """The gradient of each trained parameter, or zeros; None if the loss is not finite."""
    failure: str = ""  # The error of an op that has no kernel for its dtypes; empty without one


class Passes:
    """Runs a model on fixed batches.

    Args:
        model: its parameters are float32, or float64 for a model that wants them so.
        loss: `loss(output, target)`, a scalar; it gets float32 outputs.
        batches: inputs and target each, on the model's device.
        forward: gives the model's output for the inputs of a batch.
        quantities: those of the recipe, which `values` computes.

    Raises:
        NotMeasurableError: no batches, no parameters to train, or 16-bit ones.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Iterable[Batch],
        forward: Forward = call,
        quantities: Mapping[str, Quantity] = MappingProxyType({}),
    ) -> None:
        self.model = model
        self.quantities = quantities
        self.forward = forward
        self.batches = list(batches)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in trained]
        self.parameters = [p for _, p in trained]
        self._loss = loss
        self._policy = policy("fp32")
        if not self.batches:
            raise NotMeasurableError("there is no batch to measure on")
        if not trained:
            raise NotMeasurableError("the model has no parameter that is trained")
        for name, p in trained:
            if p.dtype in (torch.float16, torch.bfloat16):
                raise NotMeasurableError(
                    f"parameter {name} is {p.dtype}: op search needs a model with float32 "
                    "parameters"
                )

    def run(self, plan: CastPlan, n: int, scale: float = 1.0) -> Pass:
        """Loss and gradients on batch number `n`.

        The loss is multiplied by `scale` before the backward pass, the gradients divided.
        """
        loss_scale = StaticLossScale(scale, self.parameters[0].device)
        precision = Precision(
            self._policy, execution=plan.arithmetic, loss_scale=loss_scale, op_lists=plan.caster
        )
        with ready(self.model), plan.applied_to(self.model):
            try:
                loss, _ = forward_backward(
                    precision,
                    functools.partial(self.forward, self.model),
                    # float32 also of a loss in 16 bits, which a scale of 2^16 would overflow
                    lambda output, target: self._loss(output, target).float(),
                    *self.batches[n],
                    before_backward=_check_finite,
                )
            except _LossNotFiniteError as error:
                return Pass(error.args[0], None)
            except RuntimeError as error:  # there is no kernel for a dtype, or none for two
                if plan is FLOAT32 or is_out_of_memory(error):
                    raise
                return Pass(math.nan, None, first_line(error))
            return Pass(float(loss), [_gradient(p, scale) for p in self.parameters])

    def values(self, plan: CastPlan) -> dict[str, Tensor]:
        """Each quantity over all batches, in float64; NaN where an op has no kernel."""
        if not self.quantities:
            return {}
        precision = Precision(self._policy, execution=plan.arithmetic, op_lists=plan.caster)
        with ready(self.model), plan.applied_to(self.model):
            try:
                made = values_of(self.quantities, precision, self.model, self.batches)
            except RuntimeError as error:
                if plan is FLOAT32 or is_out_of_memory(error):
                    raise
                return dict.fromkeys(self.quantities, torch.tensor(math.nan))
        return {name: value.entries for name, value in made.items()}


def _check_finite(loss: Tensor) -> None:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise _LossNotFiniteError(value)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an op failed for lack of memory and not because of its dtypes."""
    # The CPU's allocator raises a plain RuntimeError
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def ready(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """`model` trains, without dropout and gradients; its state is restored afterwards.

    `seed` is that of the random numbers that it may draw: equal in passes that are compared.
    """
    training = [m for m in model.modules() if m.training]
    buffers = [
        (m, name, b, b.detach().clone())
        for m in model.modules()
        for name, b in m.named_buffers(recurse=False)
    ]
    devices_of = [p.device for p in model.parameters()][:1]
    with devices.random_numbers_kept(devices_of), _without_gradients(model):
        torch.manual_seed(seed)
        try:
            for module in training:
                module.training = _trains_alike(module)
            yield
        finally:
            for module in training:
                module.training = True
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    # Also where the model put another tensor in its place
                    setattr(module, name, buffer.copy_(before))


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter has a gradient at first; those of before are put back."""
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        for p, _ in gradients:
            p.grad = None
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient


def _trains_alike(module: nn.Module) -> bool:
    """Whether a module draws no random numbers in training and needs the training mode.

    One whose own code asks for the mode, and not for dropout, gives other outputs in training:
    losses in a detector, auxiliary classifiers in an Inception.
    """
    recurrent = isinstance(module, nn.RNNBase) and not module.dropout  # cuDNN's backward pass
    return recurrent or isinstance(module, BATCH_STATISTICS) or _asks_for_mode(type(module))


def _asks_for_mode(kind: type[nn.Module]) -> bool:
    """Whether the code of `forward` reads `training`, and calls no dropout function with it."""
    code = getattr(kind.forward, "__code__", None)
    # Of PyTorch's own modules, those that need the mode are named by the caller
    if kind.__module__.startswith("torch.nn.") or code is None or "training" not in code.co_names:
        return False
    steps = list(dis.get_instructions(code))
    # `self.dropout` is a module, and has a mode of its own; `F.dropout` is a function.
    return not any(
        "drop" in str(step.argval) and not before.opname.startswith("LOAD_FAST")
        for before, step in pairwise(steps)
        if step.opname in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF")
    )


def _gradient(p: Tensor, scale: float) -> Tensor:
    if p.grad is None:
        return torch.zeros_like(p)
    gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
    return gradient if scale == 1 else gradient / scale


# ---- in float64 ----------------------------------------------------------------------------------


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """`model` computes in float64; its state is restored afterwards.

    Parameters have no gradients at first. Gradients of the region are discarded at its end.
    """
    parameters = [(p, p.data) for p in model.parameters() if p.dtype == torch.float32]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.dtype == torch.float32
    ]
    with _without_gradients(model):
        try:
            for p, value in parameters:
                p.data = value.double()
            for module, name, buffer in buffers:
                setattr(module, name, buffer.double())
            with _Draws(), _Widening():  # type: ignore[no-untyped-call]
                yield
        finally:
            for p, value in parameters:
                p.grad = None  # PyTorch refuses a gradient of another dtype than its parameter's
                p.data = value
            for module, name, buffer in buffers:
                setattr(module, name, buffer)


class _Widening(TorchFunctionMode):
    """Every function computes in float64 instead of float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `x.float()` names its dtype in no argument
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = _widened((args, kwargs or {}))
        return _widened(func(*args, **kwargs))


class _Draws(DispatchMode):
    """Random numbers that would be drawn in float64 are drawn in float32, and then widened.

    A generator gives other numbers in float64: with another noise or dropout, the model would be
    another one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        low_args, low_kwargs = tree_map(_narrow, (args, kwargs))
        drawn = func(*low_args, **low_kwargs)
        if func is torch.ops.aten.native_dropout.default:  # it multiplies as well
            x, p, mask = args[0], args[1], drawn[1]
            return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
        # In place (`x.uniform_()`): the narrow copy was drawn into, not the tensor itself
        if func.overloadpacket.__name__.endswith("_") and args[0] is not low_args[0]:
            return args[0].copy_(drawn)
        return tree_map(_wide, drawn)


def _widened(value: Any) -> Any:
    """As `tree_map(_wide, value)`, which takes four times as long: this runs at every function."""
    if isinstance(value, tuple | list):
        return with_items(value, [_widened(x) for x in value])
    if isinstance(value, dict):
        return {key: _widened(x) for key, x in value.items()}
    return _wide(value)


def _wide(x: Any) -> Any:
    if isinstance(x, Tensor) and x.dtype == torch.float32:
        return x.double()
    return torch.float64 if x is torch.float32 else x


def _narrow(x: Any) -> Any:
    if isinstance(x, Tensor) and x.dtype == torch.float64:
        return x.float()
    return torch.float32 if x is torch.float64 else x
