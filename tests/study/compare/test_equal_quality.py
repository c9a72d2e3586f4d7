"""Time and samples to one validation loss: of planted curves, and how often a claim is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mprun.records.run_folder import ValidationLoss
from mprun.study.compare.comparison import Comparison, Variant
from mprun.study.compare.equal_quality import (
    buys_nothing,
    is_faster_per_sample,
    judge_equal_quality,
    steps_to_target,
)
from mprun.study.compare.statistics import geometric_mean
from mprun.study.compare.verdicts import compare
from tests.study.compare.folders import run_of

EPOCHS, STEPS = 10, 100
Loss = Callable[[float], float]


def power(step: float) -> float:
    return float(2 * step**-0.3)


def curve(losses: Sequence[float]) -> list[ValidationLoss]:
    return [ValidationLoss(STEPS * i, loss) for i, loss in enumerate(losses, start=1)]


def planted(
    folder: Path,
    loss: Loss,
    base_loss: Loss = power,
    ms: float = 10.0,
    seeds: int = 4,
    epochs: int = EPOCHS,
    validations: int | None = None,
    **changes: Any,
) -> Comparison:
    """fp32 with 12 ms a step, bf16_mixed with `ms`; validated after each epoch of 100 steps.

    With `validations` these are inside one epoch, which the summary has.
    """
    runs = []
    for seed in range(seeds):
        for mode, of_mode, step_ms in (("fp32", base_loss, 12.0), ("bf16_mixed", loss, ms)):
            noise = 1 + 0.001 * math.sin(7 * seed)  # of the seed: the same in both
            jitter = 1 + 0.002 * math.sin(11 * seed + len(mode))
            rows = [
                {"epoch": i, "loss": noise * of_mode(STEPS * i), "accuracy": 0.5}
                for i in range(1, epochs + 1)
            ]
            path = folder / f"{mode}-{seed}"
            path.mkdir(parents=True)
            lines = [
                {"kind": "step", "step": 1, "loss": 3.0},
                *({"kind": "validation", "step": STEPS * row["epoch"], **row} for row in rows),
            ]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (path / "metrics.jsonl").write_text(text, encoding="utf-8")
            own = changes if mode != "fp32" else {}
            ends = rows if validations is None else rows[-1:]
            own = {**own, "history": history([row["loss"] for row in ends])}
            own["validations"] = validations
            runs.append(run_of(mode, seed, path, step_ms=step_ms * jitter, **own))
    return compare(runs, margin=0.005, relative_margin=0.02)


def history(losses: Sequence[float]) -> list[dict[str, Any]]:
    """Epochs with these validation losses, as a summary has them."""
    train = {"loss": 1.0, "accuracy": None}
    return [
        {"epoch": i, "train": train, "validation": {"loss": loss, "accuracy": 0.5}}
        for i, loss in enumerate(losses, start=1)
    ]


def only(comparison: Comparison) -> Variant:
    (variant,) = comparison.variants[1:]
    return variant


def slowed(step: float) -> float:
    """Needs 1.2 times the steps."""
    return power(step / 1.2)


def test_a_mode_of_1_2_times_the_speed_and_1_2_times_the_steps_buys_nothing(
    tmp_path: Path,
) -> None:
    variant = only(planted(tmp_path, slowed))
    quality = variant.equal_quality
    # Linear interpolation between validations: off by less than 1 % on this curve.
    assert quality.samples_ratio.value == pytest.approx(1.2, rel=0.01)
    assert quality.time_ratio.value == pytest.approx(1.0, rel=0.01)
    assert quality.time_ratio.n == 4
    assert quality.time_ratio.interval is not None
    assert quality.samples is not None
    assert quality.seconds is not None
    assert quality.samples == pytest.approx(128 * 1000 * 1.02 ** (-1 / 0.3), rel=0.02)
    assert quality.seconds == pytest.approx(quality.samples / (128 / 10e-3), rel=0.01)
    assert is_faster_per_sample(variant)
    assert judge_equal_quality(variant) == "nothing"
    assert buys_nothing(variant)


def test_a_mode_that_learns_alike_is_as_much_faster_to_equal_quality(tmp_path: Path) -> None:
    comparison = planted(tmp_path, power)
    variant, quality = only(comparison), only(comparison).equal_quality
    assert quality.samples_ratio.value == pytest.approx(1.0)
    assert quality.time_ratio.value == pytest.approx(10 / 12, rel=0.01)
    assert (quality.missed, quality.no_figure) == (0, "")
    assert judge_equal_quality(variant) == "faster"
    assert not buys_nothing(variant)
    assert not any("equal validation loss" in note for note in comparison.notes)


def test_a_loss_that_is_never_reached_is_said_and_is_no_gain(tmp_path: Path) -> None:
    variant = only(planted(tmp_path, lambda step: max(power(step), 0.3), ms=4.0))
    quality = variant.equal_quality
    assert quality.missed == 4
    assert quality.time_ratio is not None  # at the level that it did reach
    assert quality.time_ratio.value == pytest.approx(4 / 12, rel=0.05)
    assert judge_equal_quality(variant) == "open"


def test_few_validations_have_no_figure_but_what_they_need(tmp_path: Path) -> None:
    comparison = planted(tmp_path, slowed, epochs=3)
    quality = only(comparison).equal_quality
    assert quality.samples_ratio is None
    assert quality.time_ratio is None
    assert "3 validations in a run, 4 are needed" in quality.no_figure
    assert "train.validations=4 or more" in quality.no_figure
    assert any(quality.no_figure in note for note in comparison.notes)
    as_fast = planted(tmp_path / "as fast", slowed, epochs=3, ms=12.0)
    assert not any("equal validation loss" in note for note in as_fast.notes)


def test_validations_inside_an_epoch_are_a_curve(tmp_path: Path) -> None:
    ends = only(planted(tmp_path / "ends", slowed)).equal_quality
    assert only(planted(tmp_path / "inside", slowed, validations=EPOCHS)).equal_quality == ends
    few = only(planted(tmp_path / "few", slowed, validations=3)).equal_quality
    assert few.no_figure.startswith("3 validations in a run")


@pytest.mark.parametrize("damage", ["missing", "foreign", "short"])
def test_a_damaged_file_of_metrics_is_no_curve(tmp_path: Path, damage: str) -> None:
    runs = []
    for mode in ("fp32", "bf16_mixed"):
        path = tmp_path / f"{mode}-{damage}"
        path.mkdir()
        text = {"foreign": '{"kind":"validation","step":"x","loss":1}\n', "short": ""}
        if damage in text:
            (path / "metrics.jsonl").write_text(text[damage], encoding="utf-8")
        runs.append(run_of(mode, 0, path, history=history([1 / i for i in range(1, 6)])))
    quality = only(compare(runs, margin=0.005, relative_margin=0.02)).equal_quality
    assert quality.samples_ratio is None
    assert quality.no_figure.startswith("1 of 1 pair without a figure")


def test_runs_without_validation_have_no_figure_and_no_note(tmp_path: Path) -> None:
    comparison = planted(tmp_path, power, epochs=0)
    assert only(comparison).equal_quality is None
    assert not any("equal validation loss" in note for note in comparison.notes)


def test_an_emulated_mode_has_samples_and_no_time(tmp_path: Path) -> None:
    quality = only(planted(tmp_path, slowed, execution="emulated")).equal_quality
    assert quality.samples_ratio.value == pytest.approx(1.2, rel=0.01)
    assert quality.time_ratio is None
    assert quality.seconds is None


def test_times_without_a_verdict_have_no_interval_here_either(tmp_path: Path) -> None:
    variant = only(planted(tmp_path, slowed, started_at="unknown"))
    quality = variant.equal_quality
    assert variant.no_time_verdict
    assert quality.time_ratio.interval is None
    assert quality.samples_ratio.interval is not None
    assert judge_equal_quality(variant) == "open"


def test_a_larger_batch_counts_samples_not_steps(tmp_path: Path) -> None:
    quality = only(planted(tmp_path, power, batch_size=256)).equal_quality
    assert quality.samples_ratio.value == pytest.approx(2.0)


# ---- curves --------------------------------------------------------------------------------------


def test_the_step_lies_between_validations_in_proportion() -> None:
    falling = curve([1.0, 0.8, 0.6, 0.4])
    late = curve([1.0, 0.9, 0.8, 0.6])
    found = steps_to_target(late, falling, tolerance=0.0)
    assert found == (400, 300, True)
    found = steps_to_target(late, falling, tolerance=0.25)  # the target is 0.7
    assert found.ours == pytest.approx(350)
    assert found.theirs == pytest.approx(250)


def test_the_first_time_counts_and_what_follows_does_not() -> None:
    risen = curve([1.0, 0.4, 0.9, 1.1])
    found = steps_to_target(risen, curve([1.0, 0.8, 0.6, 0.4]), tolerance=0.0)
    assert found == (200, 400, False)


def test_a_rise_before_the_target_is_crossed_from_the_lowest_so_far() -> None:
    bumpy = curve([1.0, 0.6, 0.9, 0.4])
    found = steps_to_target(bumpy, curve([1.0, 0.9, 0.8, 0.5]), tolerance=0.0)
    assert found.ours == pytest.approx(350)


def test_losses_that_are_not_finite_do_not_count() -> None:
    falling = [1.0, 0.8, 0.6, 0.4]
    broken = curve([1.0, math.nan, 0.8, math.inf, 0.6, 0.4])
    assert steps_to_target(broken, curve(falling), 0.0) == (600, 400, False)
    assert steps_to_target(curve([math.nan] * 9), curve(falling), 0.0) is None


def test_a_loss_below_0_has_a_tolerance_too() -> None:
    found = steps_to_target(curve([-1.0, -2.0, -3.0, -3.9]), curve([-1.0, -2.0, -3.0, -4.0]), 0.1)
    assert not found.is_missed
    assert found.theirs == pytest.approx(350)  # -3.9 + 0.4


def test_a_target_met_by_the_first_validation_has_no_step() -> None:
    flat = curve([0.5, 0.5, 0.499, 0.501])
    assert steps_to_target(flat, curve([1.0, 0.8, 0.6, 0.5]), tolerance=0.02) is None


# ---- error rates ---------------------------------------------------------------------------------

REPETITIONS = 1000


@pytest.mark.parametrize(("noise", "pace"), [(0.002, 1.2), (0.01, 1.2), (0.02, 1.0)])
def test_a_wrong_claim_is_rare(noise: float, pace: float) -> None:
    """Every validation has noise, every run a pace of its own (3 %), the variant needs `pace`.

    Each side of an interval excludes the truth in at most 2.5 %, plus four standard errors
    (4 sqrt(0.025 0.975 / 1000) = 2 %), plus 1 % for the bias that noise and interpolation leave.
    """
    rng = np.random.default_rng(21)
    steps = STEPS * np.arange(1, 31)
    above = below = 0
    for _ in range(REPETITIONS):
        ratios = []
        for _ in range(5):
            paces = rng.lognormal(0, 0.03, 2) * [pace, 1.0]
            losses = 2 * (steps / paces[:, None]) ** -0.3
            losses *= 1 + rng.normal(0, noise, losses.shape)
            ours, theirs = (curve(row.tolist()) for row in losses)
            found = steps_to_target(ours, theirs, 0.02)
            ratios.append(found.ours / found.theirs)
        interval = geometric_mean(ratios).interval
        above += interval.low > pace
        below += interval.high < pace
    most = 0.025 + 4 * math.sqrt(0.025 * 0.975 / REPETITIONS) + 0.01
    assert above / REPETITIONS <= most
    assert below / REPETITIONS <= most
