"""`search_ops.json` of a mode whose products have formats of 8 bits or fewer. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from mprun.records.deviation import Deviation, SearchTolerance
from mprun.records.search_ops_record import Proof, Samples, SearchStep


@dataclass(kw_only=True)
class FormatRow:
    """The effect of a layer's format."""

    name: str
    alone: Deviation
    """It has the format, everything else is float32."""
    harm_alone: float
    """The share of the tolerance that this uses up; 1 is all."""
    kept: Deviation
    """It is bfloat16, the others have the format."""
    operations: float
    """Its share of the operations of all layers that the mode converts."""


@dataclass(kw_only=True)
class FormatSearch:
    """Which linear layers must stay in bfloat16."""

    format: str
    """The mode."""
    measured_on: Samples
    tolerance: SearchTolerance
    unavoidable: Deviation
    """Everything in float32, with the converted weights moved by the format's precision."""
    everything: Deviation
    """Every layer that the mode converts has the format."""
    bfloat16: Deviation
    """None has: the mode's casts alone."""
    layers: list[FormatRow]
    high: list[str] | None
    """The fewest layers to keep in bfloat16 that were found; null if the search ended before."""
    harm: float | None
    """With them."""
    is_within: bool | None
    """Whether that is tolerated."""
    measure: Deviation | None
    operations: float | None
    """The share of operations that keep the format."""
    steps: list[SearchStep]
    """The decisions."""
    ended_by: str | None
    """What ended the search early; null for nothing."""
    proof: Proof | None = None
    """The paired trainings; null where there is none."""
