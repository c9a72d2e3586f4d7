"""Which mode is taken, and why the others lost."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from mprun.config import compose
from mprun.records.run_config import variant_hash
from mprun.records.run_record import LossScaleRow, Summary
from mprun.study.advise import advise, alarms, preset_text, screened, write_preset
from mprun.study.compare.comparison import EqualQuality, Estimate, Variant
from mprun.study.compare.verdicts import compare
from mprun.study.trials import Outcome, Trial
from tests.each import each
from tests.study import comparison, ratio, variant
from tests.study.compare.folders import run_of
from tests.summaries import example


def test_the_fastest_of_those_that_keep_the_metric_is_taken() -> None:
    found = advise(
        comparison(
            variant("bf16_mixed", time=(0.6, 0.58, 0.62)),
            variant("bf16_sr", time=(0.5, 0.48, 0.52)),
            variant("fp16_true", "worse", time=(0.3, 0.28, 0.32)),
        ),
        {},
        "time",
    )
    assert found.label == "bf16_sr"
    assert found.reason == "0.50 [0.48, 0.52] of the baseline's step time, accuracy equivalent"
    assert found.rejected == {
        "bf16_mixed": "bf16_sr needs less: 0.60 [0.58, 0.62] of the baseline's step time",
        "fp16_true": "worse: made by hand",
        "fp32": "bf16_sr needs 0.50 [0.48, 0.52] of the baseline's step time",
    }
    assert found.notes == ()


def test_a_rival_within_the_noise_is_named() -> None:
    rival, best = variant("a", time=(0.52, 0.45, 0.6)), variant("b", time=(0.5, 0.45, 0.55))
    found = advise(comparison(rival, best), {}, "time")
    assert found.label == "b"
    (doubt,) = found.notes
    assert doubt == ("a is as fast as b within the noise, with 0.75 of the baseline's peak memory")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (variant("x", "worse"), "worse: made by hand"),
        (
            variant("x", "inconclusive", more_seeds=4),
            "inconclusive: about 4 more seeds: made by hand",
        ),
        (
            variant("x", time=(0.9, 0.7, 1.0)),
            "not proven faster: 0.90 of the baseline's step time measured (10 pairs)",
        ),
        (
            variant("x", time=(1.1, 0.9, 1.3)),
            "no gain: 1.10 of the baseline's step time measured (10 pairs)",
        ),
        (
            replace(variant("x"), step_time_ratio=Estimate(0.7, None, 1)),
            "not proven faster: 0.70 of the baseline's step time measured (1 pair)",
        ),
        (variant("x", time=(1.4, 1.3, 1.5)), "slower: 1.40 [1.30, 1.50] of the baseline's step"),
        (variant("x", execution="emulated", time=None), "emulated here"),
        (variant("x", time=None), "not faster: an unknown share of the baseline's step time"),
    ],
)
def test_what_is_not_shown_is_not_taken(other: object, reason: str) -> None:
    found = advise(comparison(other), {}, "time")
    assert found.label == "fp32"
    assert found.reason == "no other mode was shown to need less step time at an equal metric"
    assert found.rejected["x"].startswith(reason)


def to_equal_quality(
    row: Variant, samples: float, time: tuple[float, float, float], missed: int = 0
) -> Variant:
    """The row with ratios of samples and time to the baseline's validation loss."""
    needs = ratio((samples, 0.98 * samples, 1.02 * samples))
    found = EqualQuality(None, None, needs, None, None, ratio(time), missed, 0.02)
    return replace(row, equal_quality=found)


FASTER = variant("x", time=(0.83, 0.82, 0.84), throughput=(1.2, 1.18, 1.22))


def test_a_mode_that_needs_as_many_more_samples_buys_nothing() -> None:
    nothing = to_equal_quality(FASTER, 1.2, (1.0, 0.98, 1.02), missed=1)
    found = advise(comparison(nothing), {}, "time")
    assert found.label == "fp32"
    assert found.rejected["x"] == (
        "buys nothing: 0.83 [0.82, 0.84] of the baseline's step time, but 1.20 [1.18, 1.22] of its "
        "samples and 1.00 [0.98, 1.02] of its time to equal validation loss (never reached in "
        "1 pair)"
    )
    assert advise(comparison(nothing), {}, "memory").label == "x"


def test_a_gain_to_equal_quality_is_taken_in_silence_and_an_open_one_with_a_note() -> None:
    sound = advise(comparison(to_equal_quality(FASTER, 1.0, (0.83, 0.81, 0.85))), {}, "time")
    assert (sound.label, sound.notes) == ("x", ())
    unsettled = to_equal_quality(FASTER, 1.1, (0.92, 0.8, 1.05))
    found = advise(comparison(unsettled), {}, "time")
    assert found.label == "x"
    (note,) = found.notes
    assert note == (
        "x was not shown to reach the baseline's validation loss sooner: 1.10 [1.08, 1.12] of its "
        "samples and 0.92 [0.80, 1.05] of its time to equal validation loss"
    )


def test_an_undecided_mode_that_is_faster_is_worth_more_seeds() -> None:
    found = advise(comparison(variant("x", "inconclusive", more_seeds=4)), {}, "time")
    (doubt,) = found.notes
    assert doubt.endswith(
        "inconclusive: a study with first_seed=8 and up to 5 seeds would likely settle it"
    )  # 1 run + 4
    slower = variant("x", "inconclusive", more_seeds=4, time=(1.2, 1.1, 1.3))
    assert advise(comparison(slower), {}, "time").notes == ()


def test_an_alarm_keeps_a_mode_from_being_taken() -> None:
    rows = comparison(variant("fp16_mixed"), variant("bf16_mixed", time=(0.8, 0.7, 0.9)))
    found = advise(rows, {"fp16_mixed": ["seed 0: steps were skipped"]}, "time")
    assert found.label == "bf16_mixed"
    assert found.rejected["fp16_mixed"] == "numerical alarm: seed 0: steps were skipped"


def test_memory_is_another_objective() -> None:
    small = variant("half_sr", time=(1.5, 1.4, 1.6), memory=0.7)
    found = advise(comparison(variant("bf16_mixed", memory=1.05), small), {}, "memory")
    assert found.label == "half_sr"
    assert found.reason == "0.70 of the baseline's peak memory, accuracy equivalent"
    assert found.rejected["bf16_mixed"] == "not smaller: 1.05 of the baseline's peak memory"


def test_peaks_that_are_the_same_are_told_apart_by_time() -> None:
    slow = variant("a", time=(0.9, 0.8, 1.0), memory=0.5)
    fast = variant("b", time=(0.4, 0.3, 0.5), memory=0.501)
    found = advise(comparison(slow, fast), {}, "memory")
    assert found.label == "b"
    assert found.rejected["a"].startswith("b is faster with the same memory: ")
    hardly = advise(comparison(variant("a", memory=0.9999)), {}, "memory")
    assert hardly.label == "fp32"


def test_an_artefact_takes_no_mode_for_its_time() -> None:
    """bf16 takes half of fp32's time, and 18 of fp32's 40 ms are page faults."""
    runs = [
        run_of(
            name,
            seed,
            accuracy=0.95 + 0.01 * seed,
            step_ms=ms * (1 + 0.001 * seed),
            page_faults_per_step=faults,
            hardware__page_fault_us=0.6,
        )
        for name, ms, faults in (("fp32", 40.0, 30_000), ("bf16_mixed", 20.0, 0))
        for seed in range(3)
    ]
    found = advise(compare(runs, margin=0.005, relative_margin=0.02), {}, "time")
    assert found.label == "fp32"
    reason = "not proven faster: 0.50 of the baseline's step time measured (3 pairs; page faults"
    assert found.rejected["bf16_mixed"].startswith(reason)
    for run in runs:
        run.summary.page_faults_per_step = 0.0
    found = advise(compare(runs, margin=0.005, relative_margin=0.02), {}, "time")
    assert found.label == "bf16_mixed"


def test_trials_that_overlapped_give_no_advice_on_time() -> None:
    began = {"started_at": "2026-01-01T00:00:00.000+00:00", "wall_time_s": 5.0}
    runs = [
        run_of(name, seed, accuracy=0.95 + 0.01 * seed, step_ms=ms, **began)
        for name, ms in (("fp32", 40.0), ("bf16_mixed", 20.0))
        for seed in range(3)
    ]
    found = advise(compare(runs, margin=0.005, relative_margin=0.02), {}, "time")
    assert found.label == "fp32"
    assert found.notes[0].startswith("trials ran at the same time on one machine")


DAYS = itertools.count(1)


def outcome(
    name: str, seed: int, ms: float, error: str | None = None, peak: int = 2**20
) -> Outcome:
    """A trial; each has a day for itself."""
    summary: Summary = example()
    summary.started_at = (date(2024, 3, 1) + timedelta(next(DAYS))).isoformat() + "T12:00:00+00:00"
    summary.step_time_ms.median = ms
    summary.memory_bytes.peak = peak
    return Outcome(Trial(name, seed, ()), summary, error)


def test_a_mode_slower_in_every_pair_is_screened_out() -> None:
    rows = [
        *(outcome("fp32", seed, 10.0) for seed in range(2)),
        *(outcome("slow", seed, 14.1) for seed in range(2)),
        *(outcome("once", seed, ms) for seed, ms in enumerate((12.0, 9.0))),
        outcome("new", 0, 50.0),
    ]
    assert screened(rows, "fp32", "time", pairs=2) == {
        "slow": "screened out after 2 pairs: 1.41, 1.41 of fp32's step time"
    }
    assert set(screened(rows, "fp32", "time", pairs=1)) == {"slow", "new"}


@pytest.mark.parametrize("cause", ["overlap", "two machines"])
def test_only_pairs_with_one_machine_for_themselves_screen_by_time(cause: str) -> None:
    rows = [outcome(name, seed, ms) for name, ms in (("fp32", 10), ("x", 14)) for seed in range(3)]
    summaries = [row.summary for row in rows if row.summary is not None]
    for summary in summaries:
        summary.hardware.host = "one"
    assert set(screened(rows, "fp32", "time", pairs=3)) == {"x"}
    if cause == "overlap":
        summaries[3].started_at = summaries[0].started_at
    else:
        summaries[3].hardware.host = "another"
    assert screened(rows, "fp32", "time", pairs=3) == {}
    assert set(screened(rows, "fp32", "time", pairs=2)) == {"x"}
    assert set(screened(rows, "fp32", "memory", pairs=3)) == {"x"}  # equal peaks


def test_a_mode_slowed_by_an_artefact_is_not_screened_out() -> None:
    rows = [outcome(name, seed, ms) for name, ms in (("fp32", 10), ("x", 14)) for seed in range(2)]
    for row in rows:
        row.summary.hardware.page_fault_us = 1.0
        row.summary.page_faults_per_step = 6000.0 if row.trial.variant == "x" else 0.0
    assert screened(rows, "fp32", "time", pairs=2) == {}


def test_a_failed_mode_is_screened_out_and_the_baseline_never() -> None:
    rows = [outcome("fp32", 0, 10.0, "boom"), outcome("x", 0, 1.0, "the loss became nan")]
    assert screened(rows, "fp32", "time", pairs=2) == {"x": "seed 0 failed: the loss became nan"}


def test_screening_by_memory_looks_at_memory() -> None:
    rows = [outcome("fp32", 0, 10.0), outcome("x", 0, 1.0, peak=2**21), outcome("y", 0, 99, peak=5)]
    assert screened(rows, "fp32", "memory", pairs=1) == {
        "x": "screened out after 1 pair: 2.00 of fp32's peak memory"
    }


# ---- alarms -------------------------------------------------------------------------------------


def steps(skipped: set[int], every: int = 1) -> list[dict[str, Any]]:
    """What a run of 100 steps leaves with `train.log_every`: every skipped step is in it."""
    kept = (i for i in range(1, 101) if i % every == 0 or i in skipped)
    return [{"kind": "step", "step": i, "skipped": i in skipped} for i in kept]


SKIPPED = "3 of the last 50 steps were skipped: gradients overflow"


@each(
    ("lines", "expected"),
    [
        (steps(set()), []),
        (steps(set(range(1, 17))), []),  # while a scale is found
        *(
            (steps({60, 80}, every), []) for every in (1, 20, 1000)
        ),  # what is logged decides nothing
        *((steps({60, 70, 80}, every), [SKIPPED]) for every in (1, 20, 1000)),
    ],
)
def test_steps_skipped_again_and_again_are_an_alarm(
    lines: list[dict[str, Any]], expected: list[str]
) -> None:
    summary: Summary = example()
    summary.steps = 100
    assert alarms(summary, lines) == expected


@each(("kind", "final", "n"), [("dynamic", 0.5, 1), ("dynamic", 1.0, 0), ("static", 0.5, 0)])
def test_a_scale_that_fell_below_one(kind: str, final: float, n: int) -> None:
    summary: Summary = example()
    summary.loss_scale = LossScaleRow(kind=kind, initial=65536.0, final=final)
    assert len(alarms(summary, [])) == n


def test_a_loss_that_is_not_finite() -> None:
    summary: Summary = example()
    assert alarms(summary, []) == []
    summary.history[0].validation.loss = "nan"
    assert alarms(summary, []) == ["a validation loss was not finite"]


# ---- the preset ----------------------------------------------------------------------------------

CASES = [
    ["recipe=mnist", "precision=bf16_mixed"],
    ["recipe=linear", "precision=half_sr", "loss_scale=static", "loss_scale.value=1024"],
    ["recipe=mnist", "op_lists=hmp", "train.lr=2e-3", "precision.layers={0: fp32}"],
    ["recipe=mnist", "precision=fp16_mixed", "train.clip_norm=null", "recipe.model.units=64"],
    ["recipe=mnist", "batch=double", "batch.lr_rule=sqrt", "train.scheduler=cosine"],
]


@pytest.mark.representative(2, 4)
@pytest.mark.parametrize("words", CASES, ids=lambda w: w[1])
def test_a_preset_is_the_same_run_and_the_same_variant(words: list[str]) -> None:
    path = write_preset(Path("made"), "advised", preset_text("advised", words, ["why\nso"]))
    assert path == Path("made/preset/advised.yaml")
    found, meant = compose(["preset=advised"], Path("made")).resolved, compose(words).resolved
    assert found.pop("preset") == meant.pop("preset") | {"name": "advised"}
    assert found == meant
    assert variant_hash(found) == variant_hash(meant)


def test_the_command_line_wins_over_a_preset() -> None:
    write_preset(Path("made"), "advised", preset_text("advised", CASES[0], ["why"]))
    words = ["preset=advised", "precision=fp32", "train.lr=1"]
    config = compose(words, Path("made")).config
    assert (config.precision.name, config.train.lr) == ("fp32", 1.0)
