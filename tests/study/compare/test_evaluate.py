"""A whole comparison: rows, pairs, baseline, verdicts, notes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from mprun.errors import UsageError
from mprun.records.reader import LARGEST
from mprun.study.compare.comparison import (
    Comparison,
    Outcome,
    Run,
    Skipped,
    StepPercentiles,
    Variant,
)
from mprun.study.compare.load import latest
from mprun.study.compare.verdicts import compare
from tests.study.compare.folders import run_of, runs_of

FP32 = [0.950, 0.960, 0.955, 0.945, 0.952]


def compared(runs: list[Run], **settings: Any) -> Comparison:
    return compare(runs, **{"margin": 0.005, "relative_margin": 0.02, **settings})


def row(found: Comparison, label: str) -> Variant:
    (variant,) = [v for v in found.variants if v.label == label]
    return variant


def against_fp32(accuracies: list[float], **settings: Any) -> Variant:
    """bf16_mixed beside fp32, seed by seed."""
    runs = [*runs_of("fp32", FP32), *runs_of("bf16_mixed", accuracies)]
    return row(compared(runs, **settings), "bf16_mixed")


# ---- figures -------------------------------------------------------------------------------------


def test_figures_of_pairs_are_scipys() -> None:
    """The oracle is scipy.stats over the same numbers; 1e-12 is a few roundings of float64."""
    low = [0.948, 0.961, 0.957, 0.944, 0.953]
    ms, low_ms = [10.0, 11.0, 12.0, 10.5, 11.5], [5.0, 5.6, 5.9, 5.1, 5.8]
    runs = [
        run_of(name, seed, accuracy=a, step_ms=t)
        for name, accuracies, times in (("fp32", FP32, ms), ("bf16_mixed", low, low_ms))
        for seed, (a, t) in enumerate(zip(accuracies, times, strict=True))
    ]
    found = row(compared(runs), "bf16_mixed")
    differences, logs = np.subtract(low, FP32), np.log(np.divide(low_ms, ms))
    for interval, numbers, level in (
        (found.difference.interval, differences, 0.95),
        (found.metric.interval, low, 0.95),
        (found.equivalence, differences, 0.9),
        (np.log(found.step_time_ratio.interval), logs, 0.95),
    ):
        ends = stats.t.interval(level, 4, loc=np.mean(numbers), scale=stats.sem(numbers))
        assert tuple(interval) == pytest.approx(ends, rel=1e-12, abs=1e-15)
    assert found.throughput_ratio.value == pytest.approx(1 / found.step_time_ratio.value)
    assert found.step_time_ms == pytest.approx(StepPercentiles(5.6, 0.9 * 5.6, 1.1 * 5.6))
    assert found.samples_per_second == pytest.approx(128 / 5.6 * 1e3)


def test_pairs_are_of_equal_seed_in_whatever_order_runs_come() -> None:
    """Accuracies move by points between seeds, by a hundredth of one between the modes."""
    runs = runs_of("fp32", [0.9, 0.8, 0.7]) + runs_of("bf16_mixed", [0.9001, 0.8001, 0.7002])
    for order in (runs, runs[::-1], [runs[i] for i in (3, 1, 5, 0, 4, 2)]):
        found = row(compared(order), "bf16_mixed")
        assert found.difference.value == pytest.approx(0.0004 / 3)
        assert found.verdict.word == "equivalent"


def test_only_common_seeds_are_paired_and_that_is_noted() -> None:
    runs = runs_of("fp32", FP32) + [run_of("bf16_mixed", s, accuracy=0.95) for s in (3, 4, 9)]
    found = compared(runs)
    variant = row(found, "bf16_mixed")
    assert (variant.difference.n, len(variant.runs)) == (2, 3)
    assert variant.metric == (pytest.approx(0.95), pytest.approx((0.95, 0.95)), 3)
    assert any("the 2 seeds in common (of its 3 and the baseline's 5)" in n for n in found.notes)


def test_memory_is_the_largest_over_runs_and_its_ratio_that_of_the_peaks() -> None:
    runs = runs_of("fp32", [0.9, 0.9])
    runs += [run_of("bf16_mixed", s, memory_bytes__peak=p) for s, p in ((0, 2**20), (1, 2**21))]
    found = row(compared(runs), "bf16_mixed")
    assert found.memory_bytes["peak"] == 2**21
    assert found.memory_bytes["allocator_peak"] is None
    assert found.memory_ratio == 2 / 3
    without = [run_of(s, memory_bytes__peak=None) for s in ("fp32", "bf16_mixed")]
    assert row(compared(without), "bf16_mixed").memory_ratio is None


@pytest.mark.parametrize("emulated", ["fp32", "bf16_mixed"])
def test_emulated_runs_have_times_and_no_ratio(emulated: str) -> None:
    runs = [
        run_of(name, seed, execution="emulated" if name == emulated else "native")
        for name in ("fp32", "bf16_mixed")
        for seed in range(2)
    ]
    found = compared(runs)
    variant = row(found, "bf16_mixed")
    assert variant.step_time_ms is not None
    assert variant.memory_bytes["peak"] == 3 * 2**20
    assert (variant.step_time_ratio, variant.throughput_ratio, variant.memory_ratio) == (None,) * 3
    assert variant.difference is not None
    assert f"emulated, so no gain in time or memory is claimed: {emulated}" in found.notes


def test_runs_too_short_to_be_timed() -> None:
    times = {"median": None, "p10": None, "p90": None, "n": 0, "warmup": 3}
    nothing = {"step_time_ms": times, "samples_per_second": None}
    runs = [run_of("fp32", **nothing), run_of("bf16_mixed", **nothing)]
    found = row(compared(runs), "bf16_mixed")
    assert (found.step_time_ms, found.samples_per_second) == (None, None)
    assert (found.step_time_ratio, found.throughput_ratio) == (None, None)


# ---- verdicts ------------------------------------------------------------------------------------


def test_equivalent_better_worse() -> None:
    near = [a + d for a, d in zip(FP32, (0.001, -0.001, 0.0005, 0, -0.0005), strict=True)]
    assert against_fp32(near).verdict.word == "equivalent"
    assert "lies inside the margin of 0.5 points" in against_fp32(near).verdict.reason
    far = [a - 0.03 + d for a, d in zip(FP32, (0.001, -0.001, 0.0005, 0, 0), strict=True)]
    assert against_fp32(far).verdict.word == "worse"
    assert "excludes 0 (p<0.001)" in against_fp32(far).verdict.reason
    swapped = row(compared([*runs_of("bf16_mixed", far), *runs_of("fp32", FP32)],
                           baseline="bf16_mixed"), "fp32")  # fmt: skip
    assert swapped.verdict.word == "better"


def test_the_margin_is_the_users() -> None:
    off = [a - 0.008 + d for a, d in zip(FP32, (0.001, -0.001, 0.0005, 0, 0), strict=True)]
    assert against_fp32(off).verdict.word == "worse"
    assert against_fp32(off, margin=0.01).verdict.word == "equivalent"


@pytest.mark.parametrize(
    ("seeds", "reason"),
    [
        ([0], "one seed in common with the baseline: a spread needs two"),
        ([7], "no seed with which both have the metric"),
    ],
)
def test_too_few_pairs(seeds: list[int], reason: str) -> None:
    runs = runs_of("fp32", FP32) + [run_of("bf16_mixed", s, accuracy=0.5) for s in seeds]
    found = row(compared(runs), "bf16_mixed")
    assert (str(found.verdict), found.verdict.reason) == ("inconclusive", reason)
    assert found.equivalence is None
    if found.difference is not None:
        assert found.difference.interval is None


def test_identical_accuracies_are_equivalent_down_to_the_test_sets_grain() -> None:
    assert against_fp32(FP32).verdict.word == "equivalent"
    few = [run_of(n, s, accuracy=0.5, data__test_samples=100)
           for n in ("fp32", "bf16_mixed") for s in (0, 1)]  # fmt: skip
    assert row(compared(few), "bf16_mixed").verdict.word == "inconclusive"


# ---- losses --------------------------------------------------------------------------------------


def losses(name: str, values: list[float | str]) -> list[Run]:
    scores = ({"loss": value, "accuracy": None, "metric": "loss"} for value in values)
    return [run_of(name, seed, **score) for seed, score in enumerate(scores)]


def test_losses_are_compared_as_shares_of_the_baselines_mean() -> None:
    base, other = [0.40, 0.50, 0.60], [0.41, 0.51, 0.62]
    found = compared(losses("fp32", [*base]) + losses("bf16_mixed", [*other]))
    variant = row(found, "bf16_mixed")
    assert (found.metric, found.is_relative, found.margin) == ("loss", True, 0.02)
    assert not found.higher_is_better
    assert variant.difference.value == pytest.approx(0.04 / 3 / 0.5)
    assert variant.verdict.word == "inconclusive"
    shares = np.subtract(other, base) / 0.5
    ends = stats.t.interval(0.9, 2, loc=shares.mean(), scale=stats.sem(shares))
    assert variant.equivalence == pytest.approx(ends)


def test_of_a_baseline_loss_of_nothing_there_are_no_shares() -> None:
    runs = losses("fp32", [0.0] * 3) + losses("bf16_mixed", [0.1, 0.11, 0.12])
    found = row(compared([*runs, *losses("tf32", [0.0] * 3)]), "bf16_mixed")
    assert found.difference is None
    assert found.equivalence is None
    assert found.verdict.word == "worse"
    assert row(compared([*runs, *losses("tf32", [0.0] * 3)]), "tf32").verdict.word == "equivalent"
    within = losses("fp32", [0.0] * 3) + losses("bf16_mixed", [0.1, -0.1, 0.01])
    assert row(compared(within), "bf16_mixed").verdict.word == "inconclusive"


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_is_no_number_is_worse(loss: str) -> None:
    found = compared(losses("fp32", [0.4, 0.5, 0.6]) + losses("bf16_mixed", [0.4, loss, 0.6]))
    variant = row(found, "bf16_mixed")
    assert (variant.verdict.word, variant.verdict.reason) == (
        "worse",
        f"1 of 3 runs ended with loss {loss}",
    )
    assert not math.isfinite(variant.metric.value)
    assert (variant.metric.interval, variant.difference) == (None, None)


def test_where_the_baseline_diverged_the_seed_is_left_out() -> None:
    runs = losses("fp32", [0.4, "nan", 0.6]) + losses("bf16_mixed", [0.401, "nan", 0.601])
    found = compared(runs)
    assert row(found, "bf16_mixed").verdict.word == "equivalent"
    assert "fp32: 1 run without a finite metric; these seeds are left out" in found.notes


# ---- failed and repeated runs --------------------------------------------------------------------

BROKEN = {"status": "failed", "error": "the loss became nan at step 7\ntraceback"}


def test_failed_runs_make_a_variant_worse() -> None:
    runs = runs_of("fp32", FP32) + runs_of("bf16_mixed", FP32[:3])
    runs += [run_of("bf16_mixed", s, **BROKEN) for s in (3, 4)]
    found = row(compared(runs), "bf16_mixed")
    assert found.verdict.word == "worse"
    assert found.verdict.reason == "2 of 5 runs failed: the loss became nan at step 7"
    assert (len(found.runs), len(found.failed)) == (3, 2)
    assert found.difference.n == 3


def test_a_variant_of_which_every_run_failed_has_a_row() -> None:
    runs = [*runs_of("fp32", FP32), run_of("fp16_true", 0, **BROKEN)]
    found = row(compared(runs), "fp16_true")
    assert found.verdict.reason == "1 of 1 run failed: the loss became nan at step 7"
    assert (found.metric, found.step_time_ms, found.difference) == (None, None, None)


def test_a_seed_that_fails_in_the_baseline_too_says_nothing_of_the_mode() -> None:
    runs = [run_of(n, 4, **BROKEN) for n in ("fp32", "bf16_mixed")]
    runs += runs_of("fp32", FP32[:3]) + runs_of("bf16_mixed", FP32[:3])
    found = compared(runs)
    assert row(found, "bf16_mixed").verdict.word == "equivalent"
    assert found.variants[0].verdict.reason.startswith("1 of 4 runs failed")


def test_a_run_done_again_replaces_the_first_and_is_told() -> None:
    again = [run_of("bf16_mixed", 0, path=Path(p), accuracy=a, started_at=f"2024-03-0{d}")
             for p, a, d in (("new", 0.9, 2), ("old", 0.1, 1))]  # fmt: skip
    before = Skipped(Path("x"), "is not a folder")
    found = compare([*runs_of("fp32", FP32), *again], [before], margin=0.005, relative_margin=0.02)
    assert [run.path for run in row(found, "bf16_mixed").runs] == [Path("new")]
    assert found.skipped == (
        before,
        Skipped(Path("old"), "new has the same variant and seed, and began later"),
    )


@pytest.mark.parametrize(
    ("runs", "skipped", "said"),
    [
        ([], [Skipped(Path("a"), "is not a folder")], "to compare: a: is not a folder"),
        ([run_of("fp32", 0, **BROKEN)], [], "fp32-0 failed: the loss became nan at step 7"),
        ([], [Skipped(Path(str(i)), "x") for i in range(9)], "0: x; 1: x; 2: x; and 6 more"),
    ],
)
def test_without_a_completed_run_there_is_no_comparison(
    runs: list[Run], skipped: list[Skipped], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        compare(runs, skipped, margin=0.005, relative_margin=0.02)
    assert said in str(caught.value)


# ---- baseline ------------------------------------------------------------------------------------


def labels(runs: list[Run], **settings: Any) -> list[str]:
    found = compared(runs, **settings)
    assert found.baseline == found.variants[0].label
    return [v.label for v in found.variants]


def test_the_baseline_is_fp32_with_the_fewest_changes_and_comes_first() -> None:
    names = ["bf16_mixed", "fp32 x2", "fp32", "bf16_mixed+hmp"]
    runs = [run_of(name) for name in names]
    assert labels(runs) == ["fp32", "bf16_mixed", "fp32 x2", "bf16_mixed+hmp"]
    assert (
        "baseline: fp32, by default; compare.baseline=LABEL takes another" in compared(runs).notes
    )
    assert labels(runs[:2])[0] == "fp32 x2"
    layered = run_of("fp32", variant_hash="f", effective={})
    layered.summary.effective.layers = {"fc": "fp16"}
    assert labels([layered, run_of("fp32")])[0] == "fp32 #2"


def test_without_fp32_the_first_variant_is_the_baseline() -> None:
    assert labels([run_of("bf16_mixed"), run_of("tf32")])[0] == "bf16_mixed"
    failed = run_of("fp32", 0, **BROKEN)
    assert labels([failed, run_of("tf32")])[0] == "tf32"


def test_the_user_names_another() -> None:
    runs = [run_of("fp32"), run_of("bf16_mixed x2")]
    assert labels(runs, baseline="bf16_mixed x2")[0] == "bf16_mixed x2"
    assert not any("by default" in n for n in compared(runs, baseline="bf16_mixed x2").notes)
    with pytest.raises(UsageError) as caught:
        compared(runs, baseline="bf16_mixed")
    said = "there is no such variant; legal: 'fp32', 'bf16_mixed x2'; did you mean 'bf16_mixed x2'?"
    assert said in str(caught.value)


# ---- splits and notes ----------------------------------------------------------------------------

NO_TEST = {"test": {"loss": None, "accuracy": None}}
NO_VALIDATION = {
    "history": [{"epoch": 1, "train": {"loss": 0.5, "accuracy": 0.8},
                 "validation": {"loss": None, "accuracy": None}}]
}  # fmt: skip


def test_the_split_is_the_best_that_every_run_has() -> None:
    assert compared([run_of("fp32"), run_of("tf32")]).split == "test"
    assert compared([run_of("fp32"), run_of("tf32", **NO_TEST)]).split == "validation"
    found = compared([run_of("fp32"), run_of("tf32", **NO_TEST, **NO_VALIDATION)])
    assert found.split == "train"
    assert any("training samples" in note for note in found.notes)
    assert row(found, "tf32").metric == (0.8, None, 1)


def test_the_user_chooses_the_split() -> None:
    runs = [run_of("fp32"), run_of("tf32", **NO_VALIDATION)]
    found = compared(runs, split="validation")
    assert found.variants[0].metric == (0.9375, None, 1)
    assert row(found, "tf32").metric is None
    assert "1 of 2 runs have no validation metric and are not judged" in found.notes
    with pytest.raises(UsageError, match=r"compare.split=validation: .* legal: test, train"):
        compared([run_of("fp32", **NO_VALIDATION)], split="validation")


def test_a_run_without_epochs_has_its_training_loss() -> None:
    base = {"metric": "loss", "history": [], "test": {"loss": None, "accuracy": None}}
    found = compared([run_of("fp32", **base)])
    assert (found.split, found.variants[0].metric) == ("train", (0.5, None, 1))


def test_generated_data_is_said() -> None:
    found = compared([run_of(data__source="generated")])
    assert found.notes[0] == "generated data: accuracies do not carry over to real data"
    assert found.data == "MNIST (generated)"
    assert not any("generated" in note for note in compared([run_of()]).notes)


def test_mixed_runs_are_noted_and_times_compared_on_equal_hardware_alone() -> None:
    runs = [run_of("fp32", s, step_ms=10.0) for s in (0, 1)]
    runs += [run_of("tf32", 0, step_ms=5.0), run_of("tf32", 1, step_ms=1.0, backend__threads=1)]
    with pytest.raises(UsageError, match="hardware"):
        compared(runs)
    found = compared(runs, mix=["hardware"])
    assert found.notes[0] == "mixed hardware: threads=2 in 3 runs; threads=1 in 1 run"
    variant = row(found, "tf32")
    assert variant.step_time_ratio == (pytest.approx(0.5), None, 1)
    assert variant.difference.n == 2
    assert "2 threads / cpu" in found.hardware


def test_a_repeated_run_on_other_hardware_is_refused_before_it_is_passed_over() -> None:
    runs = [run_of("fp32"), run_of("fp32", backend__threads=1)]
    with pytest.raises(UsageError, match="threads=2 in 1 run; threads=1 in 1 run"):
        compared(runs)


def test_mixed_recipes_are_told_apart_by_name() -> None:
    other = run_of("fp32", recipe="fashion_mnist", variant_hash="other")
    found = compared([run_of("fp32"), other], mix=["recipes"])
    assert [v.label for v in found.variants] == ["mnist fp32", "fashion_mnist fp32"]
    assert found.recipe == "mnist / fashion_mnist"


def test_uncommitted_changes_are_noted() -> None:
    found = compared([run_of(git_commit="abc-dirty")])
    assert any("uncommitted" in note for note in found.notes)


# ---- any figures at all --------------------------------------------------------------------------

FIGURES = st.floats(-LARGEST, LARGEST, exclude_min=True, exclude_max=True)
TIMES = st.none() | FIGURES


@example([("fp32", 0, 0.5, 8e90, "completed"), ("tf32", 0, 0.5, 2e-233, "completed")], "accuracy")
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["fp32", "bf16_mixed", "tf32"]),
            st.integers(0, 3),
            FIGURES | st.sampled_from(["nan", "inf", "-inf"]) | st.none(),
            TIMES,
            st.sampled_from(["completed", "failed"]),
        ),
        max_size=10,
    ),
    st.sampled_from(["accuracy", "loss"]),
)
def test_no_figure_that_a_record_can_hold_breaks_a_comparison(
    drawn: list[tuple[str, int, Any, float | None, str]], metric: str
) -> None:
    runs = []
    for name, seed, value, ms, status in drawn:
        times = {"median": ms, "p10": ms, "p90": ms, "n": 1, "warmup": 0}
        extra = {"step_time_ms": times, "samples_per_second": ms, "status": status}
        if metric == "accuracy" and isinstance(value, str):
            value = None
        runs.append(run_of(name, seed, metric=metric, test={metric: value}, **extra))
    if not any(run.summary.status == "completed" for run in latest(runs)[0]):
        with pytest.raises(UsageError):
            compared(runs)
        return
    found = compared(runs)
    assert [v.verdict.word == "baseline" for v in found.variants].count(True) == 1
    for variant in found.variants:
        assert variant.verdict.word in get_args(Outcome)
        for estimate in (variant.step_time_ratio, variant.throughput_ratio):
            assert estimate is None or estimate.value > 0


def test_a_run_that_took_no_step_is_worse_and_no_baseline() -> None:
    """Every step was skipped: it ended in peace, and has nothing to be judged by."""
    nothing = {
        "metric": "loss",
        "test": {"loss": None, "accuracy": None},
        "history": [],
        "train": {"loss": None},
    }
    base = [run_of("fp32", i, metric="loss", loss=1.0 + i) for i in range(3)]
    broken = [run_of("fp16_true", i, **nothing) for i in range(3)]
    found = compared([*broken, *base])
    assert found.baseline == "fp32"
    verdict = found.variants[1].verdict
    assert verdict.word == "worse"
    assert verdict.reason == "3 of 3 runs failed: it has no metric: no step was taken"
