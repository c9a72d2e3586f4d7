"""Which linear layers do not tolerate a mode's format of 8 bits or fewer.

As for ops (`op_search.py`), a layer is measured twice: *alone*, it has the format and everything
else is float32; *kept*, it is bfloat16 and all others have the format. The same search then finds
the smallest set of layers to keep in bfloat16.

The tolerance is that of the dtypes of 16 bits, beside what weights of the format's precision cost
by themselves: with three bits of mantissa (E4M3) a weight is moved by up to 6 %, with one bit
(E2M1) by up to 25 %. A mode rounds inputs and gradients besides, which costs 2 to 5 dB more in
models without outliers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mprun.console import ReportPart, report_nothing
from mprun.numerics.cast_probe import CastProbe
from mprun.numerics.op_search import SmallestSet, smallest_set
from mprun.numerics.passes import CastPlan
from mprun.numerics.tolerance import Tolerance
from mprun.precision.caster import AutocastCaster, NoCaster
from mprun.precision.gemms import LinearGemms
from mprun.records.deviation import Deviation

SLACK_DB = 6.0
"""How much worse than moved weights a format may be: SQNR of a gradient. 10 dB, as for 16 bits,
would leave nothing of NVFP4's gradients."""


class FormatEffect(NamedTuple):
    """The effect of a layer's format."""

    name: str
    alone: Deviation
    harm: float
    """Alone: the share of the tolerance that is used up."""
    kept: Deviation


@dataclass(frozen=True)
class HighLayers:
    """The layers to keep in bfloat16, measured."""

    search: SmallestSet
    measure: Deviation


class FormatSensitivity:
    """The effects of a format on a model's linear layers.

    Args:
        probe: measures any cast plan.
        gemms: the products of each layer that the mode converts.
        device_type: cpu or cuda.
        report: is called before each measurement, and may end it by an exception.
    """

    def __init__(
        self,
        probe: CastProbe,
        gemms: Mapping[str, LinearGemms],
        device_type: str,
        report: ReportPart = report_nothing,
    ) -> None:
        self._probe, self._gemms, self._report = probe, gemms, report
        self._device_type = device_type
        self._known: dict[frozenset[str], Deviation] = {}
        weights = {f"{name}.weight" for name in gemms}
        steps = [of.forward.right.half_step for of in gemms.values() if of.forward.right]
        self.unavoidable = probe.with_moved(weights, max(steps, default=0.0))
        """Everything in float32, with weights of the format's precision."""
        self.everything = self.with_high(())
        """Every layer in the format."""
        self.bfloat16 = self.with_high(tuple(gemms))
        """None in the format."""
        self.effects: list[FormatEffect] = []

    def measure(self, tolerance: Tolerance) -> None:
        """Measure the effect of each layer."""
        for name, gemms in self._gemms.items():
            self._report(f"layer {name}", len(self.effects), len(self._gemms))
            alone = self._probe.measure(CastPlan(NoCaster(), gemms={name: gemms}))
            effect = FormatEffect(name, alone, tolerance.harm(alone), self.with_high((name,)))
            self.effects.append(effect)

    def smallest(self, tolerance: Tolerance, shares: Mapping[str, float]) -> HighLayers:
        """The smallest set of layers in bfloat16 that keeps to the tolerance.

        Args:
            tolerance: of loss and gradients.
            shares: of each layer in the operations of all; a cheaper set is preferred.
        """

        def harm(high: tuple[str, ...]) -> float:
            self._report(f"smallest set, in bfloat16: {', '.join(high) or 'nothing'}")
            return tolerance.harm(self.with_high(high))

        search = smallest_set(
            {effect.name: effect.harm for effect in self.effects},
            harm,
            lambda high: sum(shares[name] for name in high),
        )
        return HighLayers(search, self.with_high(search.fp32))

    def with_high(self, high: tuple[str, ...]) -> Deviation:
        """The mode with these layers in bfloat16."""
        key = frozenset(high)
        if key not in self._known:
            caster = AutocastCaster(self._device_type, torch.bfloat16)
            gemms = {name: g for name, g in self._gemms.items() if name not in key}
            self._known[key] = self._probe.measure(CastPlan(caster, gemms=gemms))
        return self._known[key]
