"""The measurements and the result of `mprun search-ops`: the content of `search_ops.json`.

Besides those of `OpSearch`, the file has the
run's configuration and `proof`, a `Proof` or null. A mode whose products have formats of 8 bits or
fewer leaves a `FormatSearch`. `Deviation`, the distance from float32, is part of `numerics.json`
too; its floats may be infinite or NaN. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Deviation:
    """The distance from float32 of a loss and of gradients."""

    loss_difference: float
    """Relative difference of the loss; infinite or NaN if a loss is."""
    gradients_db: float
    """SQNR of all judged gradients as one vector, in dB; NaN if a gradient is not finite."""
    worst_db: float
    """The lowest SQNR of a parameter's gradient, in dB; NaN as above."""
    worst_parameter: str
    """The parameter with that SQNR; empty if a loss is not finite."""
    loss_scale: float
    """The smallest loss scale that was used on any batch."""
    failure: str = ""
    """Why nothing could be measured: an op has no kernel for its dtypes."""
    loss_beyond: float | None = None
    """The loss difference minus the difference between batches; None if that is unknown."""
    beyond_db: float | None = None
    """The lowest SQNR of a parameter if only the error counts that is larger than the difference
    between batches (`numerics/tolerance.py`); None if that difference is unknown."""
    beyond_parameter: str = ""
    """The parameter with that SQNR."""

    @property
    def judged_loss(self) -> float:
        """The loss difference that is compared with the tolerance."""
        return self.loss_difference if self.loss_beyond is None else self.loss_beyond

    @property
    def judged_db(self) -> float:
        """The SQNR that is compared with the tolerance."""
        return self.worst_db if self.beyond_db is None else self.beyond_db


@dataclass(frozen=True)
class Reference:
    """The reference that shows which float32 gradients are only rounding errors."""

    name: str
    """float64, or float32 with moved weights."""
    reason: str = ""
    """Why it is not float64."""


@dataclass(frozen=True)
class SearchTolerance:
    """The distance from float32 that was allowed."""

    loss: float
    """Relative difference of the loss."""
    gradient_db: float | None
    """Lowest SQNR of a parameter's gradient, in dB; None if only the loss was judged."""


@dataclass(frozen=True)
class Samples:
    """The data of the measurements."""

    split: str
    """validation, or train for a recipe without validation data."""
    batches: int
    batch_size: int


@dataclass(frozen=True)
class CastResult:
    """A cast of the model's ops, measured."""

    measure: Deviation
    time_ratio: float | None = None
    """Time of a forward and backward pass over that with every op lower; None if not timed."""


@dataclass(frozen=True)
class RoundedWeights:
    """Everything in float32, with weights of the lower dtype's precision."""

    measure: Deviation


@dataclass(frozen=True)
class Float32Time:
    """Everything in float32."""

    time_ratio: float | None


@dataclass(frozen=True)
class GivenCasts:
    """The casts of the configuration that the search started from."""

    name: str
    """autocast, or the name of the op lists."""
    measure: Deviation
    time_ratio: float | None


@dataclass(frozen=True)
class SensitivityRow:
    """The effect of one op or module."""

    name: str
    calls: int
    """In a forward pass."""
    harm_alone: float
    """The share of the tolerance that `alone` uses up; above 1 is too much."""
    alone: Deviation
    """Only this is lower, everything else is float32."""
    kept: Deviation
    """Only this is float32, everything else is lower."""
    time_ratio: float | None
    """Time of `kept` over that with everything lower."""


@dataclass(frozen=True)
class SearchStep:
    """One decision of the search."""

    action: str
    """add; drop (removed again), need (could not be removed); swap (replaced another name)."""
    name: str
    harm: float
    """Measured after the decision; for `need` with the name removed."""


@dataclass(frozen=True)
class Fp32Selection:
    """The smallest list of ops or modules to keep in float32."""

    fp32: list[str]
    """The names; the most harmful first."""
    is_within: bool
    """Whether the result is within the tolerance; if not, no list is."""
    harm: float
    measure: Deviation
    float32_share: float
    """Share of the numbers computed in the forward pass that are float32."""
    time_ratio: float | None
    steps: list[SearchStep]


@dataclass(frozen=True)
class Selections:
    """The lists by what they name."""

    ops: Fp32Selection
    modules: Fp32Selection | None
    """None if no op has to be in float32, or modules were not measured."""


@dataclass(frozen=True)
class OpSearch:
    """Everything that a search measured and decided."""

    dtype: str
    """The lower one: float16 or bfloat16."""
    measured_on: Samples
    tolerance: SearchTolerance
    unjudged_parameters: list[str]
    """Parameters whose float32 gradients are only rounding errors."""
    zero_gradients: list[str]
    """Parameters whose float32 gradients are exactly zero."""
    reference: Reference
    unavoidable: RoundedWeights
    everything_lower: CastResult
    float32: Float32Time
    given: GivenCasts
    ops: list[SensitivityRow]
    modules: list[SensitivityRow]
    search: Selections | None
    """None if the search ended before the smallest list of ops."""
    always: list[str]
    """Ops that the user keeps in float32."""
    lower: list[str]
    """Ops on the lower list when every op is lower."""
    answer: str
    """ops or modules: which selection to use; none without one."""
    ended_by: str | None = None
    """What ended the search early: a signal, or search_ops.budget_min."""
    unsettled: list[str] = field(default_factory=list)
    """What it leaves open, a sentence each."""


@dataclass(frozen=True)
class Proof:
    """Pairs of trainings, one with the answer and one in float32, a pair for each seed."""

    steps: int
    split: str
    """Which samples the metric is of: validation, or train without validation data."""
    metric: str
    is_relative: bool
    """Whether differences are shares of float32's mean (losses) or plain (accuracies)."""
    margin: float
    """Differences inside plus and minus this do not matter."""
    values: list[float]
    """The metric by seed; NaN if the training failed."""
    float32_values: list[float]
    skipped_steps: list[int]
    failures: list[str | None]
    difference: float
    """The mean of `values` minus that of `float32_values`; NaN if a training failed."""
    interval: tuple[float, float] | None
    """The 95 % interval of `difference`."""
    equivalence_interval: tuple[float, float] | None
    """The 90 % interval."""
    verdict: str
    reason: str
    more_seeds: int | None
    """About how many further seeds would settle an inconclusive verdict."""
    step_time_ratio: float | None
    """Step time over float32's, the median over seeds; None if not timed."""


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
