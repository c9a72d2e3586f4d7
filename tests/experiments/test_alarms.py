"""What in a record is alarming."""

from __future__ import annotations

from typing import Any

import pytest

from mprun.experiments.alarms import alarms
from mprun.records.run_record import LossScaleRow, Summary
from tests.summaries import example


def steps(skipped: set[int], every: int = 1) -> list[dict[str, Any]]:
    """What a run of 100 steps leaves with `train.log_every`: every skipped step is in it."""
    kept = (i for i in range(1, 101) if i % every == 0 or i in skipped)
    return [{"kind": "step", "step": i, "skipped": i in skipped} for i in kept]


def of_100() -> Summary:
    summary: Summary = example()
    summary.steps = 100
    return summary


def test_a_clean_run_has_none() -> None:
    assert alarms(of_100(), steps(set())) == []
    assert alarms(example(), []) == []


def test_steps_skipped_while_a_scale_is_found_are_none() -> None:
    assert alarms(of_100(), steps(set(range(1, 17)))) == []
    assert alarms(of_100(), steps({60, 80})) == []


@pytest.mark.parametrize("every", [1, 20, 1000])
def test_what_is_logged_decides_nothing(every: int) -> None:
    assert alarms(of_100(), steps({60, 80}, every)) == []
    assert len(alarms(of_100(), steps({60, 70, 80}, every))) == 1


def test_steps_skipped_again_and_again_are_one() -> None:
    (text,) = alarms(of_100(), steps({60, 70, 80}))
    assert text == "3 of the last 50 steps were skipped: gradients overflow"


@pytest.mark.parametrize(
    ("kind", "final", "n"), [("dynamic", 0.5, 1), ("dynamic", 1.0, 0), ("static", 0.5, 0)]
)
def test_a_scale_that_fell_below_one(kind: str, final: float, n: int) -> None:
    summary: Summary = example()
    summary.loss_scale = LossScaleRow(kind=kind, initial=65536.0, final=final)
    assert len(alarms(summary, [])) == n


def test_a_loss_that_is_not_finite() -> None:
    summary: Summary = example()
    summary.history[0].validation.loss = "nan"
    assert alarms(summary, []) == ["a validation loss was not finite"]
