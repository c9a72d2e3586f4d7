"""The origins of bad numbers in memory, and their exact values.

An op that makes a NaN or an infinity out of finite numbers is an origin (`Origin`). Whatever is
computed from its result has the same origin (`Lineage`). So, at the end of a step, a gradient that
is NaN leads back to the op where the problem began, and an infinity that served as a mask is not
confused with one that did harm.

An infinity can lead to a right number, exp(-inf) = 0, or to a wrong one: x / inf is 0 too. So where
an op overflows, its exact results are stored (`ShadowValues`). Each op that reads them runs twice
again in float64: on the exact numbers, and on the real ones. Both runs share the rounding of
earlier ops, so their difference is the effect of the overflow. A finite number of the result is

    right    where the difference is below the rounding of the dtype that overflowed
    wrong    where it is more than `TOLERANCE` of the tensor's largest number
    open     between, or too small for a normal number of the dtype (1 / inf): later ops decide

Numbers that are not right are followed further. They may become wrong or not finite (0 / 0); the
origin is the same overflow.

Both are stored by storage, so views share them. Exact numbers are stored for one step, and the
optimizer is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from mprun._torch import SCALER_CHECK, StorageWeakRef, no_dispatch, storage_key
from mprun.numerics.nonfinite.fp_exception import FpException, WrongResult
from mprun.numerics.nonfinite.nonfinite_watcher import OpSite
from mprun.numerics.nonfinite.op_call import (
    LARGEST,
    OpCall,
    ValueRange,
    is_plain,
    numbers,
    recomputed,
)

TOLERANCE = torch.finfo(torch.bfloat16).eps
"""Bfloat16 moves every number by up to half of that, and networks train in it."""


class OpResult(NamedTuple):
    """A result of an op."""

    name: str
    number: int
    """Its index among several of that name."""
    tensor: Tensor
    range: ValueRange | None
    position: int = 0
    """Its index among all results."""


@dataclass(eq=False)
class Origin:
    """An op that made numbers that are not finite, or another source of them."""

    exception: FpException
    reached: dict[str, None] = field(default_factory=dict)
    """The values it spoiled that outlast the step, in order."""
    owner: str = ""
    """The first parameter or buffer in `reached`, by its name."""
    upward: bool = False
    """Whether it is an overflow to +inf or NaN."""
    distorts: bool = False
    """Whether a finite number computed from it is wrong: x / inf is 0."""
    wrong: WrongResult | None = None
    """The first such number; None where float64 could not decide."""
    lasts: bool = False
    """Whether what it spoiled outlasts a skipped step, too."""

    def add_wrong(self, result: WrongResult) -> None:
        """A finite number computed from it is wrong."""
        self.distorts = True
        self.wrong = self.wrong or result

    def leave_unchecked(self) -> None:
        """Numbers computed from it cannot be compared with float64.

        Masks are made of minus infinity, which usually leads to right numbers; others do not.
        """
        self.distorts |= self.upward

    @property
    def deliberate(self) -> bool:
        """Whether the program wrote it, or it existed before: no fault unless it does harm."""
        return self.exception.kind in ("constant", "outside")


def mark_reached(origins: Iterable[Origin], what: str, owner: str = "") -> None:
    """Note that these origins spoiled `what` (a gradient, the loss) of parameter `owner`.

    A mask is not blamed if there is also a fault or an infinity from outside.
    """
    every = list(origins)
    faults = [x for x in every if not x.deliberate]
    outside = [x for x in every if x.exception.kind == "outside"]
    for origin in faults or outside or every:
        origin.reached[what] = None
        origin.owner = origin.owner or owner


def memory(x: Tensor) -> int:
    """A key of the storage with a tensor's numbers, the same for its views."""
    return storage_key(_with_numbers(x))


def _with_numbers(x: Tensor) -> Tensor:
    values = numbers(x)
    return x if values is None else values


class Lineage:
    """The origins of tensors that are not finite, by storage."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[StorageWeakRef, frozenset[Origin]]] = {}

    def of(self, x: Tensor) -> frozenset[Origin]:
        """The origins of a tensor; empty where none is known."""
        known = self._of.get(memory(x))
        return frozenset() if known is None else known[1]

    def put(self, x: Tensor, origins: Iterable[Origin]) -> None:
        """Add origins to those of a tensor."""
        # The reference keeps the key from being given out again, not the memory alive.
        reference = StorageWeakRef(_with_numbers(x).untyped_storage())
        self._of[memory(x)] = (reference, self.of(x) | frozenset(origins))

    def forget_dead(self) -> None:
        """Drop memory that was freed."""
        self._of = {key: known for key, known in self._of.items() if not known[0].expired()}


class Shadow(NamedTuple):
    """The exact numbers of a storage."""

    memory: StorageWeakRef
    dtype: torch.dtype
    """The dtype of the storage itself."""
    numbers: Tensor
    """float64 [numbers in the storage]; where the real number is right, the same."""
    origins: frozenset[Origin]
    """The overflows that make a difference."""
    coarsest: torch.dtype
    """The dtype that overflowed; of several, the one that rounds most."""

    def part(self, x: Tensor) -> Tensor:
        """The numbers of a view of the storage."""
        return self.numbers.as_strided(x.size(), x.stride(), x.storage_offset())


class BothResults(NamedTuple):
    """The results of an op that reads an overflow, in float64, in the order of its outputs."""

    exact: list[Tensor]
    """Without the overflow."""
    real: list[Tensor]
    """With it."""
    origins: frozenset[Origin]
    """The overflows."""


class ShadowValues:
    """The exact numbers of all storages that a step's overflows spoiled."""

    def __init__(self) -> None:
        self._of: dict[int, Shadow] = {}

    def clear(self) -> None:
        """A step begins."""
        self._of.clear()

    def begin(self, x: Tensor, exact: Tensor, origin: Origin) -> bool:
        """An op overflowed into `x`; its exact result is `exact`.

        Returns:
            Whether the consequences can be followed.
        """
        if not is_plain(x):
            return False
        with no_dispatch(), torch.no_grad():
            values = torch.where(torch.isfinite(x), x.double(), exact)
            return self._put(x, values, frozenset({origin}), x.dtype)

    def follow(self, call: OpCall, site: OpSite, results: Sequence[OpResult]) -> BothResults | None:
        """Compute the effect of overflows on an op, if it reads any."""
        if not self._of or site.phase == "optimizer" or call.func is SCALER_CHECK:
            return None
        read = [self._get(x) for _, x, _ in call.inputs(None)]
        shadows = [shadow for shadow in read if shadow is not None]
        if not any(result.range for result in results):
            return None
        exact = real = None
        if shadows:
            exact, real = recomputed(call, value=self._numbers), recomputed(call)
        origins = frozenset[Origin]().union(*(shadow.origins for shadow in shadows))
        if exact is None or real is None:
            for result in results:
                self._overwrite(result.tensor)
            for origin in origins:
                origin.leave_unchecked()
            return None
        coarsest = max((shadow.coarsest for shadow in shadows), key=lambda d: torch.finfo(d).eps)
        with no_dispatch(), torch.no_grad():
            for result, a, b in zip(results, exact, real, strict=True):
                if result.range is not None and is_plain(result.tensor):
                    self._compare(call, site, result.tensor, a, b, origins, coarsest)
        return BothResults(exact, real, origins)

    def _compare(
        self,
        call: OpCall,
        site: OpSite,
        x: Tensor,
        exact: Tensor,
        real: Tensor,
        origins: frozenset[Origin],
        coarsest: torch.dtype,
    ) -> None:
        """Judge a result `x`: `exact` without the overflow, `real` with it, both float64."""
        info, largest = torch.finfo(coarsest), torch.finfo(x.dtype).max
        finite = torch.isfinite(x) & torch.isfinite(exact)
        real = torch.where(torch.isfinite(real), real, x.double())
        # For numbers beyond the dtype, its largest one is right: `clamp`, `nan_to_num`.
        nearest = exact.clamp(-largest, largest)
        change = (nearest - real.clamp(-largest, largest)).abs().where(finite, 0.0)
        scale = nearest.abs().where(finite, 0.0)
        limit = max(TOLERANCE * scale.max().item(), info.smallest_normal)
        if change.max().item() > limit:
            worst = int(change.argmax())
            value, right = (t.flatten()[worst].item() for t in (x, exact))
            location = site.line and str(site.line)
            wrong = WrongResult(call.name, site.phase, site.module, location, value, right)
            for origin in origins:
                origin.add_wrong(wrong)
        difference = (exact - real).abs()
        rounding = (info.eps * exact.abs()).clamp_min(info.smallest_normal * info.eps)
        right_ones = torch.isfinite(x) & ~(finite & (difference > rounding))
        if bool(right_ones.all()):
            self._overwrite(x)
        elif not self._put(x, torch.where(right_ones, x.double(), exact), origins, coarsest):
            for origin in origins:
                origin.leave_unchecked()

    def _put(
        self, x: Tensor, values: Tensor, origins: frozenset[Origin], coarsest: torch.dtype
    ) -> bool:
        storage: UntypedStorage = x.untyped_storage()
        if storage.nbytes() > LARGEST * x.itemsize:
            return False
        shadow = self._get(x)
        if shadow is None:
            whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage).double()
            shadow = Shadow(StorageWeakRef(storage), x.dtype, whole, frozenset(), coarsest)
        shadow.part(x).copy_(values)
        self._of = {key: known for key, known in self._of.items() if not known.memory.expired()}
        self._of[storage_key(x)] = shadow._replace(origins=shadow.origins | origins)
        return True

    def _overwrite(self, x: Tensor) -> None:
        """An op wrote `x`: its numbers are right now, or judged."""
        shadow = self._get(x)
        if shadow is None:
            return
        if x.numel() == shadow.numbers.numel():
            del self._of[storage_key(x)]
        else:
            with no_dispatch(), torch.no_grad():
                shadow.part(x).copy_(x)

    def _get(self, x: Tensor) -> Shadow | None:
        if not is_plain(x):
            return None
        shadow = self._of.get(storage_key(x))
        if shadow is None or shadow.dtype != x.dtype or shadow.memory.expired():
            return None
        return shadow

    def _numbers(self, x: Tensor) -> Tensor | None:
        shadow = self._get(x)
        return None if shadow is None else shadow.part(x)
