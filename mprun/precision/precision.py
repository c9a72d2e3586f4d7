"""What carries a policy out: prepare the model, run it, go backward.

One class by composition: the policy says which dtypes, the caster how ops get theirs, the loss
scale what the backward pass starts from. A mode is a choice of parts, never a subclass, so that the
training loop is the same for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision.caster import Caster
from mprun.precision.clip import Clip
from mprun.precision.convert import convert
from mprun.precision.loss_scale import LossScale
from mprun.precision.policy import Policy, torch_dtype


class Precision:
    """A policy at work on one model.

    Args:
        policy: the mode.
        caster: the region the forward pass runs in.
        loss_scale: the loss scale.
        clip: the gradient clipping between unscaling and stepping.
    """

    def __init__(self, policy: Policy, caster: Caster, loss_scale: LossScale, clip: Clip) -> None:
        self.policy = policy
        self.loss_scale = loss_scale
        self._caster = caster
        self._clip = clip
        self._output_dtype = torch_dtype(policy.output_dtype)

    def prepare(
        self,
        model: nn.Module,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> nn.Module:
        """`model` on `device`, its parameters and floating buffers in the parameter dtype."""
        return convert(model, device, torch_dtype(self.policy.param_dtype), memory_format)

    def forward(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The model's output in the policy's output dtype (float32 unless it says otherwise)."""
        with self._caster.region():
            output: Tensor = model(inputs)
        return output.to(self._output_dtype)

    def backward(self, loss: Tensor) -> None:
        """Add the (scaled) loss's gradients to the parameters' `grad`."""
        self.loss_scale.scale(loss).backward()

    def step(self, optimizer: Optimizer) -> None:
        """Clip the gradients and update the parameters."""
        self._clip(optimizer)
        optimizer.step()
