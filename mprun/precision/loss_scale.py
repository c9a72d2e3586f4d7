"""Loss scales: keeping small gradients representable.

In float16 a gradient below 2^-24 becomes 0. Multiplying the loss by S multiplies every gradient by
S (the chain rule is linear). So gradients are computed S times larger, and divided by S before the
optimizer gets them (Micikevicius et al., "Mixed Precision Training", 2018). float32 and bfloat16
have an exponent range that needs no scale: their loss scale is the no-op.

A scale that is too large overflows. The dynamic scale searches for the largest that does not. It
starts high, is multiplied by `backoff` at every overflow (that step is skipped), and by `growth`
after `interval` steps without overflow. This is torch.amp.GradScaler's rule with a floor. If
gradients are NaN at any scale, the scale would fall to zero; at the floor the run ends with an
explanation. The transition is a pure function on tensors, so on CUDA the host never waits for it.

As in GradScaler an iteration may step several optimizers: `scale` any number of losses, `step`
each optimizer, then `update` once, which moves the scale. All of them are unscaled by the same
factor. An optimizer is skipped for overflows of its own gradients alone, and the scale backs off if
any overflowed. `unscale` before `step` gives unscaled gradients, to read or to clip; those of
16-bit parameters are then float32 until `update`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mprun.precision import devices
from mprun.precision.update import ALONE, Clip, Combine, Unscaled, step_scaled, step_unscaled

DEFAULT_STATIC = 1024.0
DEFAULT_INITIAL = 2.0**16  # GradScaler's
STATIC_PATIENCE = 100  # Skipped steps in a row after which a static scale is called too high


class LossScale:
    """No scaling, and every step is taken. Other loss scales derive from it."""

    kind = "none"
    """none, static or dynamic."""
    tensor: Tensor | None = None
    """The current factor, a float32 scalar on the device; None where nothing is scaled."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss the backward pass starts from."""
        return loss

    def unscale(self, optimizer: Optimizer, combine: Combine = ALONE) -> None:
        """Divide the optimizer's gradients by the factor, in float32; at most once an iteration.

        Processes with shards agree on overflows by `combine`.

        Raises:
            RuntimeError: they are unscaled already, or the optimizer has stepped.
        """

    def step(self, optimizer: Optimizer, clip: Clip) -> Tensor | None:
        """Unscale the gradients if `unscale` did not, clip, step.

        Returns:
            1 where a gradient was not finite and the step was skipped, else 0, a float32 scalar on
            the device; None where steps are never skipped.

        Raises:
            RuntimeError: the optimizer has stepped since the last `update`.
        """
        return step_scaled(optimizer, None, clip)

    def update(self) -> None:
        """End an iteration: the factor moves by the overflows of its steps."""

    def failure_reason(self, scale: float, skipped_in_a_row: int) -> str | None:
        """Why continuing is pointless, or None."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict`.

        Raises:
            ValueError: it is the state of another kind of loss scale.
        """
        if state:
            raise ValueError(f"loss_scale has {', '.join(map(str, state))}, and no loss is scaled")


class NoLossScale(LossScale):
    """No scaling, and every step is taken."""


class StaticLossScale(LossScale):
    """One factor for the whole run; steps whose gradients overflow are skipped.

    Args:
        device: where the gradients are.
    """

    kind = "static"

    def __init__(self, value: float, device: torch.device) -> None:
        self.tensor: Tensor = torch.full((), value, dtype=torch.float32, device=device)
        self._unscaled: dict[Optimizer, Unscaled] = {}
        self._overflows: dict[Optimizer, Tensor] = {}  # of the optimizers that have stepped

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.tensor

    def unscale(self, optimizer: Optimizer, combine: Combine = ALONE) -> None:
        if optimizer in self._overflows:
            raise RuntimeError(
                f"unscale({type(optimizer).__name__}) after its step: gradients are unscaled "
                "before step(), and update() ends the iteration"
            )
        if optimizer in self._unscaled:
            raise RuntimeError(
                f"unscale({type(optimizer).__name__}) twice: its gradients are already unscaled; "
                "call update() once at the end of each iteration"
            )
        self._unscaled[optimizer] = Unscaled(optimizer, self.tensor, combine)

    def step(self, optimizer: Optimizer, clip: Clip) -> Tensor | None:
        if optimizer in self._overflows:
            raise RuntimeError(
                f"step({type(optimizer).__name__}) twice without update(): call update() once at "
                "the end of each iteration, after the last optimizer's step"
            )
        if optimizer in self._unscaled:
            overflow = step_unscaled(optimizer, self._unscaled[optimizer], clip)
        else:
            overflow = step_scaled(optimizer, self.tensor, clip)  # type: ignore[assignment]
        self._overflows[optimizer] = overflow
        return overflow

    def update(self) -> None:
        for unscaled in self._unscaled.values():
            unscaled.restore()
        self._unscaled, self._overflows = {}, {}

    def failure_reason(self, scale: float, skipped_in_a_row: int) -> str | None:
        if skipped_in_a_row < STATIC_PATIENCE:
            return None
        return (
            f"{skipped_in_a_row} steps in a row overflowed at the static loss scale {scale:g}; "
            "try a smaller loss_scale.value, or loss_scale=dynamic"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        needed = self.state_dict()
        if {*state} != {*needed}:
            raise ValueError(
                f"loss_scale has {', '.join(state) or 'nothing'}; legal for a {self.kind} loss "
                f"scale: {', '.join(needed)}; it is the state of another kind of loss scale"
            )
        StaticLossScale.update(self)  # drops an unfinished iteration
        self.tensor = state["scale"].to(self.tensor.device)


@dataclass(frozen=True)
class DynamicRule:
    """When a dynamic scale moves; GradScaler's defaults and a floor."""

    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 2.0**-14


def next_state(
    scale: Tensor, tracker: Tensor, overflow: Tensor, rule: DynamicRule
) -> tuple[Tensor, Tensor]:
    """The scale (float32 scalar) and the growth tracker (int32 scalar) after a step.

    Products are taken in float64 and rounded once, as GradScaler's kernel does.
    """
    skipped = overflow > 0
    wide = devices.wide(scale)
    lowered = (wide * rule.backoff).float().clamp_min(rule.floor)
    raised = (wide * rule.growth).float()
    grows = tracker + 1 >= rule.interval
    # Infinite, it would never come back: half of infinity is infinity
    taken = torch.where(grows & torch.isfinite(raised), raised, scale)
    # No branch: reading `overflow` on the host would wait for the device
    scale = torch.where(skipped, lowered, taken)
    tracker = torch.where(skipped | grows, 0, tracker + 1).to(torch.int32)
    return scale, tracker


class DynamicLossScale(StaticLossScale):
    """Follows `next_state` from an initial factor.

    Args:
        rule: when it moves.
        device: where the gradients are.
    """

    kind = "dynamic"

    def __init__(self, initial: float, rule: DynamicRule, device: torch.device) -> None:
        super().__init__(initial, device)
        self._rule = rule
        self._tracker = torch.zeros((), dtype=torch.int32, device=device)

    def update(self) -> None:
        overflows = [*self._overflows.values()]
        # An optimizer that was unscaled and not stepped counts too, as in GradScaler
        overflows += [u.overflow for o, u in self._unscaled.items() if o not in self._overflows]
        super().update()
        if overflows:
            any_overflow = overflows[0] if len(overflows) == 1 else torch.stack(overflows).amax()
            self.tensor, self._tracker = next_state(
                self.tensor, self._tracker, any_overflow, self._rule
            )

    def failure_reason(self, scale: float, skipped_in_a_row: int) -> str | None:
        if skipped_in_a_row == 0 or scale > self._rule.floor:
            return None
        return (
            f"the loss scale fell to its floor, {scale:g}, after {skipped_in_a_row} skipped steps "
            "in a row: the gradients are not finite at any scale; try a smaller train.lr, "
            "precision=bf16_mixed, or precision=fp32, which fails too if the model is the cause; "
            "debug.fp_exceptions=halt names the op it begins with"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.tensor, "tracker": self._tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._tracker = state["tracker"].to(self._tracker.device)


LOSS_SCALES = ("none", "static", "dynamic")


def loss_scale_of_kind(
    kind: str, value: float | None, device: torch.device, rule: DynamicRule | None = None
) -> LossScale:
    """A loss scale by the name of its kind.

    Args:
        kind: one of `LOSS_SCALES`.
        value: the factor, or the first one; None for the kind's default.
        device: where the gradients are.
        rule: how a dynamic one moves; None for GradScaler's.
    """
    if kind == "static":
        return StaticLossScale(DEFAULT_STATIC if value is None else value, device)
    if kind == "dynamic":
        initial = DEFAULT_INITIAL if value is None else value
        return DynamicLossScale(initial, rule or DynamicRule(), device)
    return NoLossScale()
