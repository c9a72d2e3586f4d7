"""Which op a number that is not finite comes from.

What an op makes out of finite numbers and is not finite has its origin there. Two things do not:

    constants  an infinity among the op's own numbers, as in `masked_fill(mask, -inf)`: the program
               wrote it
    the rest   what was computed from something that is not finite has the origins of that; where
               it was there before any op was seen, it is from outside

A NaN made of constants alone, as by the softmax of a row that is masked whole, begins anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from math import inf, isfinite

import torch
from torch import Tensor

from mprun._torch import no_dispatch
from mprun.numerics.exceptions.details import Made, Ran, Site, describe
from mprun.numerics.exceptions.exact import Continuation, Followed
from mprun.numerics.exceptions.found import FpException
from mprun.numerics.exceptions.lineage import Lineage, Origin, reach
from mprun.numerics.exceptions.ops import Call, spec_of
from mprun.numerics.exceptions.replay import in_float64
from mprun.numerics.exceptions.tensors import Limits, is_plain, limits, stats

PAST = 20
"""Ops before an exception that are told with it."""

LOW = (torch.float16, torch.bfloat16)


class Origins:
    """The origins of one step after another.

    Args:
        saturates: whether results clamped to a 16-bit dtype's largest number count.
        name: what a tensor is called that was there before any op was seen; None if it has no name.
    """

    def __init__(self, saturates: bool, name: Callable[[Tensor], str | None]) -> None:
        self.lineage = Lineage()
        self._exact = Continuation()
        self._name = name
        self.new: list[Origin] = []
        """Those of the step, in order."""
        self._past: deque[Ran] = deque(maxlen=PAST)
        self._saturates = saturates
        self._step = 0
        self._went_backward = False

    def begin(self, step: int) -> None:
        """Step number `step` begins."""
        self._step, self.new, self._went_backward = step, [], False
        self.lineage.forget_dead()
        self._exact.clear()

    def look(self, call: Call, site: Site) -> None:
        """Look at what an op made."""
        outputs = enumerate(call.outputs())
        results = [Made(name, i, x, limits(x), p) for p, (name, i, x) in outputs]
        followed = self._exact.follow(call, site, results)
        bad = [made for made in results if made.limits is not None and not made.limits.finite]
        if bad:
            self._spoiled(call, site, bad, followed)
        if self._saturates:
            for made in results:
                self._saturated(call, site, made)
        if results:
            first = results[0]
            self._past.append(
                Ran(call.name, site, first.tensor.dtype, first.tensor.shape, first.limits)
            )
        if site.phase in ("forward", "backward"):
            self._went_backward = site.phase == "backward"

    def _spoiled(self, call: Call, site: Site, bad: list[Made], followed: Followed | None) -> None:
        listwise = spec_of(call.func).listwise
        for _, group in groupby(sorted(bad, key=_number), key=_number if listwise else _same):
            together = list(group)
            origins = self._origins(call, site, together, followed)
            for made in together:
                self.lineage.put(made.tensor, origins)
                if site.phase == "other" and made.tensor.numel() == 1:
                    after = "a scalar computed after the backward pass"
                    reach(origins, after if self._went_backward else "the loss")

    def _origins(
        self, call: Call, site: Site, bad: list[Made], followed: Followed | None
    ) -> frozenset[Origin]:
        found: set[Origin] = set()
        was_nan = False
        for name, x, known in call.inputs(bad[0].number):
            given = known or limits(x)
            if given is not None and not given.finite:
                found |= self.lineage.of(x) or {self._from_outside(call, site, name, x)}
                was_nan |= given.has_nan
        if followed is not None:
            found = _to_blame(found, bad, followed)
        constants = all(origin.exception.kind == "constant" for origin in found)
        makes_nan = not was_nan and any(made.limits.has_nan for made in bad if made.limits)
        if found and not (constants and makes_nan):
            return frozenset(found)
        written = not found and not all(map(isfinite, call.numbers()))
        return frozenset({self._described(call, site, bad, "constant" if written else None)})

    def _from_outside(self, call: Call, site: Site, name: str, x: Tensor) -> Origin:
        label = self._name(x) or f"a tensor ({name} of {call.name})"
        origin = self._described(call, site, [Made(label, 0, x, limits(x))], "outside")
        self.lineage.put(x, [origin])
        return origin

    def _described(self, call: Call, site: Site, bad: list[Made], kind: str | None) -> Origin:
        exact = in_float64(call) if kind is None else None
        first = None if exact is None else exact[bad[0].position]
        origin = self._add(describe(self._step, call, site, bad, kind, self._past, first))
        origin.upward = any(x.limits and (x.limits.has_nan or x.limits.high == inf) for x in bad)
        if kind is None:
            self._continue(origin, bad, exact)
        return origin

    def _continue(self, origin: Origin, bad: list[Made], exact: Sequence[Tensor] | None) -> None:
        """Follow what is made of an overflow, to see whether it is right."""
        overflow = origin.exception.kind == "overflow"
        if exact is None or origin.exception.phase == "optimizer":
            if overflow:
                origin.unchecked()
            return
        for made in bad:
            right = exact[made.position]
            if _differs(made, right) and not self._exact.begin(made.tensor, right, origin):
                origin.unchecked()

    def _saturated(self, call: Call, site: Site, made: Made) -> None:
        """A number that was clamped: at the largest of its dtype, and made of none that is."""
        dtype = made.tensor.dtype
        if not at_largest(dtype, made.limits):
            return
        largest = torch.finfo(dtype).max
        given = [known or limits(x) for _, x, known in call.inputs(made.number) if x.dtype == dtype]
        moved = any(at_largest(dtype, found) for found in given)
        if moved or any(abs(x) >= largest for x in call.numbers()):
            return
        results = in_float64(call)
        exact = None if results is None else results[made.position]
        size = None if exact is None else stats(made.name, exact).max_abs
        if size is not None and size <= largest:
            return  # it is that large
        self._add(describe(self._step, call, site, [made], "saturated", self._past, exact))

    def unseen(self, exception: FpException, x: Tensor) -> Origin:
        """The origin of a tensor that something wrote to that is no op."""
        origin = self._add(exception)
        self.lineage.put(x, [origin])
        return origin

    @property
    def past(self) -> list[Ran]:
        """The ops that ran last."""
        return list(self._past)

    def _add(self, exception: FpException) -> Origin:
        origin = Origin(exception)
        self.new.append(origin)
        return origin


def at_largest(dtype: torch.dtype, found: Limits | None) -> bool:
    """Whether a 16-bit tensor holds the largest number of its dtype."""
    return found is not None and dtype in LOW and found.size == torch.finfo(dtype).max


def _differs(made: Made, exact: Tensor) -> bool:
    """Whether float64 has a number where the dtype has none, as far as can be seen."""
    if not is_plain(made.tensor):
        return True
    with no_dispatch():
        return bool((~torch.isfinite(made.tensor) & torch.isfinite(exact)).any())


def _to_blame(found: set[Origin], bad: list[Made], followed: Followed) -> set[Origin]:
    """Of the origins of an op's inputs those that made `bad`; none where the op itself did.

    Args:
        found: the origins of inputs that are not finite.
        bad: results that are not finite.
        followed: what they are in float64, with and without the overflows among the origins.
    """
    blamed: set[Origin] = set()
    for made in bad:
        if not is_plain(made.tensor):
            blamed |= found | followed.origins
            continue
        with no_dispatch():
            spoiled = ~torch.isfinite(made.tensor) & ~torch.isfinite(followed.real[made.position])
            exact = torch.isfinite(followed.exact[made.position])
            by_overflow, anyway = bool((spoiled & exact).any()), bool((spoiled & ~exact).any())
        if by_overflow:
            blamed |= followed.origins
        if anyway:
            blamed |= found - followed.origins or found
    return blamed


def _number(made: Made) -> int:
    return made.number


def _same(made: Made) -> int:
    return 0
