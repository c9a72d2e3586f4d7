"""The smallest set that has to stay in float32: the deciding part of a search, and nothing else.

It knows names and three measurements. Harm is a number that is 1 where the lower dtype does as much
as is tolerated, 0 where it does none, and infinite where a loss is no number any more:

    alone         what a name does in the lower dtype while everything else is in float32
    harm(kept)    what the lower dtype does while these names are kept in float32
    cost(kept)    what keeping them costs

    add           the names in the order of the harm they do alone, the worst first, until the
                  harm is at most 1
    drop          each again, the least harmful alone first, where the others suffice
    swap          each for another that is harmful alone, where that is enough and costs less

Looking only at `harm` would not do. Of two ops that overflow, moving either leaves the loss as NaN
as it was; what each does alone tells them from the harmless ones. Dropping takes out what stood
before the op that mattered, swapping finds the op that overflows behind one that merely feeds it.
In the end no name can be left out. That no other, smaller set would do as well is not shown, which
would take 2^n measurements instead of about 3 n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Measured = Callable[[tuple[str, ...]], float]
"""Something measured while these names are in float32."""


class Step(NamedTuple):
    """One decision."""

    action: str
    """add; drop (taken out again), need (could not be); swap (took the place of another)."""
    name: str
    harm: float
    """Measured with the name added or swapped in, or without it."""


@dataclass(frozen=True)
class Smallest:
    """What was found."""

    kept: tuple[str, ...]
    """Names that stay in float32."""
    harm: float
    """With them there."""
    steps: tuple[Step, ...]
    """How it was found."""

    @property
    def is_within(self) -> bool:
        """Whether the harm is tolerated; if not, everything was kept and it was not enough."""
        return self.harm <= 1


def smallest(
    alone: Mapping[str, float], harm: Measured, cost: Measured = lambda kept: 0.0
) -> Smallest:
    """A set to keep in float32 from which nothing can be left out.

    Args:
        alone: name to the harm it does alone, in the order in which a model comes to them: of two
            that are equally harmful the earlier is added first, as it may be the other's cause.
        harm: measures; NaN counts as infinite. Asked for each set once.
        cost: measures; asked for sets that are within what is tolerated.
    """
    search = _Search({n: _worst_if_nan(h) for n, h in alone.items()}, harm, cost)
    kept = search.added()
    if search.harm(kept) <= 1:
        needed = search.without_needless(kept)
        kept = search.swapped(needed)
        if kept != needed:
            kept = search.without_needless(kept)
    return Smallest(kept, search.harm(kept), tuple(search.steps))


class _Search:
    """One search: what was measured, what was decided."""

    def __init__(self, alone: Mapping[str, float], harm: Measured, cost: Measured) -> None:
        self.steps: list[Step] = []
        self._alone = alone
        self._measure = harm
        self._cost = cost
        self._known: dict[frozenset[str], float] = {}

    def harm(self, kept: Sequence[str]) -> float:
        key = frozenset(kept)
        if key not in self._known:
            self._known[key] = _worst_if_nan(self._measure(tuple(kept)))
        return self._known[key]

    def added(self) -> tuple[str, ...]:
        """The most harmful names, as many as it takes; all where that is not enough."""
        kept: tuple[str, ...] = ()
        for name in sorted(self._alone, key=lambda n: -self._alone[n]):
            if self.harm(kept) <= 1:
                break
            kept = (*kept, name)
            self._decide("add", name, kept)
        return kept

    def without_needless(self, kept: tuple[str, ...]) -> tuple[str, ...]:
        """`kept` without what can go; a second look is taken at the rest where something went."""
        before = None
        while kept != before:
            before = kept
            for name in reversed(before):
                rest = tuple(n for n in kept if n != name)
                goes = self.harm(rest) <= 1
                self._decide("drop" if goes else "need", name, rest)
                kept = rest if goes else kept
        return kept

    def swapped(self, kept: tuple[str, ...]) -> tuple[str, ...]:
        """`kept` with names in the place of others that cost more."""
        for name in kept:
            others = [n for n in self._alone if self._alone[n] > 1 and n not in kept]
            sets = [tuple(other if n == name else n for n in kept) for other in others]
            enough = [other for other in sets if self.harm(other) <= 1]
            best = min([kept, *enough], key=self._cost) if enough else kept
            for new in set(best) - set(kept):
                self._decide("swap", new, best)
            kept = best
        return kept

    def _decide(self, action: str, name: str, kept: Sequence[str]) -> None:
        self.steps.append(Step(action, name, self.harm(kept)))


def _worst_if_nan(harm: float) -> float:
    return math.inf if math.isnan(harm) else harm
