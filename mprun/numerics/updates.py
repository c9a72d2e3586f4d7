"""The updates of an optimizer's step, as exactly as possible, and those that 16-bit weights lose.

*Exact updates.* The difference of the weights before and after a step contains the update and the
rounding of the stored result. For float32 weights and SGD at 1e-3 the rounding can be most of it,
for 16-bit weights all of it. So the step is repeated on a copy of optimizer and weights in float64,
and the difference is taken there. mprun's own optimizers compute in float32; so does their copy.

*Lost updates.* A 16-bit weight w has neighbours at a distance, the gap (2^-10 of its size in
float16, 2^-7 in bfloat16, both to within a factor of two). A step that moves it by u, computed in
float32 or wider, leaves it unchanged

    nearest     where |u| is below half the gap, or equal to it and w's last bit is 0 (ties to
                even); and so at every later step
    stochastic  with probability 1 - |u| / gap, between 0 and 1: what one step loses, another
                gains. The expected share is the mean of these (to 2^-13 and 2^-16: mprun's rounding
                has 13 and 16 random bits)
    kahan       where w with its remainder, together a float32 number, does not move

An update of exactly 0 (a gradient of 0) loses nothing and is not counted. Everything is computed
from w, its neighbours' patterns and u in float64: exactly, not by rounding and comparing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun import devices
from mprun.precision.rounding import merge, split
from mprun.precision.split_masters import merged
from mprun.precision.update import MasteredOptimizer, ScaledOptimizer
from mprun.records.numerics_record import LostShares

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST = {torch.float16: 0x7BFF, torch.bfloat16: 0x7F7F}
"""The bits of the largest number."""
RULES = ("nearest", "stochastic", "kahan")


class ExactUpdate(NamedTuple):
    """One parameter's step."""

    before: Tensor
    """The weights before the step, with the remainder where there is one; float64."""
    change: Tensor
    """The change that the step adds; float64."""


def exact_updates(optimizer: Optimizer) -> dict[nn.Parameter, ExactUpdate]:
    """The exact update of each parameter that has a gradient by `optimizer.step()`, without a step.

    Gradients that are still scaled (`optimizer.grad_scale`, as `torch.amp.GradScaler` and mprun set
    it) are divided; if `optimizer.found_inf` is set, the step is skipped and there is no update.

    Raises:
        TypeError: the step needs a closure, and so cannot be repeated.
    """
    skipped: Tensor | None = getattr(optimizer, "found_inf", None)
    if skipped is not None and skipped.item():
        return {}
    if isinstance(optimizer, MasteredOptimizer):
        with optimizer.masters_with_gradients() as parameters_of:
            exact = exact_updates(optimizer.inner)
            return {parameters_of[held]: update for held, update in exact.items()}
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
    return devices.random_numbers_kept({x.device for x in tensors if x.device.type != "meta"})


def exact_weights(p: Tensor, optimizer: Optimizer) -> Tensor:
    """The weights an optimizer keeps, in float64: with the remainder where it keeps one.

    Where it keeps a float32 master, these are the master.
    """
    if isinstance(master := optimizer.state.get(p, {}).get("master"), Tensor):
        return master.double()
    remainder = optimizer.state.get(p, {}).get("remainder")
    wide = p.detach() if remainder is None else merged(p.detach(), remainder)
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


@dataclass
class LostUpdates:
    """Counts over weights; sums over steps where several are added."""

    updated: int = 0
    """Weights whose update is finite and not 0, and which are finite in both formats."""
    unchanged: dict[str, float] = field(default_factory=dict)
    """`fp16.nearest` and so on to how many stay; expected numbers for stochastic rounding."""
    really: int = 0
    """How many weights the real step left unchanged, in the dtype they have."""

    def __add__(self, other: LostUpdates) -> LostUpdates:
        mine, others = self.unchanged, other.unchanged
        unchanged = {name: mine.get(name, 0.0) + others.get(name, 0.0) for name in mine | others}
        return LostUpdates(self.updated + other.updated, unchanged, self.really + other.really)

    def share(self, dtype: str, rule: str) -> float | None:
        """The share of updates lost; None where there was none."""
        return self.unchanged[f"{dtype}.{rule}"] / self.updated if self.updated else None

    def shares(self) -> LostShares:
        """All shares; None where there was no update."""
        by_rule = {d: {rule: self.share(d, rule) for rule in RULES} for d in DTYPES}
        really = self.really / self.updated if self.updated else None
        return LostShares(self.updated, really, **by_rule)


def lost_updates(weights: Tensor, updates: Tensor, after: Tensor | None = None) -> LostUpdates:
    """How many of `updates` each format and rule would lose.

    Args:
        weights: before the step; float16, bfloat16 or float32, or float64 of such values.
        updates: the exact change by the step, of the same shape.
        after: the weights after the real step, in their own dtype; None if unknown.
    """
    weights, updates = weights.detach().double(), updates.detach().double()
    rounded = {name: weights.to(torch.float32).to(dtype) for name, dtype in DTYPES.items()}
    moves = (updates != 0) & torch.isfinite(updates)
    for w16 in rounded.values():
        moves &= torch.isfinite(w16)
    lost = LostUpdates(updated=int(moves.sum()))
    for name, w16 in rounded.items():
        half = _gap(w16, updates > 0) / 2
        size = updates.abs()
        even = _magnitude(w16) & 1 == 0
        stays = {
            "nearest": (size < half) | ((size == half) & even),
            "stochastic": (1 - size / (2 * half)).clamp(min=0),
            "kahan": _compensated_stays(weights.float(), updates, w16.dtype),
        }
        for rule, probability in stays.items():
            lost.unchanged[f"{name}.{rule}"] = float(probability.double()[moves].sum())
    if after is not None:
        lost.really = int((after.detach().double() == weights)[moves].sum())
    return lost


def _magnitude(w16: Tensor) -> Tensor:
    """The bits without the sign, as int32."""
    return w16.view(torch.int16).int() & 0x7FFF


def _gap(w16: Tensor, upwards: Tensor) -> Tensor:
    """The distance of each number to its neighbour above or below, float64.

    The largest number's neighbour is as far as the one below it: rounding takes place as if there
    were no largest number, and what rounds beyond it overflows.
    """
    magnitude = _magnitude(w16)
    outwards = (w16 > 0) == upwards
    outwards &= magnitude < LARGEST[w16.dtype]
    step = torch.where(outwards | (magnitude == 0), 1, -1)
    neighbour = (magnitude + step).to(torch.int16).view(w16.dtype)
    return (neighbour.double() - w16.double().abs()).abs()


def _compensated_stays(weights: Tensor, updates: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a rounded weight and its remainder are those of before."""
    rounded, remainder = split(weights, dtype)
    before = merge(rounded, remainder)
    after = split((before.double() + updates).float(), dtype)
    return (after[0] == rounded) & (after[1] == remainder)


def lr_factors(weights: Tensor, updates: Tensor, dtype: torch.dtype) -> Tensor:
    """What the learning rate is multiplied by until a weight moves, for each one updated; float64.

    An update is proportional to the learning rate, so a weight that is rounded to nearest moves
    where the factor is above half its gap over the size of its update.

    Args:
        weights: before the step.
        updates: the exact change by the step, of the same shape.
        dtype: float16 or bfloat16.
    """
    weights, updates = weights.detach().double(), updates.detach().double()
    w16 = weights.float().to(dtype)
    moves = (updates != 0) & torch.isfinite(updates) & torch.isfinite(w16)
    return _gap(w16, updates > 0)[moves] / (2 * updates[moves].abs())
