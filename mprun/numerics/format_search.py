"""Which GEMMs of linear layers do not tolerate a mode's format of 8 bits or fewer.

A linear layer multiplies three times in a training step (forward, grad_input, grad_weight), and an
outlier in an input, a weight or a gradient does harm in two of the three products at most. So the
search asks for each GEMM; it can also keep whole layers together, which takes a third of the
measurements.

As for ops (`op_search.py`), a candidate is measured twice: *alone*, it has the format and
everything else is float32; *kept*, it is bfloat16 and all others have the format. The same search
then finds the set with the fewest effective bits (`effective_bits.py`) that keeps to the tolerance,
or the set with the least harm within a budget of them.

The tolerance is that of the dtypes of 16 bits, beside what weights of the format's precision cost
by themselves: with three bits of mantissa (E4M3) a weight is moved by up to 6 %, with one bit
(E2M1) by up to 25 %. A mode rounds inputs and gradients besides, which costs 2 to 5 dB more in
models without outliers.

Which GEMMs to keep high for the least harm, where effective bits are limited.

This is a knapsack problem: each name costs bits and removes harm. Roundings of different products
are independent, so the powers of their errors add, and the harm that a name removes is its harm
alone, squared. Names are added by harm removed per bit (Dantzig, "Discrete-Variable Extremum
Problems", 1957), those that no longer fit are passed over, and each set on the way is measured.

If powers do add, the best of these sets and of the single names removes at least half of what the
best possible set removes. Single names are measured by a search in any case. The measured harm
decides, so a wrong guess of the order costs bits, and is not hidden.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mprun.console import ReportPart, report_nothing
from mprun.numerics.cast_probe import CastProbe
from mprun.numerics.effective_bits import EffectiveBits, GemmName
from mprun.numerics.op_search import SetMeasure, SmallestSet, smallest_set
from mprun.numerics.passes import CastPlan
from mprun.numerics.tolerance import Tolerance
from mprun.precision.caster import AutocastCaster, NoCaster
from mprun.precision.gemms import HIGH, LinearGemms
from mprun.results.search_result import Deviation, SearchStep


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


SLACK_DB = 6.0
"""How much worse than moved weights a format may be: SQNR of a gradient. 10 dB, as for 16 bits,
would leave nothing of NVFP4's gradients."""


def candidates(gemms: Collection[GemmName], per: str) -> dict[str, tuple[GemmName, ...]]:
    """What stays high together, by name.

    Args:
        gemms: those that have a format.
        per: gemm for each by itself, layer for those of a layer together.
    """
    found: dict[str, tuple[GemmName, ...]] = {}
    for name in gemms:
        key = name.layer if per == "layer" else str(name)
        found[key] = (*found.get(key, ()), name)
    return found


def with_high(
    gemms: Mapping[str, LinearGemms], high: Collection[GemmName]
) -> dict[str, LinearGemms]:
    """The formats of layers, without those of some GEMMs; layers without any are left out."""
    names = {*high}
    kept = {
        layer: of_layer._replace(
            **{p: HIGH for p in of_layer._fields if GemmName(layer, p) in names}
        )
        for layer, of_layer in gemms.items()
    }
    return {layer: of_layer for layer, of_layer in kept.items() if any(g.formats for g in of_layer)}


class FormatEffect(NamedTuple):
    """The effect of a candidate's format."""

    name: str
    alone: Deviation
    harm: float
    """Alone: the share of the tolerance that is used up."""
    kept: Deviation


@dataclass(frozen=True)
class HighGemms:
    """The candidates to keep in bfloat16, measured."""

    names: tuple[str, ...]
    steps: tuple[SearchStep, ...]
    """The sets that were tried."""
    measure: Deviation
    harm: float
    """With them, beyond the noise of batches."""
    gemms: tuple[GemmName, ...]
    """Of these candidates."""

    @property
    def is_within(self) -> bool:
        """Whether the harm is tolerated."""
        return self.harm <= 1


class FormatSensitivity:
    """The effects of a format on the GEMMs of a model's linear layers.

    Args:
        probe: measures any cast plan.
        gemms: the formats of each layer that the mode converts.
        bits: counts the effective bits of a choice.
        device_type: cpu or cuda.
        per: gemm or layer, as for `candidates`.
        report: is called before each measurement, and may end it by an exception.
    """

    def __init__(
        self,
        probe: CastProbe,
        gemms: Mapping[str, LinearGemms],
        bits: EffectiveBits,
        device_type: str,
        per: str = "gemm",
        report: ReportPart = report_nothing,
    ) -> None:
        self._probe, self._gemms, self._bits, self._report = probe, gemms, bits, report
        self._device_type, self._per = device_type, per
        self._known: dict[frozenset[str], Deviation] = {}
        self.candidates = candidates(bits.formatted, per)
        weights = {f"{name}.weight" for name in gemms}
        steps = [of.forward.right.half_step for of in gemms.values() if of.forward.right]
        self.unavoidable = probe.with_moved(weights, max(steps, default=0.0))
        """Everything in float32, with weights of the format's precision."""
        self.everything = self.with_high(())
        """Every GEMM in the format."""
        self.bfloat16 = self.with_high(tuple(self.candidates))
        """None in the format."""
        self.effects: list[FormatEffect] = []

    def measure(self, tolerance: Tolerance) -> None:
        """Measure the effect of each candidate: two measurements."""
        for name, own in self.candidates.items():
            kind = "GEMM" if self._per == "gemm" else self._per
            self._report(f"{kind} {name}", len(self.effects), len(self.candidates))
            others = {*self._bits.formatted} - {*own}
            plan = CastPlan(NoCaster(), gemms=with_high(self._gemms, others))
            alone = self._probe.measure(plan)
            effect = FormatEffect(name, alone, tolerance.harm(alone), self.with_high((name,)))
            self.effects.append(effect)

    def smallest(self, tolerance: Tolerance, budget: float | None = None) -> HighGemms:
        """The set of candidates in bfloat16 with the fewest effective bits within the tolerance.

        Args:
            tolerance: of loss and gradients.
            budget: with one, the set with the least harm that has at most so many effective bits.
                Errors below the noise of batches count then, because the bits are there to spend.

        Raises:
            ValueError: the budget is below the effective bits of everything in the format.
        """

        def harm(high: tuple[str, ...]) -> float:
            self._report(f"searching the set in bfloat16: {len(high)} of {len(self.candidates)}")
            return of(self.with_high(high))

        of = tolerance.harm if budget is None else tolerance.whole_harm
        alone = {effect.name: of(effect.alone) for effect in self.effects}
        if budget is None:
            search = smallest_set(alone, harm, self.effective_bits)
        else:
            search = least_harm(alone, harm, self.effective_bits, budget)
        measure = self.with_high(search.fp32)
        gemms = self._gemms_of(search.fp32)
        return HighGemms(search.fp32, search.steps, measure, tolerance.harm(measure), gemms)

    def effective_bits(self, high: Collection[str]) -> float:
        """With these candidates in bfloat16."""
        return self._bits.of(self._gemms_of(high))

    def with_high(self, high: tuple[str, ...]) -> Deviation:
        """The mode with these candidates in bfloat16."""
        key = frozenset(high)
        if key not in self._known:
            caster = AutocastCaster(self._device_type, torch.bfloat16)
            gemms = with_high(self._gemms, self._gemms_of(high))
            self._known[key] = self._probe.measure(CastPlan(caster, gemms=gemms))
        return self._known[key]

    def _gemms_of(self, high: Collection[str]) -> tuple[GemmName, ...]:
        return tuple(gemm for name in high for gemm in self.candidates[name])
