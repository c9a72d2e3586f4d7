"""The record of a run: the types of its files, and reading them. No torch.

A run's folder holds

    config.yaml      the resolved configuration
    metrics.jsonl    a line per step, validation or event, appended during the run
    summary.json     one object, `Summary` below, written at the start (status "running"), replaced
                     whenever an epoch ends, and at the end
    recipe.py        a copy of the recipe's file, where the recipe is one
    fp_exceptions.json   with `debug.fp_exceptions`: each distinct exception, in full
    checkpoints/     what a run can be resumed from

Other programs read these files: names and meanings are fixed, `SCHEMA_VERSION` moves when one
changes. Accuracies are fractions from 0 to 1, dtypes have PyTorch's names. JSON has no NaN and no
infinities, so they are the strings "nan", "inf" and "-inf". What does not apply is null.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from mprun.errors import UsageError
from mprun.records.policy_columns import PolicyColumns
from mprun.records.reader import converted, read_json, read_json_lines

SCHEMA_VERSION = 1
METRICS = "metrics.jsonl"

Status = Literal["running", "completed", "interrupted", "failed"]
Number = float | Literal["nan", "inf", "-inf"]


@dataclass(kw_only=True)
class Hardware:
    """The machine."""

    device: str
    name: str
    cores: int
    memory_bytes: int | None
    accelerated: dict[str, bool]  # Whether a dtype is faster than float32 here
    page_fault_us: float | None = None
    """Microseconds of a page fault; null on a GPU and where it could not be measured."""
    host: str | None = None
    """Twelve hex digits that stand for the machine since its start, so that runs of one machine are
    recognized; null where the system has no such identity."""


@dataclass(kw_only=True)
class PrecisionRow(PolicyColumns):
    """A policy's columns, and the ops and modules with a dtype of their own.

    `gemms` is "layers" where `layers` names the formats. `reduce_dtype` is float32 where there is
    one process.
    """

    op_lists: str
    layers: dict[str, str]


@dataclass(kw_only=True)
class Substitution:
    """An op computed in another dtype than asked for."""

    op: str
    dtype: str
    reason: str


@dataclass(kw_only=True)
class BackendRow:
    """Choices that change speed, not results."""

    memory_format: str
    optimizer_impl: str
    compile: bool
    threads: int
    allocator: str = "unknown"
    """`glibc`, `glibc-steady` (it keeps its memory), jemalloc, tcmalloc, mimalloc or `system`."""
    speed_trial: str | None = None
    """The result of the trial of `speed=auto`, a sentence; None where the table chose."""
    compile_s: float | None = None
    """Seconds of compiling, before the first step and in it; None if nothing is compiled."""
    optimizer_in_backward: bool = False
    linear_impl: str = "blas"  # Or onednn: whose products large linear layers have


def backend_text(choice: Any) -> str:
    """The choices of a `BackendRow` or of a plan, for people."""
    parts = [choice.memory_format, f"{choice.optimizer_impl} optimizer"]
    parts += ["linear layers by oneDNN"] * (choice.linear_impl == "onednn")
    return ", ".join(parts + ["compiled"] * choice.compile)


@dataclass(kw_only=True)
class DataRow:
    """The samples."""

    name: str
    source: str
    train_samples: int | None  # None for a stream, as below
    validation_samples: int | None
    test_samples: int | None


@dataclass(kw_only=True)
class BatchRow:
    """Batch sizes: micro x accumulate = effective; base is what the recipe or the user set."""

    micro: int
    accumulate: int
    effective: int
    base: int
    lr_rule: str


@dataclass(kw_only=True)
class StepTimes:
    """Milliseconds per optimizer step over `n` timed steps, without `warmup` steps before them.

    A step lasts from "batch ready" to "parameters updated"; percentiles are within 0.1 %.
    """

    median: float | None
    p10: float | None
    p90: float | None
    n: int
    warmup: int


@dataclass(kw_only=True)
class DataTimes:
    """Milliseconds a step waited for its batch."""

    median: float | None
    p90: float | None


# The parts of a step's memory; they sum to its peak
MEMORY_CATEGORIES = (
    *("parameters", "buffers", "gradients"),
    *("optimizer_state", "activations", "temporary"),
)


@dataclass(kw_only=True)
class Memory:
    """Bytes alive at the peak of a training step; the six parts sum to `peak`."""

    peak: int | None
    parameters: int | None
    buffers: int | None
    gradients: int | None
    optimizer_state: int | None
    activations: int | None
    temporary: int | None
    data: int
    allocator_peak: int | None


@dataclass(kw_only=True)
class LossScaleRow:
    """The loss scale at the start and at the end of the run."""

    kind: str
    initial: float
    final: float


@dataclass(kw_only=True)
class ParallelRow:
    """The processes that trained together."""

    kind: str  # none, ddp or fsdp2
    world_size: int
    slowest_ms: float | None = None
    """Median milliseconds of a step, waits for other processes left out, of the slowest process."""
    fastest_ms: float | None = None  # The same of the fastest process
    communication_share: float | None = None
    """Share of a step that the first process spent on communication, waits included; null on a
    GPU, where it overlaps with the rest."""


@dataclass(kw_only=True)
class FpExceptionsRow:
    """Floating-point exceptions: the action on them, and their number by verdict.

    A finding made the loss, a gradient, a weight, a buffer, optimizer state or a result non-finite.
    An expected one did so in a step that dynamic loss scaling skipped. An absorbed one had no such
    effect.
    """

    action: str
    finding: int
    expected: int
    absorbed: int
    dropped_steps: int


@dataclass(kw_only=True)
class Metric:
    """What verdicts use: loss, accuracy, or one of the summary's `metrics`."""

    name: str
    higher_is_better: bool


@dataclass(kw_only=True)
class Scores:
    """Means over samples."""

    loss: Number | None
    accuracy: float | None
    samples: int | None = None
    """The samples of an epoch that a limit ended, else null; earlier versions also cut sets off."""
    metrics: dict[str, Number | None] | None = None
    """The recipe's metrics, and the means of the named parts of its loss as `loss.NAME`; null
    without any."""

    def value(self, name: str) -> Number | None:
        """A score by its name: loss, accuracy, or one of `metrics`; None if there is none."""
        if self.metrics is not None and name in self.metrics:
            return self.metrics[name]
        return {"loss": self.loss, "accuracy": self.accuracy}.get(name)

    @property
    def named(self) -> dict[str, Number]:
        """Every score that there is, by its name; loss and accuracy first."""
        names = dict.fromkeys(("loss", "accuracy", *(self.metrics or ())))
        return {name: value for name in names if (value := self.value(name)) is not None}


@dataclass(kw_only=True)
class AveragedScores:
    """Scores of the mean of the weights at places of the last tenth of the steps."""

    places: int  # How many
    validation: Scores
    test: Scores


@dataclass(kw_only=True)
class MetricRow:
    """A metric over each set; null where it is not known."""

    train: Number | None
    validation: Number | None
    test: Number | None


MOST_ENTRIES = 256  # Of a quantity that a record keeps, evenly spread


@dataclass(kw_only=True)
class QuantityRow:
    """A quantity of the recipe, of the trained model on held-out samples; errors are relative."""

    split: str  # validation, test without that, or train
    value: Number  # The mean of a number over batches, else the root mean square of the entries
    error: Number | None  # Of the mode's value against the truth; null without a truth
    arithmetic_error: Number | None  # Of the mode's value against float64's, by the same weights
    entries: list[Number]  # Of the mode's value
    samples_crc: int  # Of the samples: entries of equal samples can be compared
    note: str = ""  # Why there is no arithmetic error


@dataclass(kw_only=True)
class TrainScore:
    """Mean training loss of the last epoch."""

    loss: Number | None
    last_steps: int | None = None
    """It is of so many steps, the last ones: of a loop without epochs. None: of the epoch."""


@dataclass(kw_only=True)
class Epoch:
    """One epoch's scores."""

    epoch: int
    train: Scores
    validation: Scores


@dataclass(kw_only=True)
class TimeBudget:
    """Seconds of a run by what they were spent on; they sum to its wall time."""

    compute: float
    data: float
    evaluation: float
    metrics: float
    logging: float
    checkpoints: float
    start_up: float


@dataclass(kw_only=True)
class Conditions:
    """What else step times depend on; null where it is not known.

    Those of a resumed run are its last part's.
    """

    other_load: float | None  # Share of the usable CPUs' time that other processes took
    steal: float | None  # Share of it that the hypervisor gave to other machines
    clock_mhz: float | None
    """The fastest CPU's clock, median of a reading per second; then the first and last reading."""
    clock_start_mhz: float | None
    clock_end_mhz: float | None
    drift: float | None
    """Median step time of the last third of the timed steps over that of the first third."""


@dataclass(kw_only=True)
class Summary:
    """The content of summary.json."""

    schema_version: int
    status: Status
    error: str | None
    started_at: str
    mprun_version: str
    git_commit: str | None
    versions: dict[str, str | None]
    hardware: Hardware
    recipe: str
    seed: int
    precision: str
    variant: str
    variant_hash: str  # Of the configuration without seed, paths and loggers
    requested: PrecisionRow
    effective: PrecisionRow
    execution: str
    substitutions: list[Substitution]
    backend: BackendRow
    data: DataRow
    batch: BatchRow
    batch_size: int
    epochs: int | None
    steps: int  # Skipped ones included
    skipped_steps: int
    step_time_ms: StepTimes
    data_time_ms: DataTimes
    samples_per_second: float | None
    """Effective batch size over (median step time + median data wait)."""
    wall_time_s: float
    memory_bytes: Memory
    loss_scale: LossScaleRow
    metric: Metric
    history: list[Epoch]
    """The first, the last, the best and an even choice of the others; metrics.jsonl has all."""
    train: TrainScore
    test: Scores
    fp_exceptions: FpExceptionsRow | None = None
    page_faults_per_step: float | None = None
    """Median over the timed steps; null on a GPU and where the system does not count them."""
    conditions: Conditions | None = None
    warnings: list[str] = field(default_factory=list)
    """The warnings that the user got, for example of fields without effect."""
    time_budget_s: TimeBudget | None = None  # What `wall_time_s` consists of
    converted_gemms: list[str] | None = None
    """Linear layers whose products have the format of `gemms`; null in modes without one."""
    recipe_sha256: str | None = None  # SHA-256 of the recipe's file; null for a recipe by name
    failed_by: Literal["run", "machine"] | None = None
    """What ended a failed run: the run itself, or a full disk or too little memory."""
    metrics: dict[str, MetricRow] = field(default_factory=dict)
    """Every score by its name, loss and accuracy among them: of the last epoch, and of the test."""
    parallel: ParallelRow = field(default_factory=lambda: ParallelRow(kind="none", world_size=1))
    """How many processes trained, and how."""
    written_at: str | None = None
    """When summary.json was last written: the end of a run that has ended, resumed or not."""
    validations: int | None = None
    """How often the whole validation set was scored; null in records of earlier versions."""
    averaged: AveragedScores | None = None
    """The scores of averaged weights; null without `train.average_weights`."""
    quantities: dict[str, QuantityRow] = field(default_factory=dict)
    """The recipe's quantities at the end of a run of one process."""
    observed: bool = False
    """Whether `mprun.observe` wrote it, in a loop that cannot be resumed by mprun."""


def metric_rows(last: Epoch | None, test: Scores) -> dict[str, MetricRow]:
    """The scores of the last epoch and of the test, by their names."""
    train, validation = (last.train.named, last.validation.named) if last else ({}, {})
    tested = test.named
    return {
        name: MetricRow(
            train=train.get(name), validation=validation.get(name), test=tested.get(name)
        )
        for name in {**train, **validation, **tested}
    }


def page_fault_share(summary: Summary) -> float | None:
    """The faults of a step times the price of one, over the step; None if one is not known."""
    faults, price_us = summary.page_faults_per_step, summary.hardware.page_fault_us
    step_ms = summary.step_time_ms.median
    if faults is None or price_us is None or not step_ms:
        return None
    return max(0.0, faults * price_us * 1e-3 / step_ms)  # microseconds over milliseconds


def is_failed_by_machine(summary: Summary) -> bool:
    """Whether a full disk or too little memory ended the run, which says nothing about its mode."""
    return summary.status == "failed" and summary.failed_by == "machine"


def read_summary(run: Path) -> Summary:
    """The summary of a run's folder; raises `UsageError` if there is none, or as `read_json`."""
    path = run / "summary.json"
    try:
        return read_json(path, Summary, SCHEMA_VERSION)
    except FileNotFoundError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; is {run} a run?") from None


class LinePlace(msgspec.Struct):
    """What every line of metrics.jsonl has, whatever its kind."""

    kind: str
    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # Whole numbers are exact in float64 so far


def read_lines(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without one cut short by a crash; `UsageError` without a file."""
    return list(_lines(run))


def _lines(run: Path) -> Iterator[dict[str, Any]]:
    path = run / METRICS
    try:
        yield from read_json_lines(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def placed_lines(run: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl, read one by one; `UsageError` for one without kind or step."""
    for number, line in enumerate(_lines(run), start=1):
        converted(run / METRICS, line, LinePlace, f"line {number}: ")
        yield line


# ---- a step: parts of the records of `mprun memory` and `mprun numerics` -------------------------


@dataclass(frozen=True)
class MemoryPeak:
    """Where the most memory is alive."""

    point: int  # The op's index in the timeline
    op: str
    phase: str
    module: str


@dataclass(frozen=True)
class ModuleMemory:
    """The memory of a module at the peak."""

    module: str
    kind: str  # The module's class; empty for `(inputs)`, `(loss)` and `(optimizer)`
    total: int
    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    activations: int
    temporary: int


@dataclass(frozen=True)
class StorageMemory:
    """One of the largest storages at the peak."""

    bytes: int
    category: str
    module: str
    shape: list[int]
    dtype: str


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes alive after each op; all lists have the same length."""

    op: list[str]
    phase: list[str]
    module: list[str]
    parameters: list[int]
    buffers: list[int]
    gradients: list[int]
    optimizer_state: list[int]
    activations: list[int]
    temporary: list[int]


@dataclass(frozen=True)
class Float32Gradients:
    """All gradients of float32, beside float64's of the same model."""

    db: float  # The SQNR of all together
    worst: str  # The parameter with the most of the error


@dataclass(frozen=True)
class LostShares:
    """The shares of updates that weights in 16 bits would lose, by format and rounding rule."""

    updated: int  # Updates that are not zero
    lost_in_run: float | None  # The share that the run lost
    fp16: dict[str, float | None]
    bf16: dict[str, float | None]


@dataclass(frozen=True)
class Reference:
    """The reference that shows which float32 gradients are only rounding errors."""

    name: str  # float64, or float32 with moved weights
    reason: str = ""  # Why it is not float64


# ---- checkpoints ---------------------------------------------------------------------------------

# The plain values that a run needs before it is assembled again. A checkpoint is read with
# `weights_only=True`, so it runs no code; but any value in it can have any type. What the run's
# parts make of the rest is theirs: `train/checkpoint.py` names the misfit.
_Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class SavedChoices:
    """The automatic choices of the run's machine, which a resumed run repeats."""

    device: str | None = None
    execution: Literal["native", "emulated"] | None = None
    memory_format: Literal["contiguous", "channels_last"]
    optimizer_impl: Literal[
        "forloop", "foreach", "fused", "c", "triton", "inductor", "eager", "masters", "own"
    ]
    linear_impl: Literal["blas", "onednn"] = "blas"
    fp32_fallback: Literal["none", "backward", "all"] | None = None
    effective_batch: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Samples of a step over all processes."""


@dataclass(frozen=True, kw_only=True)
class SavedSums:
    """Sums over the samples of the epoch so far."""

    epoch: _Count
    loss: float
    correct: _Count | None
    samples: _Count
    weight: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SavedMetrics:
    """The recipe's metrics over the epoch so far."""

    updates: _Count
    states: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SavedPosition:
    """Where the loop was."""

    step: _Count
    epoch: _Count
    in_epoch: bool
    sums: SavedSums
    metrics: SavedMetrics | None = None


@dataclass(frozen=True, kw_only=True)
class SavedJournal:
    """What the record of the run had."""

    steps: _Count


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What of a checkpoint decides how the run is assembled."""

    format_version: int
    choices: SavedChoices
    trainer: SavedPosition
    journal: SavedJournal
