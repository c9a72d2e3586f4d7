"""What tensors would hold had nothing overflowed: the ops after an overflow, in float64.

An infinity can come to the right number, exp(-inf) to 0, or to a wrong one: x / inf is 0 too. So
where an op overflows, its exact results are kept, and each op that reads them runs twice more in
float64, once on those and once on what is really there. Their difference is what the overflow does:
both have the rounding of earlier ops alike, and none of their own. A finite number is

    right    where the difference is below the rounding of the dtype that overflowed
    wrong    where it is more than `TOLERANCE` of the tensor's largest number
    open     between, or too small for a normal number of the dtype (1 / inf): what is made of it
             tells

What is not right is followed on: it may become wrong, or not finite (0 / 0), and comes from the
same overflow then.

Kept by memory, as origins are, so that views share it; for one step; the optimizer is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mprun._torch import StorageWeakRef, no_dispatch
from mprun.numerics.exceptions.details import Made, Site
from mprun.numerics.exceptions.found import WrongResult
from mprun.numerics.exceptions.lineage import Origin
from mprun.numerics.exceptions.ops import UNSCALE, Call
from mprun.numerics.exceptions.replay import LARGEST, in_float64
from mprun.numerics.exceptions.tensors import is_plain

TOLERANCE = torch.finfo(torch.bfloat16).eps
"""Bfloat16 moves every number by up to half of that, and networks train in it."""


class Exact(NamedTuple):
    """The exact numbers of a piece of memory."""

    memory: StorageWeakRef
    dtype: torch.dtype
    """What the memory itself holds."""
    numbers: Tensor
    """float64 [numbers in that memory]; those that are right are the ones that are there."""
    origins: frozenset[Origin]
    """The overflows that make them differ."""
    coarsest: torch.dtype
    """The dtype that overflowed; of several, the one that rounds most."""


class Followed(NamedTuple):
    """What an op makes of an overflow."""

    exact: list[Tensor]
    """Its results without it, float64, in the order of `Call.outputs`."""
    real: list[Tensor]
    """With it."""
    origins: frozenset[Origin]
    """The overflows."""


class Continuation:
    """The exact numbers of what a step's overflows spoiled."""

    def __init__(self) -> None:
        self._of: dict[int, Exact] = {}

    def clear(self) -> None:
        """A step begins."""
        self._of.clear()

    def begin(self, x: Tensor, exact: Tensor, origin: Origin) -> bool:
        """An op overflowed into `x`; `exact` is what it should hold.

        Returns:
            Whether what is made of it can be followed.
        """
        if not is_plain(x):
            return False
        with no_dispatch(), torch.no_grad():
            numbers = torch.where(torch.isfinite(x), x.double(), exact)
            return self._put(x, numbers, frozenset({origin}), x.dtype)

    def follow(self, call: Call, site: Site, made: Sequence[Made]) -> Followed | None:
        """See what an op makes of an overflow, where it has to do with one."""
        if not self._of or site.phase == "optimizer" or call.func is UNSCALE:
            return None
        read = [self._known(x) for _, x, _ in call.inputs(None)]
        given = [known for known in read if known is not None]
        if not any(m.limits for m in made):
            return None
        if not given:
            self._write_over(made)
            return None
        origins = frozenset[Origin]().union(*(known.origins for known in given))
        coarsest = max((known.coarsest for known in given), key=lambda d: torch.finfo(d).eps)
        exact, real = in_float64(call, self._numbers), in_float64(call)
        if exact is None or real is None:
            self._write_over(made)
            for origin in origins:
                origin.unchecked()
            return None
        with no_dispatch(), torch.no_grad():
            for m, a, b in zip(made, exact, real, strict=True):
                if m.limits is not None and is_plain(m.tensor):
                    self._compare(call, site, m.tensor, a, b, origins, coarsest)
        return Followed(exact, real, origins)

    def _compare(
        self,
        call: Call,
        site: Site,
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
        # What no number of the dtype can be is as good as its largest: `clamp`, `nan_to_num`.
        nearest = exact.clamp(-largest, largest)
        change = (nearest - real.clamp(-largest, largest)).abs().where(finite, 0.0)
        scale = nearest.abs().where(finite, 0.0)
        bar = max(TOLERANCE * scale.max().item(), info.smallest_normal)
        if change.max().item() > bar:
            worst = int(change.argmax())
            value, right = (t.flatten()[worst].item() for t in (x, exact))
            location = site.line and str(site.line)
            result = WrongResult(call.name, site.phase, site.module, location, value, right)
            for origin in origins:
                origin.makes(result)
        difference = (exact - real).abs()
        rounding = (info.eps * exact.abs()).clamp_min(info.smallest_normal * info.eps)
        right_ones = torch.isfinite(x) & ~(finite & (difference > rounding))
        if bool(right_ones.all()):
            self._write_over_tensor(x)
        else:
            numbers = torch.where(right_ones, x.double(), exact)
            if not self._put(x, numbers, origins, coarsest):
                for origin in origins:
                    origin.unchecked()

    def _put(
        self, x: Tensor, numbers: Tensor, origins: frozenset[Origin], coarsest: torch.dtype
    ) -> bool:
        if x.untyped_storage().nbytes() > LARGEST * x.itemsize:
            return False
        storage = x.untyped_storage()
        before = self._known(x)
        if before is None:
            whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage).double()
            before = Exact(StorageWeakRef(storage), x.dtype, whole, frozenset(), coarsest)
        _part(before.numbers, x).copy_(numbers)
        self._of = {key: kept for key, kept in self._of.items() if not kept.memory.expired()}
        self._of[storage._cdata] = before._replace(origins=before.origins | origins)
        return True

    def _write_over(self, made: Sequence[Made]) -> None:
        for m in made:
            self._write_over_tensor(m.tensor)

    def _write_over_tensor(self, x: Tensor) -> None:
        """What `x` holds now is right, or judged."""
        known = self._known(x)
        if known is None:
            return
        if x.numel() == known.numbers.numel():
            del self._of[x.untyped_storage()._cdata]
        else:
            with no_dispatch(), torch.no_grad():
                _part(known.numbers, x).copy_(x)

    def _known(self, x: Tensor) -> Exact | None:
        if not is_plain(x):
            return None
        known = self._of.get(x.untyped_storage()._cdata)
        if known is None or known.dtype != x.dtype or known.memory.expired():
            return None
        return known

    def _numbers(self, x: Tensor) -> Tensor | None:
        known = self._known(x)
        return None if known is None else _part(known.numbers, x)


def _part(numbers: Tensor, x: Tensor) -> Tensor:
    """The numbers of the view `x` of the memory."""
    return numbers.as_strided(x.size(), x.stride(), x.storage_offset())
