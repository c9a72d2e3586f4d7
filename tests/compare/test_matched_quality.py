"""Samples and time to equal validation loss: planted curves, symmetry, what the verdict says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.compare.comparison import Comparison, Run, Variant
from mprun.compare.evaluate import compare
from mprun.compare.matched_quality import LossPoint, curve, samples_ratio, samples_to
from mprun.config.settings import Objective
from mprun.experiments.advise import advise
from mprun.records.run_record import Epoch, Scores
from mprun.report.answer import headline
from tests.compare.folders import run_of

BATCH, OF_EPOCH = 100, 6000


def trained(variant: str, seed: int, losses: Sequence[float | None], ms: float, **more: Any) -> Run:
    """A run with these validation losses, epoch by epoch."""
    run = run_of(variant, seed, accuracy=0.9 + 0.001 * (seed % 3), step_ms=ms, **more)
    summary = run.summary
    summary.batch_size = summary.batch.effective = BATCH
    summary.data.train_samples = OF_EPOCH
    summary.steps = len(losses) * OF_EPOCH // BATCH
    summary.epochs = len(losses)
    scores = Scores(loss=1.0, accuracy=0.9)
    summary.history = [
        Epoch(epoch=n, train=scores, validation=Scores(loss=loss, accuracy=0.9))
        for n, loss in enumerate(losses, start=1)
    ]
    return run


def falling(factor: float, seed: int, epochs: int = 12) -> list[float]:
    """A loss of 1 / (1 + samples / factor), with a seed's own noise, the same in each variant."""
    return [(1 + 0.01 * (seed % 3)) / (1 + n / factor) for n in range(1, epochs + 1)]


def comparison(factor: float, ms: float, noise: float = 0.0) -> Comparison:
    """fp32 beside bf16_mixed, whose curve is stretched by `factor`, with its own step time."""
    runs = []
    for seed in range(5):
        wobble = 1 + noise * (-1) ** seed
        runs.append(trained("fp32", seed, falling(1.0, seed), 10.0))
        runs.append(trained("bf16_mixed", seed, falling(factor * wobble, seed), ms))
    return compare(runs, margin=0.005, relative_margin=0.02)


def bf16(found: Comparison) -> Variant:
    return found.variants[1]


def test_faster_steps_and_as_many_more_of_them_buy_nothing() -> None:
    found = comparison(factor=1.2, ms=10 / 1.2)
    variant = bf16(found)
    assert variant.samples_to_loss_ratio is not None
    assert variant.time_to_loss_ratio is not None
    assert variant.samples_to_loss_ratio.value == pytest.approx(1.2, rel=0.01)  # interpolation
    assert variant.time_to_loss_ratio.value == pytest.approx(1.0, rel=0.01)
    (note,) = [n for n in found.notes if "buys nothing" in n]
    assert note.startswith("bf16_mixed is faster per sample and buys nothing: it needs 1.2")
    assert headline(found) == [
        "No variant was shown to keep the accuracy of fp32 and to be faster or smaller."
    ]
    advice = advise(found, {}, Objective.time)
    assert advice.label == "fp32"
    assert advice.rejected["bf16_mixed"].startswith("buys nothing: 1.0")


def test_a_healthy_mode_is_silent_and_advised() -> None:
    found = comparison(factor=1.0, ms=5.0)
    variant = bf16(found)
    assert variant.samples_to_loss_ratio is not None
    assert variant.samples_to_loss_ratio.value == 1.0
    assert variant.time_to_loss_ratio is not None
    assert variant.time_to_loss_ratio.value == pytest.approx(0.5)
    assert not any("equal validation loss" in note for note in found.notes)
    assert "trains 2.00 times as fast" in headline(found)[0]
    assert advise(found, {}, Objective.time).label == "bf16_mixed"


def test_a_gain_that_is_left_open_and_one_that_is_smaller() -> None:
    found = comparison(factor=1.15, ms=10 / 1.2, noise=0.2)
    assert any("faster per sample; to equal loss that is open" in n for n in found.notes)
    found = comparison(factor=1.3, ms=5.0)
    assert any(n.startswith("bf16_mixed needs 1.3") for n in found.notes)
    assert advise(found, {}, Objective.time).label == "bf16_mixed"


def test_the_worse_run_sets_the_loss_so_none_is_cut_off() -> None:
    """The baseline passes a loss that the other only ends with: half way between epochs 1 and 2."""
    base = [LossPoint(100, 0.8), LossPoint(200, 0.4), LossPoint(300, 0.3), LossPoint(400, 0.2)]
    own = [LossPoint(100, 0.9), LossPoint(200, 0.8), LossPoint(300, 0.7), LossPoint(400, 0.6)]
    assert samples_ratio(own, base) == 400 / 150
    assert samples_ratio(base, own) == 150 / 400
    assert samples_to(base, 2.0) == 100


def test_curves_are_the_best_so_far_without_partial_and_broken_validations() -> None:
    run = trained("fp32", 0, [0.9, 0.5, 0.7, None, 0.6, 0.4], 10.0)
    assert [p.best_loss for p in curve(run.summary)] == [0.9, 0.5, 0.5, 0.5, 0.4]
    assert [p.samples for p in curve(run.summary)] == [6000, 12000, 18000, 30000, 36000]
    run.summary.history[1].validation.samples = 7
    run.summary.history[2].validation.loss = "nan"
    assert curve(run.summary) == []  # three are left
    run = trained("fp32", 0, [0.9, 0.8, 0.7, 0.6], 10.0)
    run.summary.steps -= 30  # the last epoch was cut off
    assert curve(run.summary)[-1].samples == 24000 - 30 * BATCH
    run.summary.data.train_samples = None  # a stream
    assert curve(run.summary) == []


def test_too_few_validations_give_no_figure() -> None:
    runs = [trained(name, 0, [0.5, 0.4, 0.3], 10.0) for name in ("fp32", "bf16_mixed")]
    variant = bf16(compare(runs, margin=0.005, relative_margin=0.02))
    assert variant.samples_to_loss_ratio is variant.time_to_loss_ratio is None


def test_times_without_a_verdict_have_no_interval() -> None:
    found = comparison(factor=1.2, ms=5.0)
    runs = [run for variant in found.variants for run in variant.runs]
    for run in runs:
        run.summary.started_at = "2024-03-01T00:00:00.000+00:00"  # all at once
    variant = bf16(compare(runs, margin=0.005, relative_margin=0.02))
    assert variant.time_to_loss_ratio is not None
    assert variant.time_to_loss_ratio.interval is None
    assert variant.samples_to_loss_ratio is not None
    assert variant.samples_to_loss_ratio.interval is not None


LOSSES = st.lists(st.floats(0.01, 10), min_size=4, max_size=20)


@given(LOSSES, LOSSES)
def test_exchanging_the_runs_inverts_the_ratio(one: list[float], other: list[float]) -> None:
    a, b = (curve(trained("fp32", 0, losses, 10.0).summary) for losses in (one, other))
    ratio, inverse = samples_ratio(a, b), samples_ratio(b, a)
    assert ratio is not None
    assert inverse is not None
    assert ratio * inverse == pytest.approx(1)
    assert 1 / 20 <= ratio <= 20


def test_equal_variants_are_seldom_told_apart() -> None:
    """Noise in every validation: the 95 % interval misses 1 in about 5 % of 400 studies.

    Of 400 with a rate of 5 %, more than 36 or fewer than 7 come once in 1,000 (binomial); the
    ratio's logarithm is not normal, so up to 8 % is taken as right.
    """
    rng, missed = np.random.default_rng(0), 0
    shape = np.array(falling(3.0, 0))
    for _ in range(400):
        logs = []
        for _ in range(5):
            runs = [shape * rng.normal(1, 0.02, len(shape)) for _ in range(2)]
            a, b = (curve(trained("fp32", 0, list(map(float, x)), 10.0).summary) for x in runs)
            ratio = samples_ratio(a, b)
            assert ratio is not None
            logs.append(math.log(ratio))
        half = 2.776 * np.std(logs, ddof=1) / math.sqrt(5)
        missed += bool(abs(np.mean(logs)) > half)
    assert 4 <= missed <= 36
