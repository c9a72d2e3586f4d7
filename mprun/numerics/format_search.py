"""Which GEMMs of linear layers do not tolerate a mode's format of 8 bits or fewer.

A linear layer multiplies three times in a training step (forward, grad_input, grad_weight), and an
outlier in an input, a weight or a gradient does harm in two of the three products at most. So the
search asks for each GEMM; it can also keep whole layers together, which takes a third of the
measurements.

The search is that of ops (`set_search.py`): *alone*, a candidate has the format and everything else
is float32; *kept*, it is bfloat16 and all others have the format. It finds the set with the fewest
effective bits (`effective_bits.py`) that keeps to the tolerance, or the set with the least harm
within a budget of them.

The tolerance is that of the dtypes of 16 bits, beside what weights of the format's precision cost
by themselves: with three bits of mantissa (E4M3) a weight is moved by up to 6 %, with one bit
(E2M1) by up to 25 %. A mode rounds inputs and gradients besides, which costs 2 to 5 dB more in
models without outliers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from mprun.numerics.cast_probe import CastProbe
from mprun.numerics.effective_bits import EffectiveBits, GemmName
from mprun.numerics.passes import CastPlan
from mprun.numerics.set_search import Names
from mprun.precision.caster import AutocastCaster, NoCaster
from mprun.precision.gemms import HIGH, LinearGemms
from mprun.results.search_result import Deviation

SLACK_DB = 6.0
"""How much worse than moved weights a format may be: SQNR of a gradient. 10 dB, as for 16 bits,
would leave nothing of NVFP4's gradients."""


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


@dataclass(frozen=True)
class GemmCandidates:
    """The GEMMs of a model's linear layers, as candidates.

    Args:
        gemms: the formats of each layer that the mode converts.
        bits: counts the effective bits of a choice.
        device_type: cpu or cuda.
        per: gemm for each by itself, layer for those of a layer together.
    """

    gemms: Mapping[str, LinearGemms]
    bits: EffectiveBits
    device_type: str
    per: str = "gemm"

    @property
    def kind(self) -> str:
        """GEMM or layer."""
        return "GEMM" if self.per == "gemm" else self.per

    @cached_property
    def own(self) -> dict[str, tuple[GemmName, ...]]:
        """Name to the GEMMs that stay high together."""
        found: dict[str, tuple[GemmName, ...]] = {}
        for name in self.bits.formatted:
            key = name.layer if self.per == "layer" else str(name)
            found[key] = (*found.get(key, ()), name)
        return found

    @property
    def names(self) -> dict[str, int]:
        """Name to the number of its GEMMs."""
        return {name: len(gemms) for name, gemms in self.own.items()}

    def alone(self, name: str) -> CastPlan:
        """This one in the format, everything else in float32."""
        others = {*self.bits.formatted} - {*self.own[name]}
        return CastPlan(NoCaster(), gemms=with_high(self.gemms, others))

    def kept(self, names: Names) -> CastPlan:
        """These in bfloat16, the others in the format."""
        caster = AutocastCaster(self.device_type, torch.bfloat16)
        return CastPlan(caster, gemms=with_high(self.gemms, self.gemms_of(names)))

    def cost(self, names: Names) -> float:
        """The effective bits with these in bfloat16."""
        return self.bits.of(self.gemms_of(names))

    def gemms_of(self, names: Collection[str]) -> tuple[GemmName, ...]:
        """The GEMMs of these candidates."""
        own = self.own
        return tuple(gemm for name in names for gemm in own[name])

    def moved_weights(self, probe: CastProbe) -> Deviation:
        """Everything in float32, with weights of the format's precision."""
        weights = {f"{name}.weight" for name in self.gemms}
        steps = [of.forward.right.half_step for of in self.gemms.values() if of.forward.right]
        return probe.with_moved(weights, max(steps, default=0.0))
