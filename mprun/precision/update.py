"""The optimizer's step on scaled gradients: unscale, check, clip, step, in that order.

Clipping needs the gradients of the loss itself, so it comes after unscaling. A step with gradients
that are not finite is skipped.

A 16-bit gradient that is divided in its own dtype loses small values (3e-9 becomes 0 in float16).
So 16-bit gradients are replaced by float32 copies, and those are divided. PyTorch's optimizers
compute in the parameters' dtype: they get the gradients rounded back, after clipping. The
optimizers of `mprun.optim` take gradients of any dtype. Unless `unscale` was called, they unscale,
check and clip in float32 during their step, without copies.

Each process of FSDP2 has gradients of its own shards. Clipping needs the norm of all of them, and a
step that one process skips must be skipped by all: they agree on both by the `Combine` of `Clip`.
Processes with whole gradients (one process, or the replicas of DistributedDataParallel) agree
already: for them `Combine` itself does nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision._torch import step_unless, unscale_and_check
from mprun.precision.products import LOW


class Combine:
    """Combines the figures of one process's gradients with those of the others: here, of none.

    Every process calls the same methods in the same order, also one without any gradient. Its
    figures are then 0.
    """

    def total_norm(self, norm: Tensor) -> Tensor:
        """The root of the sum of squares over processes of the gradients' L2 norm.

        Args:
            norm: scalar on the gradients' device; float32 unless an optimizer of `torch.optim` has
                16-bit gradients. Not finite where a gradient is not.

        Returns:
            A scalar of that dtype on that device, equal on all processes.
        """
        return norm

    def overflow(self, flag: Tensor) -> Tensor:
        """The largest flag of all processes.

        Args:
            flag: 1 where a gradient of this process is not finite, else 0: a float32 scalar on the
                device of the loss scale.

        Returns:
            A float32 scalar on that device, equal on all processes.
        """
        return flag


ALONE = Combine()  # For gradients that are whole


class Clip:
    """Limits the gradients of an optimizer's parameters, in place.

    Args:
        max_norm: the largest global L2 norm that passes unchanged; None for any.
        combine: what processes with shards agree by, on overflows too.
    """

    def __init__(self, max_norm: float | None = None, combine: Combine = ALONE) -> None:
        self.max_norm = max_norm
        self.combine = combine

    def __call__(self, optimizer: Optimizer) -> None:
        """Scale all gradients so that their global norm is at most `max_norm`."""
        if self.max_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = [p.grad for p in parameters if p.grad is not None]
            # Not `clip_grad_norm_`: the norm is that of all processes, which `combine` adds up
            norm = nn.utils.get_total_norm(gradients).to(device_of_gradients(optimizer))
            norm = self.combine.total_norm(norm)
            nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)


def device_of_gradients(optimizer: Optimizer) -> torch.device:
    """The device of its first gradient; without any, of its first parameter."""
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    with_gradients = [p for p in parameters if p.grad is not None]
    return next((p.device for p in with_gradients or parameters), torch.device("cpu"))


class ScaledOptimizer(ABC):
    """An optimizer that steps on gradients of a scaled loss."""

    @abstractmethod
    def scaled_step(
        self,
        scale: Tensor | None,
        max_norm: float | None,
        overflow: Tensor | None = None,
        combine: Combine = ALONE,
    ) -> Tensor | None:
        """Unscale by `scale`, check, clip to `max_norm`, step; 1 where it was skipped, else 0.

        With `overflow`, 1 or 0, the gradients were checked already: 1 skips the step. Processes
        with shards agree on both figures by `combine`.
        """


class MasteredOptimizer(ScaledOptimizer):
    """An optimizer around another one, which holds float32 masters of its 16-bit parameters."""

    inner: Optimizer

    @abstractmethod
    def masters_with_gradients(self) -> AbstractContextManager[dict[nn.Parameter, nn.Parameter]]:
        """Inside, the parameters of `inner` have the unscaled float32 gradients of the next step.

        It gives each of them with the parameter whose master it is; float32 ones are their own.
        """


class Unscaled:
    """The unscaled gradients of one optimizer, in float32 until `restore`.

    Args:
        optimizer: its parameters' gradients are those of the loss times `scale`.
        scale: float32 scalar on their device.
        combine: what processes with shards agree on overflows by.
    """

    def __init__(self, optimizer: Optimizer, scale: Tensor, combine: Combine = ALONE) -> None:
        self._narrow: list[tuple[nn.Parameter, torch.dtype]] = []
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and p.grad.dtype in LOW:
                self._narrow.append((p, p.grad.dtype))
                _replace_gradient(p, p.grad.float())
        self.overflow = combine.overflow(unscale_and_check(optimizer, scale))
        """1 where a gradient was not finite, else 0: a float32 scalar on the device."""

    def restore(self) -> None:
        """Bring the gradients back to the dtype that the backward pass gave them."""
        for p, dtype in self._narrow:
            if p.grad is None:
                p.grad_dtype = dtype
            else:
                _replace_gradient(p, p.grad.to(dtype))
        self._narrow = []


def step_unscaled(optimizer: Optimizer, unscaled: Unscaled, clip: Clip) -> Tensor:
    """One step on unscaled gradients: clip, step.

    Returns:
        1 where a gradient was not finite and the step was skipped, else 0, a float32 scalar.
    """
    if isinstance(optimizer, ScaledOptimizer):
        optimizer.scaled_step(None, clip.max_norm, unscaled.overflow, clip.combine)
    else:
        clip(optimizer)
        unscaled.restore()
        step_unless(optimizer, unscaled.overflow)
    return unscaled.overflow


def step_scaled(optimizer: Optimizer, scale: Tensor | None, clip: Clip) -> Tensor | None:
    """One step on gradients of the loss times `scale`: unscale, check, clip, step.

    Args:
        scale: float32 scalar; None where the loss was not scaled and no step is ever skipped.
        clip: what limits the unscaled gradients.

    Returns:
        1 where a gradient was not finite and the step was skipped, else 0, a float32 scalar on the
        device; None where `scale` is None.
    """
    if isinstance(optimizer, ScaledOptimizer):
        return optimizer.scaled_step(scale, clip.max_norm, combine=clip.combine)
    if scale is None:
        clip(optimizer)
        optimizer.step()
        return None
    return step_unscaled(optimizer, Unscaled(optimizer, scale, clip.combine), clip)


def _replace_gradient(p: nn.Parameter, gradient: Tensor) -> None:
    p.grad = None  # the dtype of a gradient cannot change while there is one
    p.grad_dtype = gradient.dtype
    p.grad = gradient
