"""The result of a comparison as plain values: made by `verdicts.py`, shown by `report/`.

A run is one training. A variant is a group of runs that differ only in the seed; it is one row of
the table. Its figures are compared with the baseline's in pairs of equal seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from mprun.records.console.formatting import counted
from mprun.records.run_record import Summary

Outcome = Literal["baseline", "equivalent", "better", "worse", "inconclusive"]

KEEPS = ("equivalent", "better")  # Outcomes in which a variant keeps the metric


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A mean over `n` seeds with its 95 % interval; None if `n` is too small for one."""

    value: float
    interval: Interval | None
    n: int


class StepPercentiles(NamedTuple):
    """Step times in ms: the medians over runs of their median, 10th and 90th percentile."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Verdict:
    """The judgement on a variant."""

    word: Outcome
    reason: str  # A sentence, without the word: what decided
    more_seeds: int | None = None
    """About how many further seeds would settle an inconclusive verdict; None if none would."""
    interval: Interval | None = None
    """The interval of the difference that decided; None if no test did. An equivalent variant's
    lies inside the margin, a worse or better one's excludes 0, an inconclusive one's does neither.
    """
    level: float | None = None
    """The confidence level of `interval`, from 0 to 1, with Holm's adjustment."""
    closed: Literal["", "settled", "hopeless"] = ""
    """Why a study with looks gives the variant no more runs; empty while it does, or without looks.
    """

    def __str__(self) -> str:
        if self.word == "inconclusive" and self.more_seeds:
            return f"inconclusive: about {counted(self.more_seeds, 'more seed')}"
        return self.word


@dataclass(frozen=True)
class Run:
    """A completed or failed run."""

    path: Path
    summary: Summary


@dataclass(frozen=True)
class Skipped:
    """A folder that the comparison leaves out."""

    path: Path
    reason: str


class Artefact(NamedTuple):
    """What explains a difference in step time, and is not the arithmetic."""

    cause: str  # page_faults, allocator, load or drift
    text: str  # `page faults take 41 % of fp32's step and 3 % of bf16_mixed's; ...`
    remedy: str  # What to do about it
    step_time_ratio: float | None
    """The ratio of the step times without it; None if it cannot be worked out."""


class LookVerdict(NamedTuple):
    """What a look of a study showed of a variant."""

    pairs: int  # After so many seeds
    difference: float | None  # The mean of the pairs
    interval: Interval | None  # At `level`: see `Verdict`
    level: float | None
    word: Outcome


QualityWord = Literal["faster", "nothing", "open"]


@dataclass(frozen=True)
class EqualQuality:
    """What a variant and the baseline need to reach one validation loss, in pairs of equal seed."""

    samples: float | None  # Training samples that the variant needed; the median over pairs
    baseline_samples: float | None
    samples_ratio: Estimate | None  # Samples over the baseline's: geometric mean over pairs
    seconds: float | None
    """These samples over the run's samples per second: training alone, without evaluation."""
    baseline_seconds: float | None
    time_ratio: Estimate | None
    """Seconds over the baseline's; no interval where times have no verdict."""
    missed: int
    """Pairs in which the variant's best loss lies beyond the tolerance above the baseline's best;
    their ratio is that of the level which the variant did reach."""
    tolerance: float  # The share of the loss that does not matter
    no_figure: str = ""  # Why pairs have no ratio, and what they need; empty if all have one


@dataclass(frozen=True)
class Variant:
    """A row of the table."""

    label: str
    """Unique in its comparison: `bf16_mixed+hmp x2`, with the fields that differ where two would
    have the same label."""
    variant_hash: str
    precision: str
    execution: str  # native or emulated; times and memory of emulated runs have no ratio
    runs: tuple[Run, ...]  # Completed runs, by seed
    failed: tuple[Run, ...]
    step_time_ms: StepPercentiles | None
    step_time_ratio: Estimate | None  # Step time over the baseline's: geometric mean over pairs
    samples_per_second: float | None  # Median over runs
    throughput_ratio: Estimate | None
    """Samples per second over the baseline's: geometric mean over pairs."""
    no_time_verdict: str
    """Why both ratios have no interval; empty if they have one, or if there is only one pair."""
    memory_bytes: dict[str, int | None]
    """The record's categories, `peak` among them; the largest over runs."""
    memory_ratio: float | None  # Peak over the baseline's
    metric: Estimate | None  # The metric's mean over runs
    difference: Estimate | None
    """The metric's mean paired difference, the variant minus the baseline; a share of the
    baseline's mean if `Comparison.is_relative`."""
    equivalence: Interval | None
    """The 90 % interval of `difference`, not adjusted; `verdict.interval` is the one that decided.
    """
    verdict: Verdict
    substituted: str = ""
    """The ops that native runs computed in float32 instead of float16: `matmuls in fp32`.

    Times are this machine's and have ratios, but no gain is claimed from them.
    """
    artefacts: tuple[Artefact, ...] = ()
    """What leaves both ratios without a verdict, besides the order of the runs."""
    untimed: str = ""
    """Why times of some pairs are not used: `2 of 10 pairs: ...`; empty if all are."""
    equal_quality: EqualQuality | None = None
    """Time and samples to the baseline's validation loss; None for the baseline, and for runs that
    were not validated."""
    looks: tuple[LookVerdict, ...] = ()  # Of a study that plans them, up to the one that closed it

    @property
    def has_own_times(self) -> bool:
        """Whether its times are those of its own arithmetic, so that a gain may be claimed."""
        return self.execution == "native" and not self.substituted


@dataclass(frozen=True)
class QuantityVerdict:
    """A quantity of the recipe in one variant."""

    quantity: str
    variant: str  # Its label
    precision: str
    is_error: bool  # Whether `figure` is the relative error against the truth, else it is the value
    figure: Estimate | None  # The mean over seeds
    added: float | None
    """What the arithmetic adds, as a share of the spread over the baseline's seeds, which training
    leaves open; None where one of them is not known."""
    seeds: int
    margin: float  # A share of the baseline's figure
    difference: Estimate | None = None  # From the baseline, as a share of its figure
    word: str = "baseline"  # An outcome; `differs` for a value, of which less is no better
    reason: str = ""


@dataclass(frozen=True)
class Advice:
    """The mode that a study advises, and why not the others.

    The terminal, the page and the files for programs all show `lines`, so they cannot disagree.
    """

    label: str  # The variant to take
    reason: str
    rejected: dict[str, str]
    """Every other mode that was tried, screened out early or compared to the end, to the reason."""
    not_tried: dict[str, str]  # Modes without any run, to the reason
    notes: tuple[str, ...]  # Modes that may deserve a further test

    @property
    def sentence(self) -> str:
        """`take bf16_mixed: 0.36 [0.33, 0.39] of the baseline's step time, ...`."""
        return f"take {self.label}: {self.reason}"

    @property
    def lines(self) -> list[str]:
        """The advice in full: the sentence, a line for each other mode, the notes."""
        return [
            self.sentence,
            *(f"not {label}: {reason}" for label, reason in self.rejected.items()),
            *(f"not tried: {label}: {reason}" for label, reason in self.not_tried.items()),
            *(f"note: {note}" for note in self.notes),
        ]


@dataclass(frozen=True)
class Comparison:
    """A whole table, and what its rows have in common."""

    recipe: str
    metric: str  # accuracy, loss, or the name of another one
    split: str  # Which samples the metric is of: test, validation or train
    higher_is_better: bool
    margin: float  # Differences inside plus and minus this do not matter; a share if `is_relative`
    is_relative: bool
    """Whether differences are shares of the baseline's mean (losses), or points (accuracies and
    other fractions of which more is better)."""
    baseline: str  # Its label
    variants: tuple[Variant, ...]  # The baseline first
    skipped: tuple[Skipped, ...]
    data: str  # Name and source: `mnist (local)`
    hardware: str
    code: str  # Versions and commit, as text
    warnings: tuple[str, ...] = field(default=())  # Artefacts that explain a difference in time
    notes: tuple[str, ...] = field(default=())
    """Caveats: mixed hardware, one seed only, Holm over how many variants."""
    weights: Literal["last", "averaged"] = "last"
    """Which weights of the runs the metric is of."""
    places: int | None = None
    """The fewest places of the last tenth of a run whose weights were averaged; None for last."""
    not_run: dict[str, list[int]] = field(default_factory=dict)
    """Variants of a study to the seeds that its budget left out."""
    advice: Advice | None = None  # The result of `mprun advise`; None for any other comparison
    quantities: tuple[QuantityVerdict, ...] = ()  # By quantity, the baseline first
    planned_pairs: tuple[int, ...] = ()  # The looks of the study; empty without a plan of looks
