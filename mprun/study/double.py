"""Is a doubled batch worth it? A decision from a comparison of the base batch with twice its size.

Half-size tensors leave room for twice the batch. More samples per step use wide hardware better.
But an epoch then has half the steps, which may cost accuracy unless the learning rate grows. So
three learning rates are compared (times 1, the square root of 2, and 2), after equal epochs.

`largest_size` searches the largest batch whose peak memory fits, over a function that grows with
the batch. `mprun memory` counts the peak of a step on fake tensors, and its search follows the line
through two sizes. `mprun double` runs real steps, and a step that runs out of memory has no peak:
its search doubles and halves.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from mprun.config import Composed, compose
from mprun.config.settings import StudyRequest
from mprun.errors import UsageError
from mprun.precision import devices
from mprun.records.console import ReportPart, report_nothing
from mprun.records.result import Result
from mprun.study.advise import ratio_figure
from mprun.study.compare.comparison import Comparison, Variant
from mprun.study.study import Study, held_out, new_study
from mprun.study.trials import run_steps
from mprun.train.assemble import DataCache, Plan, make_plan

Answer = Literal["double it", "don't", "inconclusive"]

# The learning rate is multiplied by 1, by 2 (Goyal et al. 2017), or by the square root of 2
# (Krizhevsky 2014: the variance of an update stays equal)
RULES = ("none", "linear", "sqrt")


def new_double_study(request: StudyRequest) -> Study:
    """The base batch, and twice its size with each learning-rate rule.

    Raises:
        UsageError: anything wrong with the overrides or the folder, or too few samples.
    """
    overrides, config_dir, load = request.overrides, request.config_dir, DataCache()
    for text in overrides:
        if text.lstrip("+").startswith("batch"):
            raise UsageError(
                f"'{text}': mprun double sets the batch itself; train.batch_size is its base"
            )
    composed = compose([*overrides, "batch=double"], config_dir)
    _check_length(composed)
    planned = make_plan(composed.config, composed.given, load=load)
    # `samples` is None for a stream, which has any number
    samples, doubled = planned.splits.train.samples, planned.batch.effective
    if samples is not None and doubled > samples:
        raise UsageError(
            f"the training set has {samples} samples, less than a batch of {doubled}; legal: "
            f"train.batch_size up to {samples // 2}"
        )
    listed = {"base": [*overrides, "batch=base"]} | {
        f"double-{rule}": [*overrides, "batch=double", f"batch.lr_rule={rule}"] for rule in RULES
    }
    of_trials = held_out(composed, load)
    return new_study(request, listed, of_trials=of_trials, load=load)


def _check_length(composed: Composed) -> None:
    train = composed.config.train
    limits = {"train.max_steps": train.max_steps, "train.max_time_s": train.max_time_s}
    wrong = [f"{key}={value}" for key, value in limits.items() if value is not None]
    if train.epochs is None:
        wrong.append("train.epochs=null")
    if wrong:
        raise UsageError(
            f"{wrong[0]}: mprun double compares after equal epochs; legal: train.epochs=N with "
            "train.max_steps=null and train.max_time_s=null"
        )


@dataclass(frozen=True)
class Doubling:
    """The answer, and why."""

    answer: Answer
    reason: str
    label: str | None  # The variant to take if the answer is to double


def double(comparison: Comparison) -> Doubling:
    """The decision between the base batch (the baseline) and the doubled ones."""
    doubled = comparison.variants[1:]
    good = [v for v in doubled if v.verdict.word in ("equivalent", "better")]
    faster = [v for v in good if _throughput(v, "low") > 1]
    if faster:
        best = _best(faster, comparison.higher_is_better)
        return Doubling(
            "double it",
            f"{best.label}: {ratio_figure(best.throughput_ratio)} of the base batch's samples per "
            f"second, {comparison.metric} {best.verdict.word}",
            best.label,
        )
    if not doubled:
        return Doubling("inconclusive", "no run with the doubled batch was completed", None)
    against = []
    if all(_throughput(v, "high") <= 1 for v in doubled):
        figures = ratio_figure(max(doubled, key=lambda v: _throughput(v, "high")).throughput_ratio)
        against.append(f"it is no faster: {figures} of the base batch's samples per second")
    if all(v.verdict.word == "worse" for v in doubled):
        against.append(f"{comparison.metric} is worse with every learning-rate rule")
    if against:
        return Doubling("don't", "; ".join(against), None)
    if any(v.execution == "emulated" for v in comparison.variants):
        return Doubling(
            "inconclusive", "the runs are emulated: their times do not describe this hardware", None
        )
    if all(v.throughput_ratio is None for v in doubled):
        return Doubling("inconclusive", "no step was timed, the runs are too short", None)
    figures_of = (
        f"{v.label}: {ratio_figure(v.throughput_ratio)} of the samples per second, "
        f"metric {v.verdict}"
        for v in doubled
    )
    return Doubling("inconclusive", "; ".join(figures_of), None)


def _throughput(variant: Variant, end: Literal["low", "high"]) -> float:
    """An end of the throughput ratio's interval; without one, 1 for low, infinity for high."""
    ratio = variant.throughput_ratio
    if ratio is None or ratio.interval is None:
        return 1.0 if end == "low" else float("inf")
    return ratio.interval.low if end == "low" else ratio.interval.high


def _best(variants: Sequence[Variant], higher_is_better: bool) -> Variant:
    def score(variant: Variant) -> float:
        assert variant.metric is not None
        return variant.metric.value if higher_is_better else -variant.metric.value

    return max(variants, key=score)


TRY_STEPS = 3  # Optimizer state exists from the second step on: two steps with all of it
# The recommended batch is checked longer: allocators cache blocks, libraries need workspace, and
# later steps may need more than the first
PROOF_STEPS = 20
# Real steps: the search ends when the interval is this many times smaller than the batch. A finer
# result is useless, as a margin of 10 % is taken off.
RESOLUTION = 64

# Whether a batch of the first trains for the second number of steps
Fits = Callable[[int, int], bool]


@dataclass(frozen=True)
class LargestSize:
    """The end of a search."""

    size: int  # The largest that fits; 0 if not even 1 does
    tried: Mapping[int, int | None]  # Size to peak in bytes; None if memory ran out

    @property
    def grows(self) -> bool:
        """Whether no larger size that was tried took less than a smaller one."""
        peaks = [peak for _, peak in sorted(self.tried.items()) if peak is not None]
        return peaks == sorted(peaks)


def largest_size(
    peak: Callable[[int], int | None],
    limit: int | None,
    start: int,
    most: int,
    known_to_fit: int = 0,
    resolution: int | None = None,
) -> LargestSize:
    """The largest size whose peak fits.

    Args:
        peak: size (1 or more) to peak in bytes, or None if memory runs out; it is assumed to grow
            with the size, see `LargestSize.grows`.
        limit: bytes that a peak may take; None: each size with a peak fits.
        start: the size to try first.
        most: the largest size to try.
        known_to_fit: a size that fits.
        resolution: the result may be too small by one part in this number; None: it is exact.
    """
    tried: dict[int, int | None] = {}
    low, high = known_to_fit, most + 1  # low fits, high does not
    guess, halve = min(start, most), False
    while high - low > 1 and (
        high not in tried or resolution is None or high - low > max(1, low // resolution)
    ):
        gap, size = high - low, peak(guess)
        tried[guess] = size
        fits = size is not None and (limit is None or size <= limit)
        low, high = (guess, high) if fits else (low, guess)
        # The line bends where another moment of the step becomes the peak: a guess that leaves more
        # than half of the interval is followed by a halving, so the search stays logarithmic
        halve = not halve and high in tried and low in tried and 2 * (high - low) > gap
        middle = (low + high) // 2 if high in tried else 2 * low
        # Peaks are almost linear in the batch: parameters and state, plus bytes for each sample
        line = None if halve or limit is None else _on_line(tried, limit, low, high)
        guess = min(max(middle if line is None else line, low + 1), high - 1)
    return LargestSize(low, tried)


def _on_line(tried: Mapping[int, int | None], limit: int, low: int, high: int) -> int | None:
    """The size at which the line through two tried sizes reaches `limit`, or None."""
    peaks = {size: peak for size, peak in sorted(tried.items()) if peak is not None}
    sizes = list(peaks)
    if low in peaks and high in peaks:
        a, b = low, high
    elif len(sizes) > 1:  # all fit, or none: extend the line from the two nearest
        a, b = sizes[-2:] if low in peaks else sizes[:2]
    else:
        return None
    rise = peaks[b] - peaks[a]
    return a + (limit - peaks[a]) * (b - a) // rise if rise > 0 else None


@dataclass(frozen=True)
class TrainableBatch:
    """The result of a search with real steps."""

    size: int  # The largest batch that trained for `TRY_STEPS` steps
    recommended: int  # The largest less the margin; it trained for `PROOF_STEPS` steps
    is_limited_by_data: bool  # Whether the whole training set fits


def largest_that_trains(fits: Fits, start: int, most: int, margin: float) -> TrainableBatch:
    """The largest batch that trains.

    Args:
        fits: runs steps.
        start: the first batch to try.
        most: the size of the training set.
        margin: share taken off the largest batch, 0 to 1.

    Raises:
        UsageError: not even `start` fits, or it fails in `PROOF_STEPS` steps.
    """
    start = min(start, most)
    if not fits(start, TRY_STEPS):
        raise UsageError(f"train.batch_size={start} does not fit; start from a smaller one")

    def peak(size: int) -> int | None:
        return 0 if fits(size, TRY_STEPS) else None  # any number: there is no limit to compare with

    size = largest_size(peak, None, 2 * start, most, start, RESOLUTION).size
    # Without a margin where the whole training set fits: no larger batch exists
    batch = size if size == most else max(start, int(size * (1 - margin)))
    while not fits(batch, PROOF_STEPS):
        if batch == start:
            raise UsageError(
                f"train.batch_size={start} fits for {TRY_STEPS} steps and not for {PROOF_STEPS}"
            )
        batch = max(start, int(batch * 0.9))  # a tenth less until it fits, never below the start
    return TrainableBatch(size, batch, size == most)


def largest_batch(
    overrides: Sequence[str],
    config_dir: Path | None,
    margin: float,
    report: ReportPart = report_nothing,
) -> Result:
    """The largest batch of a configuration on CUDA, with a line for each batch tried.

    Args:
        overrides: of the configuration.
        config_dir: a further folder of configs, or None.
        margin: share taken off the largest batch, 0 to 1.
        report: is called before each batch that is tried.

    Raises:
        UsageError: the device is no CUDA device, or nothing fits.
    """
    load, lines = DataCache(), list[str]()

    def planned(*more: str) -> Plan:
        composed = compose([*overrides, *more], config_dir)
        return make_plan(composed.config, composed.given, load=load)

    def fits(batch: int, steps: int) -> bool:
        report(f"batch {batch}, the {len(lines) + 1}. that is tried")
        candidate = planned(f"train.batch_size={batch}")
        devices.reset_peak(candidate.device)
        trains = _trains(candidate, steps)
        peak = (devices.peak_bytes(candidate.device) or 0) / 2**20  # in MiB
        # Models are in cycles of references, and the allocator keeps their blocks: the next batch
        # would run out of memory too early
        gc.collect()
        torch.accelerator.empty_cache()
        outcome = f"peak {peak:.0f} MiB" if trains else "out of memory"
        lines.append(f"batch {batch}, {steps} steps: {outcome}")
        return trains

    first = planned()
    if not devices.backend(first.device).memory:
        raise UsageError(
            "double.until_oom=true needs an accelerator that counts its memory: on a CPU the "
            "system swaps or kills the process before PyTorch can report that memory is out; mprun "
            "memory counts the memory of a batch without running it"
        )
    most = first.splits.train.samples or sys.maxsize  # a stream has no size
    batch = largest_that_trains(fits, first.batch.micro, most, margin)
    end = " (all of the training set)" if batch.is_limited_by_data else ""
    answer = (
        f"largest batch: {batch.size}{end}; recommended: train.batch_size={batch.recommended}, "
        f"checked by {PROOF_STEPS} steps"
    )
    return Result(batch, [*lines, answer])


def _trains(candidate: Plan, steps: int) -> bool:
    try:
        run_steps(candidate, steps)
    except torch.OutOfMemoryError:
        return False
    return True
