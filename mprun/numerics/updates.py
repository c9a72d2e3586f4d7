"""What an optimizer's step adds to each weight, as exactly as possible.

The difference of the weights before and after contains the update *and* the rounding of the stored
result. For float32 weights and SGD at 1e-3 the rounding can be most of it, for 16-bit weights all
of it. So the step is repeated on a copy of optimizer and weights in float64, and the difference is
taken there. mprun's own optimizers compute in float32, so their copy is in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision.rounding import merge
from mprun.precision.update import ScaledOptimizer


class ExactUpdate(NamedTuple):
    """One parameter's step."""

    before: Tensor
    """The weights before the step, with Kahan's remainder where there is one; float64."""
    change: Tensor
    """What the step adds, float64."""


def exact_updates(optimizer: Optimizer) -> dict[nn.Parameter, ExactUpdate]:
    """What `optimizer.step()` would add to each parameter that has a gradient; nothing is changed.

    Gradients that are still scaled (`optimizer.grad_scale`, as `torch.amp.GradScaler` and mprun set
    it) are divided; where `optimizer.found_inf` says that the step is skipped, there is no update.

    Raises:
        TypeError: the step needs a closure, and so cannot be repeated.
    """
    skipped: Tensor | None = getattr(optimizer, "found_inf", None)
    if skipped is not None and skipped.item():
        return {}
    ours = isinstance(optimizer, ScaledOptimizer)
    dtype = torch.float32 if ours else torch.float64
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moved = [p for p in parameters if p.grad is not None and p.is_floating_point()]
    twins = {p: _twin(p, optimizer, dtype) for p in moved}
    # A copy with the twins in place of the parameters. Parameters without a twin have no gradient,
    # so the copy does not step them.
    memo: dict[int, Any] = {id(p): twins.get(p, p) for p in parameters}
    shadow: Any = copy.deepcopy(optimizer, memo)
    if ours:
        shadow.engine = "eager"  # the same bits without compiling anything
    else:
        _widen(shadow, dtype)
    before = {p: twin.detach().to(torch.float64, copy=True) for p, twin in twins.items()}
    with own_random_numbers(parameters):
        shadow.step()
    return {
        p: ExactUpdate(before[p], twin.detach().double() - before[p]) for p, twin in twins.items()
    }


def own_random_numbers(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Random numbers drawn inside do not change the sequence outside."""
    devices = {x.device.index for x in tensors if x.device.type == "cuda"}
    return torch.random.fork_rng(devices=sorted(d for d in devices if d is not None))


def exact_weights(p: Tensor, optimizer: Optimizer) -> Tensor:
    """The weights an optimizer keeps, in float64: with the remainder where it keeps one."""
    remainder = optimizer.state.get(p, {}).get("remainder")
    wide = p.detach() if remainder is None else merge(p.detach(), remainder)
    return wide.double()


def _twin(p: nn.Parameter, optimizer: Optimizer, dtype: torch.dtype) -> nn.Parameter:
    assert p.grad is not None
    twin = nn.Parameter(exact_weights(p, optimizer).to(dtype))
    gradient = p.grad.detach().double()
    scale = getattr(optimizer, "grad_scale", None)
    twin.grad = (gradient if scale is None else gradient / scale.double()).to(dtype)
    return twin


def _widen(optimizer: Optimizer, dtype: torch.dtype) -> None:
    for p, state in optimizer.state.items():
        for name, value in state.items():
            moment = isinstance(value, Tensor) and value.shape == p.shape and name != "step"
            if moment and value.is_floating_point():
                state[name] = value.to(dtype)
