"""What in a record is alarming."""

from __future__ import annotations

from typing import Any

import pytest

from mprun.record import Summary
from mprun.study.alarms import alarms
from tests.summaries import example


def steps(skipped: set[int], n: int = 100) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": i, "skipped": i in skipped} for i in range(1, n + 1)]


def test_a_clean_run_has_none() -> None:
    assert alarms(example(), steps(set())) == []
    assert alarms(example(), []) == []


def test_steps_skipped_while_a_scale_is_found_are_none() -> None:
    assert alarms(example(), steps(set(range(1, 17)))) == []
    assert alarms(example(), steps({60, 80})) == []


def test_steps_skipped_again_and_again_are_one() -> None:
    (text,) = alarms(example(), steps({60, 70, 80}))
    assert text == "3 of the last 50 steps were skipped: gradients overflow"


@pytest.mark.parametrize(
    ("kind", "final", "n"), [("dynamic", 0.5, 1), ("dynamic", 1.0, 0), ("static", 0.5, 0)]
)
def test_a_scale_that_fell_below_one(kind: str, final: float, n: int) -> None:
    summary: Summary = example()
    summary["loss_scale"] = {"kind": kind, "initial": 65536.0, "final": final}
    assert len(alarms(summary, [])) == n


def test_a_loss_that_is_not_finite() -> None:
    summary: Summary = example()
    summary["history"][0]["validation"]["loss"] = "nan"
    assert alarms(summary, []) == ["a validation loss was not finite"]
