"""Steps on gradients of a scaled loss: scale, unscale, check, clip, step; buffers of skipped steps.

In float16 a gradient below 2^-24 becomes 0. So the loss, and with it every gradient, is multiplied
by S, and gradients are divided by S in float32 before the optimizer gets them (Micikevicius et al.,
"Mixed Precision Training", 2018). A step whose gradients are not finite is skipped. The dynamic
scale is multiplied by `backoff` at every overflow, and by `growth` after `interval` steps without:
torch.amp.GradScaler's rule with a floor, a pure function on tensors, so that on CUDA the host never
waits for it. An iteration may step several optimizers; then `update` moves the scale once.

A step that overflows in the forward pass writes infinities into BatchNorm's running statistics.
`BufferGuard` takes those elements back if the step is skipped, and reports them if it is taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision import devices
from mprun.precision._torch import is_fake, step_unless, unscale_and_check
from mprun.precision.policy import dtype_name
from mprun.precision.products import LOW


class Combine:
    """Combines the figures of one process's gradients with those of the others: here, of none.

    Every process calls the same methods in the same order, also one without any gradient. Its
    figures are then 0.
    """

    def total_norm(self, norm: Tensor) -> Tensor:
        """The root of the sum of squares over processes of the gradients' L2 norm, equal on all.

        `norm` is a scalar on the gradients' device, not finite where a gradient is not; so is the
        result.
        """
        return norm

    def overflow(self, flag: Tensor) -> Tensor:
        """The largest flag of all processes, equal on all.

        It is 1 where a gradient of this process is not finite, else 0: a float32 scalar on the
        device.
        """
        return flag


ALONE = Combine()  # For gradients that are whole


class Clip:
    """Limits the global L2 norm of an optimizer's gradients, in place; None: never.

    Processes with shards agree by `combine`, on overflows too.
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

    Before, they are those of the loss times `scale`, a float32 scalar on their device.
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
    """Clip unscaled gradients, step; 1 where one was not finite and it was skipped, else 0."""
    if isinstance(optimizer, ScaledOptimizer):
        optimizer.scaled_step(None, clip.max_norm, unscaled.overflow, clip.combine)
    else:
        clip(optimizer)
        unscaled.restore()
        step_unless(optimizer, unscaled.overflow)
    return unscaled.overflow


def step_scaled(optimizer: Optimizer, scale: Tensor | None, clip: Clip) -> Tensor | None:
    """One step on gradients of the loss times `scale`: unscale, check, clip, step.

    Returns 1 where a gradient was not finite and the step was skipped, else 0, a float32 scalar on
    the device; None where `scale` is None: the loss was not scaled, and no step is ever skipped.
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


DEFAULT_STATIC = 1024.0
DEFAULT_INITIAL = 2.0**16  # GradScaler's
STATIC_PATIENCE = 100  # Skipped steps in a row after which a static scale is called too high


class LossScale:
    """No scaling, and every step is taken; the others derive from it."""

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


class StaticLossScale(LossScale):
    """One factor for the whole run; steps whose gradients overflow are skipped."""

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
    """Follows `next_state` from an initial factor."""

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
    """A loss scale by its kind, one of `LOSS_SCALES`; `value` is the factor, or the first one.

    `rule`: how a dynamic one moves; None for GradScaler's.
    """
    if kind == "static":
        return StaticLossScale(DEFAULT_STATIC if value is None else value, device)
    if kind == "dynamic":
        initial = DEFAULT_INITIAL if value is None else value
        return DynamicLossScale(initial, rule or DynamicRule(), device)
    return LossScale()


CHANNELS = 8  # Channels that an event's text names


class BufferOverflow(NamedTuple):
    """Elements of a buffer that became non-finite in a step that was taken."""

    step: int
    buffer: str  # Its name, as `model.named_buffers()` gives it
    channels: list[int]  # Indices along its first dimension; empty for a scalar
    dtype: str

    @property
    def text(self) -> str:
        """A sentence for users."""
        named = ", ".join(map(str, self.channels[:CHANNELS]))
        more = f" and {len(self.channels) - CHANNELS} more" if len(self.channels) > CHANNELS else ""
        where = f", channel {named}{more}" if self.channels else ""
        return (
            f"step {self.step} was taken and made the buffer {self.buffer}{where} non-finite "
            f"({self.dtype}): evaluation will use it; a float32 buffer, precision.layers with fp32 "
            "for its module, or smaller activations avoid that"
        )


# A buffer's name in reports, its module, and its attribute there
_Owner = tuple[str, nn.Module, str]


class _BufferGroup:
    """Floating buffers of one dtype on one device, as one flat tensor [n]."""

    def __init__(self, owners: Sequence[_Owner]) -> None:
        self._owners = owners
        self._saved: Tensor | None = None
        self._first: Tensor | None = None  # int32 [n]: the step that overflowed, or 0

    def before(self, step: int) -> None:
        self._saved = self._flat()
        self._number = step

    def after(self, skipped: Tensor | None) -> None:
        if self._saved is None:  # no step has begun
            return
        now = self._flat()
        became = torch.isfinite(self._saved) & ~torch.isfinite(now)
        if skipped is not None:
            dropped = skipped.to(now.device) > 0
            # Only on a CPU the flag is read without a wait for the device; a fake one has no value
            if now.device.type != "cpu" or is_fake(now) or bool(dropped):
                self._write(torch.where(became & dropped, self._saved, now))
            # Reported only where the step was taken. Nothing is restored there: the buffer would
            # stop following the activations while training continues, and nobody would notice.
            became = became & ~dropped
        if self._first is None:
            self._first = torch.zeros_like(became, dtype=torch.int32)
        self._first = torch.where(became & (self._first == 0), self._number, self._first)

    def overflows(self) -> list[BufferOverflow]:
        first, self._first = self._first, None
        if first is None or not bool(first.any()):
            return []
        overflows = []
        parts = first.split([b.numel() for b in self._buffers()])
        for (name, _, _), buffer, part in zip(self._owners, self._buffers(), parts, strict=True):
            if bool(part.any()):
                rows = (part > 0).view(len(buffer) if buffer.dim() else 1, -1)
                channels = rows.any(1).nonzero().flatten().tolist()
                dtype = dtype_name(buffer.dtype)
                step = int(part[part > 0].min())
                overflows.append(
                    BufferOverflow(step, name, channels if buffer.dim() else [], dtype)
                )
        return overflows

    def _buffers(self) -> list[Tensor]:
        # Looked up each time: `model.to` and `load_state_dict(assign=True)` replace them.
        return [getattr(module, name) for _, module, name in self._owners]

    def _flat(self) -> Tensor:
        return torch.cat([b.detach().reshape(-1) for b in self._buffers()])

    def _write(self, flat: Tensor) -> None:
        buffers = self._buffers()
        for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            # By `data`, so that a graph that another model's step left open can still go backward.
            buffer.data.copy_(part.view(buffer.shape))


class BufferGuard:
    """Restores what a skipped step made non-finite, and reports what a taken one did.

    On CUDA it needs no host synchronization, but for `overflows`. `prefix` is put before the
    buffers' names; a guard that is not `active` does nothing.
    """

    def __init__(self, model: nn.Module, prefix: str = "", active: bool = True) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[_Owner]] = {}
        for full, buffer in model.named_buffers():
            if active and buffer.is_floating_point():
                path, _, name = full.rpartition(".")
                owner = (f"{prefix}{full}", model.get_submodule(path), name)
                kinds.setdefault((buffer.dtype, buffer.device), []).append(owner)
        self._groups = [_BufferGroup(owners) for owners in kinds.values()]

    def before(self, step: int) -> None:
        """Step number `step` begins."""
        for group in self._groups:
            group.before(step)

    def after(self, skipped: Tensor | None) -> None:
        """An optimizer stepped, or did not where `skipped` is 1; None: steps are never skipped."""
        for group in self._groups:
            group.after(skipped)

    def overflows(self) -> list[BufferOverflow]:
        """Elements that became non-finite in taken steps since the last call; waits for them."""
        overflows = [x for group in self._groups for x in group.overflows()]
        return sorted(overflows, key=lambda x: x.step)
