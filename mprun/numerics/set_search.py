"""The smallest set of ops, modules or products to keep in the higher precision.

A candidate is measured twice. *Alone*: it is lower and everything else is float32, which shows
whether it does harm. *Kept*: it is high and everything else is lower, which shows the gain of
sparing it. Harm is 1 where the lower precision does as much as is tolerated, 0 where it does none,
and infinite where a loss is NaN:

    alone         the harm of a name that is lower while everything else is float32
    harm(high)    the harm of the lower precision while these names are high
    cost(high)    the cost of keeping them

    add           the names, the most harmful alone first, until the harm is at most 1
    drop          each again, the least harmful alone first, if the others are enough
    swap          each for another that is harmful alone, if that is enough and costs less

`harm` alone is not enough. If two ops overflow, the loss is NaN until both are moved; their harm
alone distinguishes them from harmless ops. Dropping removes what was added before the op that
mattered. Swapping finds the op that overflows behind one that only feeds it. In the end no name can
be left out. Another, smaller set may exist: to exclude that takes 2^n measurements instead of 3 n.

Where the cost is limited, the set with the least harm is wanted. That is a knapsack problem: each
name costs bits and removes harm. Roundings of different products are independent, so the powers of
their errors add, and the harm that a name removes is its harm alone, squared. Names are added by
harm removed per bit (Dantzig, "Discrete-Variable Extremum Problems", 1957), those that no longer
fit are passed over, and each set on the way is measured. If powers do add, the best of these sets
and of the single names removes at least half of what the best possible set removes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mprun.console import ReportPart, report_nothing
from mprun.numerics.cast_probe import CastProbe
from mprun.numerics.passes import CastPlan
from mprun.numerics.tolerance import Tolerance
from mprun.results.search_result import Deviation, SearchStep

Names = tuple[str, ...]
SetMeasure = Callable[[Names], float]
"""A measurement while these names are high."""


@dataclass(frozen=True)
class SmallestSet:
    """The result of a search."""

    names: tuple[str, ...]
    """To keep high."""
    harm: float
    """With them high."""
    steps: tuple[SearchStep, ...]
    """The decisions."""

    @property
    def is_within(self) -> bool:
        """Whether the harm is tolerated; if not, even keeping every name was not enough."""
        return self.harm <= 1


def smallest_set(
    alone: Mapping[str, float], harm: SetMeasure, cost: SetMeasure = lambda high: 0.0
) -> SmallestSet:
    """A set to keep high from which nothing can be left out.

    Args:
        alone: name to its harm alone, in the order of the model's calls: of two equally harmful
            names the earlier is added first, because it may be the cause of the other.
        harm: measures; NaN counts as infinite. Called once for each set.
        cost: measures; called for sets whose harm is tolerated.
    """
    search = _SetSearch({n: _worst_if_nan(h) for n, h in alone.items()}, harm, cost)
    high = search.added()
    if search.harm(high) <= 1:
        needed = search.without_needless(high)
        high = search.swapped(needed)
        if high != needed:
            high = search.without_needless(high)
    return SmallestSet(high, search.harm(high), tuple(search.steps))


class _SetSearch:
    """One search: its measurements and decisions."""

    def __init__(self, alone: Mapping[str, float], harm: SetMeasure, cost: SetMeasure) -> None:
        self.steps: list[SearchStep] = []
        self._alone = alone
        self._measure = harm
        self._cost = cost
        self._known: dict[frozenset[str], float] = {}

    def harm(self, high: Sequence[str]) -> float:
        key = frozenset(high)
        if key not in self._known:
            self._known[key] = _worst_if_nan(self._measure(tuple(high)))
        return self._known[key]

    def added(self) -> tuple[str, ...]:
        """The most harmful names, as many as it takes; all if that is not enough."""
        high: tuple[str, ...] = ()
        for name in sorted(self._alone, key=lambda n: -self._alone[n]):
            if self.harm(high) <= 1:
                break
            high = (*high, name)
            self._decide("add", name, high)
        return high

    def without_needless(self, high: tuple[str, ...]) -> tuple[str, ...]:
        """`high` without the names that can go; repeated until none can."""
        before = None
        while high != before:
            before = high
            for name in reversed(before):
                rest = tuple(n for n in high if n != name)
                can_go = self.harm(rest) <= 1
                self._decide("drop" if can_go else "need", name, rest)
                high = rest if can_go else high
        return high

    def swapped(self, high: tuple[str, ...]) -> tuple[str, ...]:
        """`high` with cheaper names in place of others."""
        for name in high:
            others = [n for n in self._alone if self._alone[n] > 1 and n not in high]
            sets = [tuple(other if n == name else n for n in high) for other in others]
            enough = [other for other in sets if self.harm(other) <= 1]
            best = min([high, *enough], key=self._cost) if enough else high
            for new in set(best) - set(high):
                self._decide("swap", new, best)
            high = best
        return high

    def _decide(self, action: str, name: str, high: Sequence[str]) -> None:
        self.steps.append(SearchStep(action, name, self.harm(high)))


def _worst_if_nan(harm: float) -> float:
    return math.inf if math.isnan(harm) else harm


def least_harm(
    alone: Mapping[str, float], harm: SetMeasure, bits: SetMeasure, budget: float
) -> SmallestSet:
    """The set to keep high with the least harm that was found within a budget.

    Args:
        alone: name to its harm alone, not NaN.
        harm: measures the harm with a set high; not NaN.
        bits: effective bits with a set high.
        budget: at most so many effective bits.

    Raises:
        ValueError: even with nothing high there are more.
    """
    lowest = bits(())
    if lowest > budget:
        raise ValueError(f"a budget of {budget:g} effective bits is below {lowest:.4g}")

    def removed_per_bit(name: str) -> float:
        cost = bits((name,)) - lowest
        return alone[name] ** 2 / cost if cost > 0 else math.inf

    kept: tuple[str, ...] = ()
    tried, steps = [kept], list[SearchStep]()
    for name in sorted(alone, key=lambda n: -removed_per_bit(n)):
        if bits((*kept, name)) > budget:
            continue
        kept = (*kept, name)
        tried.append(kept)
        steps.append(SearchStep("add", name, harm(kept)))
    tried += [(name,) for name in alone if bits((name,)) <= budget]
    best = min(tried, key=harm)  # of equal ones the first, which has the fewest bits
    return SmallestSet(best, harm(best), tuple(steps))


class Candidates(Protocol):
    """What can be kept in the higher precision, by name."""

    @property
    def kind(self) -> str:
        """op, module, GEMM or layer."""

    @property
    def names(self) -> Mapping[str, int]:
        """Name to its number of calls, in the order of the first ones."""

    def alone(self, name: str) -> CastPlan:
        """This one lower, everything else in float32."""

    def kept(self, names: Names) -> CastPlan:
        """These high, the others lower."""

    def cost(self, names: Names) -> float:
        """What keeping these high costs."""


class Effect(NamedTuple):
    """The effect of one candidate."""

    name: str
    calls: int
    alone: Deviation
    kept: Deviation
    time_ratio: float | None


@dataclass(frozen=True)
class KeptHigh(SmallestSet):
    """The candidates to keep high, measured; the most harmful first."""

    measure: Deviation
    cost: float


class CandidateSearch:
    """Measures candidates one by one, and sets of them; what was measured stays if `report` raises.

    Args:
        probe: measures any cast plan.
        candidates: what can be kept high.
        report: is called before each measurement.
        time_ratio: the time of a plan over that of everything lower; None where none is taken.
    """

    def __init__(
        self,
        probe: CastProbe,
        candidates: Candidates,
        report: ReportPart = report_nothing,
        time_ratio: Callable[[CastPlan], float | None] = lambda plan: None,
    ) -> None:
        self.candidates = candidates
        self.effects: list[Effect] = []
        """In the order of the candidates' first calls."""
        self._probe, self._report, self._time_ratio = probe, report, time_ratio
        self._known: dict[frozenset[str], Deviation] = {}

    def kept(self, names: Names) -> Deviation:
        """The distance from float32 with these high and the others lower."""
        key = frozenset(names)
        if key not in self._known:
            self._known[key] = self._probe.measure(self.candidates.kept(names))
        return self._known[key]

    def measure(self) -> None:
        """Measure the effect of each candidate."""
        every = self.candidates.names
        for name, calls in every.items():
            self._report(f"{self.candidates.kind} {name}", len(self.effects), len(every))
            ratio = self._time_ratio(self.candidates.kept((name,)))
            alone = self._probe.measure(self.candidates.alone(name))
            self.effects.append(Effect(name, calls, alone, self.kept((name,)), ratio))

    def smallest(self, tolerance: Tolerance, budget: float | None = None) -> KeptHigh:
        """The cheapest set within the tolerance.

        Args:
            tolerance: of loss and gradients.
            budget: with one, the set with the least harm that costs at most so much. Errors below
                the noise of batches count then, because the budget is there to spend.

        Raises:
            ValueError: keeping nothing costs more than the budget.
        """
        sets = itertools.count()

        def harm(names: Names) -> float:
            self._report(f"smallest set, kept high: {', '.join(names) or 'nothing'}", next(sets))
            return of(self.kept(names))

        of = tolerance.harm if budget is None else tolerance.whole_harm
        alone = {effect.name: of(effect.alone) for effect in self.effects}
        cost = self.candidates.cost
        if budget is None:
            search = smallest_set(alone, harm, cost)
        else:
            search = least_harm(alone, harm, cost, budget)
        measure = self.kept(search.names)
        harm_left = _worst_if_nan(tolerance.harm(measure))  # beyond the noise of batches
        return KeptHigh(search.names, harm_left, search.steps, measure, cost(search.names))
