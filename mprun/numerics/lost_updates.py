"""How many updates 16-bit weights would lose: a step leaves these weights unchanged.

A 16-bit weight w has neighbours at a distance, the gap (2^-10 of its size in float16, 2^-7 in
bfloat16, both to within a factor of two). A step that moves it by u, computed in float32 or wider,
leaves it unchanged

    nearest     where |u| is below half the gap, or equal to it and w's last bit is 0 (ties to
                even); and so at every later step
    stochastic  with probability 1 - |u| / gap, between 0 and 1: what one step loses, another
                gains. The expected share is the mean of these (mprun's rounding
                has 13 and 16 random bits: it is that to 2^-13 and 2^-16)
    kahan       where w with its remainder, together a float32 number, does not move

An update of exactly 0 (a gradient of 0) loses nothing and is not counted. Everything is computed
from w, its neighbours' patterns and u in float64: exactly, not by rounding and comparing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mprun.precision.rounding import merge, split

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST = {torch.float16: 0x7BFF, torch.bfloat16: 0x7F7F}
"""The bits of the largest number."""
RULES = ("nearest", "stochastic", "kahan")


@dataclass
class LostUpdates:
    """Counts over weights; sums over steps where several are added."""

    updated: int = 0
    """Weights whose update is finite and not 0, and which both formats hold."""
    unchanged: dict[str, float] = field(default_factory=dict)
    """`fp16.nearest` and so on to how many stay; expected numbers for stochastic rounding."""
    really: int = 0
    """How many weights the real step left unchanged, in the dtype they have."""

    def __iadd__(self, other: LostUpdates) -> LostUpdates:
        self.updated += other.updated
        self.really += other.really
        for name, count in other.unchanged.items():
            self.unchanged[name] = self.unchanged.get(name, 0) + count
        return self

    def share(self, dtype: str, rule: str) -> float | None:
        """The share of updates lost; None where there was none."""
        return self.unchanged[f"{dtype}.{rule}"] / self.updated if self.updated else None

    def as_dict(self) -> dict[str, Any]:
        """Counts and shares, the latter null where there was no update."""
        shares = {d: {rule: self.share(d, rule) for rule in RULES} for d in DTYPES}
        really = self.really / self.updated if self.updated else None
        return {"updated": self.updated, "really": really, **shares}


def lost_updates(weights: Tensor, updates: Tensor, after: Tensor | None = None) -> LostUpdates:
    """How many of `updates` each format and rule would lose.

    Args:
        weights: before the step; float16, bfloat16 or float32, or float64 of such values.
        updates: what the step adds, as exactly as it is known; of that shape.
        after: the weights after the real step, in their own dtype; None where that is not
            known, which counts no weight as unchanged.
    """
    weights, updates = weights.detach().double(), updates.detach().double()
    held = {name: weights.to(torch.float32).to(dtype) for name, dtype in DTYPES.items()}
    moves = (updates != 0) & torch.isfinite(updates)
    for w16 in held.values():
        moves &= torch.isfinite(w16)
    lost = LostUpdates(updated=int(moves.sum()))
    for name, w16 in held.items():
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
