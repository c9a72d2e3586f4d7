"""What carries a policy out: prepare the model, run it, go backward, step.

`Precision` is one class with four parts. The policy names the dtypes. The caster decides how ops
get theirs. The arithmetic computes the ops. The loss scale scales the loss and decides whether a
step is taken. A mode is a choice of parts, never a subclass, so the training loop is the same for
all modes. In your own loop:

    precision.prepare(model, device)
    for step, (x, y) in enumerate(batches, start=1):
        optimizer.zero_grad()
        precision.begin_step(step)
        loss = precision.loss(loss_function, precision.forward(model, x), y)
        precision.backward(loss)
        skipped = precision.step(optimizer)
        precision.update()

With several models and optimizers: prepare each model, step each optimizer, update once. To read or
clip gradients, unscale them first. In every mode they are then the gradients of the loss itself, in
float32 where the loss was scaled:

        precision.unscale(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        precision.step(optimizer)
        precision.update()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.nested import to_dtype
from mprun.precision.arithmetic import Arithmetic, with_lstm_fallback
from mprun.precision.buffers import BufferGuard, BufferOverflow
from mprun.precision.caster import AutocastCaster, Caster
from mprun.precision.convert import accumulate_in, convert
from mprun.precision.layers import keep_layers, layer_precisions, resolve
from mprun.precision.loss_scale import LossScale
from mprun.precision.op_lists import disable_casts
from mprun.precision.policy import Policy, dtype_name, torch_dtype
from mprun.precision.random_bits import name_parameters
from mprun.precision.update import Clip


class Precision:
    """A policy at work on a model, or on several that train together.

    Args:
        caster: the region the forward pass runs in.
        arithmetic: the region forward pass, loss and backward pass run in.
        clip: the gradient clipping between unscaling and stepping.
        layers: module names or globs to the precision of each: fp32, fp16, bf16, or a mode.
    """

    def __init__(
        self,
        policy: Policy,
        caster: Caster,
        arithmetic: Arithmetic,
        loss_scale: LossScale,
        clip: Clip,
        layers: Mapping[str, str] | None = None,
    ) -> None:
        self.policy = policy
        self.loss_scale = loss_scale
        self.arithmetic = arithmetic
        self._caster = caster
        self._clip = clip
        self._layers = layers or {}
        self._output_dtype = torch_dtype(policy.output_dtype)
        self._guards: dict[nn.Module, BufferGuard] = {}

    @property
    def columns(self) -> dict[str, object]:
        """The policy's columns that caster, arithmetic and the cast of outputs decide."""
        output_dtype = dtype_name(self._output_dtype)
        return {**self._caster.columns, **self.arithmetic.columns, "output_dtype": output_dtype}

    def prepare(
        self,
        model: nn.Module,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> nn.Module:
        """`model` on `device`, its parameters and floating buffers in the parameter dtype.

        Layers of `layers` get their own dtype. Gradients are accumulated in the policy's dtype.

        Raises:
            ValueError: `layers` names no module, names one twice, gives tied parameters two
                dtypes, or gives a layer what it cannot have in this mode.
        """
        named = layer_precisions(resolve(model, self._layers), self.policy)
        dtype = torch_dtype(self.policy.param_dtype)
        convert(model, device, dtype, memory_format, {n: x.stored for n, x in named.items()})
        if named:
            casts = self.policy.casts
            caster = self._caster if casts else AutocastCaster(device.type, torch.float32)
            keep_layers(model, named, None if casts else dtype, caster.layer_region)
        self._caster.convert(model)
        accumulate_in(model, torch_dtype(self.policy.accum_dtype))
        self.arithmetic = with_lstm_fallback(self.arithmetic, model, self.policy.casting, device)
        number = [*dict.fromkeys([*self._guards, model])].index(model) + 1
        prefix = "" if number == 1 else f"model {number}: "
        needed = self.loss_scale.tensor is not None or self.policy.is_low
        self._guards[model] = BufferGuard(model, prefix, active=needed)
        name_parameters(model, prefix)
        return model

    def begin_step(self, step: int) -> None:
        """Optimizer step number `step` begins: call it before the step's first forward pass.

        The number decides the bits of stochastic rounding, so each step needs its own. It also ends
        an iteration that `update` did not end.
        """
        self.update()
        self.arithmetic.begin_step(step)
        for guard in self._guards.values():
            guard.before(step)

    def forward(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`model(*args, **kwargs)`, its floating tensors in the policy's output dtype.

        Tuples, mappings and dataclasses keep their type; other leaves pass. The output dtype is
        float32 unless the policy names another one.
        """
        with self.arithmetic.region():
            with self._caster.region():
                output = model(*args, **kwargs)
            return to_dtype(output, self._output_dtype)

    def loss(
        self,
        function: Callable[[Any, Any], Tensor],
        output: Any,
        target: Any,
        share: float = 1,
    ) -> Tensor:
        """`share` of the loss `function(output, target)`, a scalar.

        The caster does not apply, the arithmetic does: an output in 16 bits has its loss computed
        in 16 bits, and emulation rounds it like every other result.
        """
        with self.arithmetic.region():
            loss = function(output, target)
            return loss if share == 1 else loss * share

    def backward(
        self, loss: Tensor, *, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Add the (scaled) loss's gradients to the parameters' `grad`.

        `retain_graph` and `create_graph` are those of `Tensor.backward`; with the latter, gradients
        are those of the scaled loss until `unscale`.
        """
        scaled = self._scaled(loss)
        with self.arithmetic.region():
            self._caster.backward(scaled, retain_graph, create_graph)

    def _scaled(self, loss: Tensor) -> Tensor:
        return self.loss_scale.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer` by the loss scale, before its step.

        16-bit gradients become float32 ones, in which small values survive, until `update`.
        Nothing happens where the loss is not scaled.

        Raises:
            RuntimeError: they are unscaled already, or the optimizer has stepped.
        """
        self.loss_scale.unscale(optimizer)

    def step(self, optimizer: Optimizer) -> Tensor | None:
        """Unscale the gradients if `unscale` did not, clip them, update the parameters.

        Returns:
            1 where a gradient was not finite and the step was skipped, else 0, a float32 scalar on
            the device; None where steps are never skipped.

        Raises:
            RuntimeError: the optimizer has stepped in this iteration.
        """
        self.arithmetic.end_step()
        self._caster.end_step()
        with disable_casts():
            skipped = self.loss_scale.step(optimizer, self._clip)
        for guard in self._guards.values():
            guard.after(skipped)
        return skipped

    def update(self) -> None:
        """End an iteration, after the step of its last optimizer: the loss scale moves."""
        self.loss_scale.update()

    def buffer_overflows(self) -> list[BufferOverflow]:
        """Buffers that became non-finite in steps that were taken, since the last call.

        On CUDA it waits for those steps.
        """
        return [x for guard in self._guards.values() for x in guard.overflows()]
