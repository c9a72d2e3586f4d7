"""Measurements of `mprun numerics` in some steps: the content of `numerics.json`.

`docs/reference/numerics.md` explains the fields. The file also has the run's configuration and
`steps`, `skipped` and `ended`. Shares are of the non-zero values; None if there are none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mprun.records.deviation import Deviation, Reference, SearchTolerance


@dataclass(frozen=True)
class FormatResult:
    """The passes in one 16-bit format."""

    will_do: bool
    """Whether loss and gradients are within the tolerance."""
    measure: Deviation
    unavoidable: Deviation
    """The same with nothing but weights of the format's precision."""
    tolerance: SearchTolerance


@dataclass(frozen=True)
class Float32Loss:
    """A loss in float32 that is not float64's, of the same ops."""

    loss: float
    float64: float
    op: str
    """The op that loses it; empty if it is not known."""
    module: str
    """Its module; empty for the model itself and outside of it."""


@dataclass(frozen=True)
class Float32Gradients:
    """All gradients of float32, beside float64's of the same model."""

    db: float
    """The SQNR of all together."""
    worst: str
    """The parameter with the most of the error."""


@dataclass(frozen=True)
class ModelVerdict:
    """Range or precision: which 16-bit format the model needs."""

    word: str
    reason: str
    made_by: list[str]
    """The losses and rows that decided."""
    gradients_db: dict[str, float]
    """fp16 and bf16 to the SQNR of all judged gradients, in dB."""
    passes: dict[str, FormatResult]
    parameters_db: dict[str, dict[str, float]]
    """Parameter to format to the SQNR of its gradient, in dB."""
    rows_of_another_verdict: list[str]
    undetermined: list[str]
    """Parameters whose float32 gradients are only rounding errors."""
    zero_gradients: list[str]
    reference: Reference
    float32: Float32Loss | None = None
    """Of a step in which float32 itself was not good enough; None without one."""
    float32_gradients: Float32Gradients | None = None
    """Where float32's gradients are not good enough, over all steps; None where they are."""


@dataclass(frozen=True)
class ScaleVerdict:
    """Whether a loss scale fits float16."""

    label: str
    """none, published, in use or recommended; empty for another."""
    scale: float
    word: str
    """too low, too high or fine."""
    reason: str
    becoming_zero: float | None
    """Share of non-zero gradients that become 0 at it."""
    losing_bits: float | None
    """Share of non-zero gradients that become subnormal or 0."""


@dataclass(frozen=True)
class LossScaleResult:
    """The run's loss scale, and the recommended one."""

    kind: str
    """none, static or dynamic."""
    in_use: float | None
    """At the last inspected step; None without a loss scale."""
    lowest_in_use: float | None
    highest_in_use: float | None
    recommended: float | None
    """None if every gradient is zero, or one is not finite."""
    reason: str
    needed: bool | None
    need: str
    """Why one is needed or not."""
    largest_gradient: float
    where: str
    headroom: float
    verdicts: list[ScaleVerdict]
    tried_db: dict[str, float]
    """Loss scale, as text, to the SQNR of the gradients, in dB."""
    best_tried: float | None


@dataclass(frozen=True)
class LostShares:
    """The shares of updates that weights in 16 bits would lose, by format and rounding rule."""

    updated: int
    """Updates that are not zero."""
    really: float | None
    """The share that the run lost."""
    fp16: dict[str, float | None]
    bf16: dict[str, float | None]


@dataclass(frozen=True)
class LostUpdatesResult:
    """Lost updates of all weights and of each parameter."""

    all: LostShares
    by_parameter: dict[str, LostShares]


@dataclass(frozen=True)
class ExponentCounts:
    """A histogram of exponents."""

    exponents: dict[str, int]
    """e, as text, to the number of values with 2^e <= |x| < 2^(e+1)."""
    powers: dict[str, int]
    """e to the number of those with |x| = 2^e."""
    zero: int
    infinite: int
    nan: int
    largest: float


@dataclass(frozen=True)
class RangeShares:
    """The shares of values that a format holds with fewer bits, or not at all."""

    below_normal: float | None
    below_smallest: float | None
    becoming_zero: float | None
    above_largest: float | None


@dataclass(frozen=True)
class HeldValues:
    """The numbers in the run itself, before any simulated format."""

    dtypes: list[str]
    became_zero: float | None
    infinite: int
    nan: int


class LossScaledRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Gradients in float16 times a loss scale; the file leaves out `fp16` where it is None."""

    recommended: float
    fp16_db: float
    """The SQNR at the recommended scale, in dB."""
    in_use: float | None
    fp16: RangeShares | None = None
    """At the scale in use; None without one."""


@dataclass(frozen=True)
class NumericsRow:
    """One tensor of the model: a weight, an activation, a gradient or an update."""

    kind: str
    name: str
    histogram: ExponentCounts
    fp16: RangeShares
    bf16: RangeShares
    sqnr_db: dict[str, float]
    """Format to the SQNR of rounding to it, in dB; names with per-tensor scaling end in
    `_scaled`."""
    verdict: str | None
    """Range or precision; None for updates and for rows that are only rounding errors."""
    held: HeldValues | None
    loss_scaled: LossScaledRow | None


@dataclass(frozen=True)
class NumericsResult:
    """Everything that was measured."""

    verdict: ModelVerdict
    loss_scale: LossScaleResult
    lost_updates: LostUpdatesResult
    rows: list[NumericsRow] = field(default_factory=list)
