"""What carries a policy out: prepare the model, run it, go backward, step.

One class by composition: the policy says which dtypes, the caster how ops get theirs, the
arithmetic whose kernels compute them, the loss scale what the backward pass starts from and whether
a step is taken. A mode is a choice of parts, never a subclass, so that the training loop is the
same for all of them. In a loop of one's own:

    precision.prepare(model, device)
    for step, (x, y) in enumerate(batches, start=1):
        optimizer.zero_grad()
        precision.begin_step(step)
        loss = precision.loss(loss_function, precision.forward(model, x), y)
        precision.backward(loss)
        skipped = precision.step(optimizer)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision.arithmetic import Arithmetic, lstm_by_float32
from mprun.precision.buffers import BufferGuard, NoBufferGuard, guard_for
from mprun.precision.caster import Caster
from mprun.precision.clip import Clip
from mprun.precision.convert import accumulate_in, convert
from mprun.precision.layers import LAYER_DTYPES, cast_at_borders, compute_in, resolve
from mprun.precision.loss_scale import LossScale
from mprun.precision.op_lists import disable_casts
from mprun.precision.policy import Policy, torch_dtype


class Precision:
    """A policy at work on one model.

    Args:
        policy: the mode.
        caster: the region the forward pass runs in.
        arithmetic: the region forward pass, loss and backward pass run in.
        loss_scale: the loss scale.
        clip: the gradient clipping between unscaling and stepping.
        layers: module names or globs to fp32, fp16 or bf16, the dtype each is kept in.
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
        self._guard: BufferGuard = NoBufferGuard()

    @property
    def columns(self) -> dict[str, object]:
        """The policy's columns that caster, arithmetic and the cast of outputs decide."""
        output = str(self._output_dtype).removeprefix("torch.")
        return {**self._caster.columns, **self.arithmetic.columns, "output_dtype": output}

    def prepare(
        self,
        model: nn.Module,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> nn.Module:
        """`model` on `device`, its parameters and floating buffers in the parameter dtype.

        Layers named otherwise apart; gradients are accumulated in the policy's dtype.

        Raises:
            ValueError: `layers` names no module, names one twice, or parts tied parameters.
        """
        named = {n: LAYER_DTYPES[d] for n, d in resolve(model, self._layers).items()}
        stored = torch_dtype(self.policy.param_dtype)
        if self.policy.casting == "none":
            convert(model, device, stored, memory_format, named)
            if named:
                cast_at_borders(model)
        else:
            compute_in(model, named, self._caster.layer_region)
            convert(model, device, stored, memory_format)
        accumulate_in(model, torch_dtype(self.policy.accum_dtype))
        self.arithmetic = lstm_by_float32(self.arithmetic, model, self.policy.casting, device)
        self._guard = guard_for(model, skips=self.loss_scale.tensor is not None)
        return model

    def begin_step(self, step: int) -> None:
        """The first forward pass of optimizer step number `step` is next.

        The number decides the bits of stochastic rounding, so each step needs its own.
        """
        self.arithmetic.begin_step(step)
        self._guard.before()

    def forward(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The model's output in the policy's output dtype (float32 unless it says otherwise)."""
        with self.arithmetic.region():
            with self._caster.region():
                output: Tensor = model(inputs)
            return output.to(self._output_dtype)

    def loss(
        self,
        function: Callable[[Tensor, Tensor], Tensor],
        output: Tensor,
        target: Tensor,
        share: float = 1,
    ) -> Tensor:
        """`share` of the loss `function(output, target)`, a scalar.

        Not cast, but with the arithmetic of the rest: an output in 16 bits has its loss computed in
        16 bits, which where they are emulated are rounded like every other result.
        """
        with self.arithmetic.region():
            loss = function(output, target)
            return loss if share == 1 else loss * share

    def backward(self, loss: Tensor) -> None:
        """Add the (scaled) loss's gradients to the parameters' `grad`."""
        scaled = self.loss_scale.scale(loss)
        with self.arithmetic.region():
            self._caster.backward(scaled)

    def step(self, optimizer: Optimizer) -> Tensor | None:
        """Unscale and clip the gradients, update the parameters; see `LossScale.step`."""
        self.arithmetic.end_step()
        self._caster.end_step()
        with disable_casts():
            skipped = self.loss_scale.step(optimizer, self._clip)
        self._guard.after()
        return skipped
