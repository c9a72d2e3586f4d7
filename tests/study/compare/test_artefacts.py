"""Artefacts: what takes a share of a step leaves a difference in time without a verdict.

The oracle is a simulated machine: a run's recorded step is the time of its arithmetic plus what
page faults, load, a slow clock or drift add to it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mprun.records.run_record import Conditions
from mprun.study.compare.comparison import Comparison, Run, Variant
from mprun.study.compare.times import LEAST, drift_share
from mprun.study.compare.verdicts import compare
from mprun.study.report import answer
from tests.study.compare.folders import run_of

ACCURACIES = (0.95, 0.96, 0.955)
WOBBLE = (0.99, 1.0, 1.01)
"""The seeds' step times scatter by a percent."""


def runs_with(variant: str, step_ms: float, **changes: Any) -> list[Run]:
    """A run for each seed."""
    return [
        run_of(variant, seed, accuracy=a, step_ms=step_ms * w, **changes)
        for seed, (a, w) in enumerate(zip(ACCURACIES, WOBBLE, strict=True))
    ]


def faulty(variant: str, arithmetic_ms: float, faults: float, price_us: float = 0.6) -> list[Run]:
    """Runs whose page faults are part of their steps."""
    runs = []
    for seed, wobble in enumerate(WOBBLE):
        step_ms = arithmetic_ms * wobble + faults * price_us * 1e-3
        change = {"page_faults_per_step": faults, "hardware__page_fault_us": price_us}
        accuracy = ACCURACIES[seed]
        runs.append(run_of(variant, seed, accuracy=accuracy, step_ms=step_ms, **change))
    return runs


def seen(**conditions: float) -> dict[str, Any]:
    """A run's conditions; what is not named is not known."""
    unknown = dict.fromkeys(field.name for field in fields(Conditions))
    return {"conditions": Conditions(**{**unknown, **conditions})}


def compared(*runs: list[Run]) -> Comparison:
    return compare([x for group in runs for x in group], margin=0.005, relative_margin=0.02)


def other(*runs: list[Run]) -> Variant:
    return compared(*runs).variants[1]


def causes(variant: Variant) -> list[str]:
    return [artefact.cause for artefact in variant.artefacts]


def word(variant: Variant) -> int:
    """1 if its step time is shown to be longer, -1 if shorter, else 0."""
    ratio = variant.step_time_ratio
    if ratio is None or ratio.interval is None:
        return 0
    return int(ratio.interval.low > 1) - int(ratio.interval.high < 1)


# ---- page faults ---------------------------------------------------------------------------------


def test_faults_of_the_baseline_do_not_make_a_variant_faster() -> None:
    """18 of fp32's 40 ms are page faults: bf16 takes 20 of 22 ms of arithmetic, not of 40."""
    found = compared(faulty("fp32", 22.0, 30_000), faulty("bf16_mixed", 20.0, 0))
    variant = found.variants[1]
    (artefact,) = variant.artefacts
    assert artefact.cause == "page_faults"
    assert artefact.step_time_ratio == pytest.approx(20 / 22, rel=1e-3)
    assert "page faults take 45 % of fp32's step and 0 % of bf16_mixed's" in artefact.text
    assert "without that, the time ratio of bf16_mixed would be 0.91, not 0.50" in artefact.text
    assert variant.no_time_verdict == artefact.text
    assert word(variant) == 0
    assert not any("faster" in line and "No variant" not in line for line in answer.headline(found))
    (sentence,) = answer.variant_sentences(found)
    assert "has no verdict on speed" in sentence
    (warning,) = found.warnings
    assert warning.startswith("no verdict on the times of bf16_mixed: page faults take 45 %")
    assert "speed=auto" in warning


@pytest.mark.parametrize(
    ("base", "variant"),
    [((22.0, 500), (20.0, 500)), ((22.0, 0), (20.0, 0)), ((40.0, 1000), (20.0, 0))],
    ids=["equal and few", "none", "little of a large difference"],
)
def test_faults_that_explain_little_change_nothing(
    base: tuple[float, float], variant: tuple[float, float]
) -> None:
    found = other(faulty("fp32", *base), faulty("bf16_mixed", *variant))
    assert causes(found) == []
    assert found.no_time_verdict == ""
    assert word(found) == -1


MS = st.floats(1.0, 100.0)


@settings(max_examples=150)
@given(MS, MS, st.floats(0, 60_000), st.floats(0, 60_000))
def test_a_verdict_that_is_given_is_that_of_the_arithmetic(
    base_ms: float, own_ms: float, base_faults: float, own_faults: float
) -> None:
    """Up to a difference of `LEAST`, whose verdict is left to the noise."""
    given_word = word(
        other(faulty("fp32", base_ms, base_faults), faulty("bf16_mixed", own_ms, own_faults))
    )
    assert given_word == 0 or (own_ms / base_ms) ** given_word > 1 / LEAST


# ---- the other causes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "base", "variant", "base_ms"),
    [
        ("allocator", {"backend__allocator": "glibc"}, {"backend__allocator": "glibc-steady"}, 40),
        ("load", seen(other_load=0.4, steal=0.05), seen(other_load=0.0, steal=0.0), 40),
        ("load", seen(other_load=0.1, steal=0.4), seen(other_load=0.01), 40),
        ("drift", seen(drift=1.5), seen(drift=1.0), 22),
        ("drift", seen(drift=0.6), seen(drift=1.0), 22),
    ],
)
def test_each_cause_withholds_the_verdict(
    cause: str, base: dict[str, Any], variant: dict[str, Any], base_ms: float
) -> None:
    found = compared(runs_with("fp32", base_ms, **base), runs_with("bf16_mixed", 20.0, **variant))
    assert causes(found.variants[1]) == [cause]
    assert word(found.variants[1]) == 0
    assert len(found.warnings) == 1


@pytest.mark.parametrize("drift", [1.5, 1 / 1.5])
def test_a_median_step_exceeds_the_fast_end_by_half_of_the_drift(drift: float) -> None:
    """In logarithms, whether the run became slower or faster: a factor of the root of 1.5."""
    run = run_of("fp32", 0, accuracy=0.95, step_ms=10.0, **seen(drift=drift))
    share = drift_share(run.summary)
    assert share is not None
    assert 1 / (1 - share) == pytest.approx(1.5**0.5)


@pytest.mark.parametrize(
    "conditions",
    [
        {"backend__allocator": "glibc"},
        seen(other_load=0.4, steal=0.05, drift=1.5),
    ],
    ids=["allocator", "load and drift"],
)
def test_what_both_had_alike_changes_nothing(conditions: dict[str, Any]) -> None:
    variant = other(runs_with("fp32", 22, **conditions), runs_with("bf16_mixed", 20, **conditions))
    assert causes(variant) == []
    assert word(variant) == -1


def test_load_that_only_scatters_the_times_is_noise() -> None:
    """Load slowed each variant's runs in turn: the interval is wide, and the ratio hardly moves."""
    loads = {"fp32": (0.5, 0.0, 0.25), "bf16_mixed": (0.0, 0.5, 0.25)}
    runs = [
        run_of(mode, seed, accuracy=0.95, step_ms=ms / (1 - load), **seen(other_load=load))
        for mode, ms in (("fp32", 22.0), ("bf16_mixed", 20.0))
        for seed, load in enumerate(loads[mode])
    ]
    variant = other(runs)
    assert causes(variant) == []
    assert word(variant) == 0


@pytest.mark.parametrize("one", [{}, seen(), {"backend__allocator": "glibc"}], ids=str)
def test_a_record_that_does_not_tell_is_judged_as_before(one: dict[str, Any]) -> None:
    faults = {"page_faults_per_step": 3000.0, "hardware__page_fault_us": 0.6}
    told = {**seen(other_load=0.9, drift=9.0), **faults}
    variant = other(runs_with("fp32", 22, **told), runs_with("bf16_mixed", 20, **one))
    assert causes(variant) == []
    assert word(variant) == -1


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"hardware__cores": 16, **seen(other_load=0.4, steal=0.0)},
        {"hardware__device": "cuda", **seen(other_load=0.9)},
    ],
    ids=["load beside free CPUs", "load of a GPU's host"],
)
def test_what_takes_no_time_is_no_artefact(elsewhere: dict[str, Any]) -> None:
    quiet = {**elsewhere, **seen(other_load=0.0, steal=0.0)}
    variant = other(runs_with("fp32", 22, **elsewhere), runs_with("bf16_mixed", 20, **quiet))
    assert causes(variant) == []


@pytest.mark.parametrize(
    "hostile",
    [
        {"page_faults_per_step": 1e99, "hardware__page_fault_us": 1e99},
        {"page_faults_per_step": -1e99, "hardware__page_fault_us": 1.0},
        seen(other_load=-9.0, steal=1e99, drift=-2.0),
        seen(other_load=1e99, drift=1e-300),
        {"backend__threads": 0, "hardware__cores": 0, **seen(other_load=1.0, drift=0.0)},
    ],
    ids=str,
)
def test_figures_of_a_damaged_record_do_not_end_a_comparison(hostile: dict[str, Any]) -> None:
    shape = {k: v for k, v in hostile.items() if k in ("backend__threads", "hardware__cores")}
    calm = {"page_faults_per_step": 1.0, **seen(other_load=0.0, drift=1.0)}
    base = runs_with("fp32", 22, **{"hardware__page_fault_us": 1.0, **calm, **shape})
    assert other(base, runs_with("bf16_mixed", 20, **hostile)).step_time_ratio is not None


# ---- a ratio that the medians beside it do not give ----------------------------------------------


def test_a_time_ratio_beside_medians_of_another_ratio_is_explained() -> None:
    """The third run of bf16 took 4 ms: that moves the mean of the pairs, and no median."""

    def noted(*last_ms: float) -> list[str]:
        steps = {"fp32": (2.0, 2.04, 2.1), "bf16_mixed": (2.0, 2.06, *last_ms)}
        runs = [
            [run_of(name, seed, accuracy=ACCURACIES[seed], step_ms=ms) for seed, ms in enumerate(x)]
            for name, x in steps.items()
        ]
        return [note for note in compared(*runs).notes if "time ratio" in note]

    assert noted(4.0) == [
        "bf16_mixed: its time ratio, 1.24, is the mean over 3 pairs of equal seed; the medians of "
        "all runs (2.06 and 2.04 ms) have the ratio 1.01: some runs were slower than the others"
    ]
    assert noted(2.12) == []
