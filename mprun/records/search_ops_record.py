"""The measurements and the result of `mprun search-ops`: the content of `search_ops.json`.

`docs/reference/search-ops.md` explains the fields. Besides those of `OpSearch`, the file has the
run's configuration and `proof`, a `Proof` or null.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mprun.records.deviation import Deviation, Reference, SearchTolerance


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
