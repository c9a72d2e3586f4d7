"""`search_ops.json` of a mode whose products have formats of 8 bits or fewer. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from mprun.records.deviation import Deviation, SearchTolerance
from mprun.records.search_ops_record import Proof, Samples, SearchStep


@dataclass(kw_only=True)
class FormatRow:
    """The effect of the format of a GEMM, or of all GEMMs of a layer."""

    name: str
    """As in `FormatSearch.high`: `fc1.grad_weight`, or `fc1` for a layer."""
    layer: str
    products: list[str]
    """Of forward, grad_input and grad_weight."""
    alone: Deviation
    """It has the format, everything else is float32."""
    harm_alone: float
    """The share of the tolerance that this uses up; 1 is all."""
    kept: Deviation
    """It is bfloat16, the others have the format."""
    operations: float
    """Its share of the operations of all GEMMs that the mode converts."""


@dataclass(kw_only=True)
class BitsOfChoices:
    """Effective bits: the mean bits of a factor over the multiply-adds of all linear layers."""

    budget: float | None
    """The most that were asked for; null without a budget."""
    everything: float
    """Every GEMM that the mode converts has the format."""
    answer: float | None
    """With `FormatSearch.high` in bfloat16; null if the search ended before."""
    bfloat16: float
    """None has the format."""


@dataclass(kw_only=True)
class FormatSearch:
    """Which GEMMs of linear layers must stay in bfloat16."""

    format: str
    """The mode."""
    per: str
    """What stays high together: gemm, or layer for the GEMMs of a layer."""
    measured_on: Samples
    tolerance: SearchTolerance
    unavoidable: Deviation
    """Everything in float32, with the converted weights moved by the format's precision."""
    everything: Deviation
    """Every GEMM that the mode converts has the format."""
    bfloat16: Deviation
    """None has: the mode's casts alone."""
    candidates: list[FormatRow]
    high: list[str] | None
    """Names of the candidates to keep in bfloat16; null if the search ended before."""
    layers: dict[str, str] | None
    """The same as `precision.layers` takes it."""
    harm: float | None
    """With them."""
    is_within: bool | None
    """Whether that is tolerated."""
    measure: Deviation | None
    operations: float | None
    """The share of operations that keep the format."""
    effective_bits: BitsOfChoices
    steps: list[SearchStep]
    """The sets that were tried, in turn."""
    ended_by: str | None
    """What ended the search early; null for nothing."""
    proof: Proof | None = None
    """The paired trainings; null where there is none."""

    @property
    def keeps_a_format(self) -> bool:
        """Whether there is an answer, and it leaves a GEMM in the format."""
        return self.high is not None and len(self.high) < len(self.candidates)
