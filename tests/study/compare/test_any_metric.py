"""Comparisons by any metric: its direction and its margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from mprun.records.run_record import Metric, MetricRow, Scores, metric_rows
from mprun.study.compare.comparison import Comparison, Run
from mprun.study.compare.load import score
from mprun.study.compare.verdicts import compare
from tests.study.compare.folders import run_of, summary_of

SEEDS = 6
NOISE = (0.001, -0.002, 0.0, 0.003, -0.001, 0.002)


def judged(variant: str, values: Sequence[float], name: str, more_is_better: bool) -> list[Run]:
    """A run for each value of a metric over the test set."""
    runs = []
    for seed, value in enumerate(values):
        run = run_of(variant, seed)
        run.summary.metric = Metric(name=name, higher_is_better=more_is_better)
        run.summary.test.metrics = {name: value}
        run.summary.metrics = metric_rows(None, run.summary.test)
        runs.append(run)
    return runs


def comparison(
    base: float, other: float, name: str, more_is_better: bool, **changes: Any
) -> Comparison:
    ours = [other * (1 + x) for x in NOISE]
    theirs = [base * (1 - x) for x in NOISE]
    runs = [
        *judged("fp32", theirs, name, more_is_better),
        *judged("bf16_mixed", ours, name, more_is_better),
    ]
    return compare(runs, **{"margin": 0.005, "relative_margin": 0.02, **changes})


@pytest.mark.parametrize(
    ("base", "other", "name", "more_is_better", "word"),
    [
        (20.0, 30.0, "perplexity", False, "worse"),
        (20.0, 15.0, "perplexity", False, "better"),
        (20.0, 20.05, "perplexity", False, "equivalent"),
        (20.0, 30.0, "bleu", True, "better"),
        (0.80, 0.90, "f1", True, "better"),
        (0.80, 0.70, "error_rate", False, "better"),
    ],
)
def test_the_direction_of_the_metric_decides(
    base: float, other: float, name: str, more_is_better: bool, word: str
) -> None:
    table = comparison(base, other, name, more_is_better)
    assert table.variants[1].verdict.word == word
    assert (table.metric, table.higher_is_better) == (name, more_is_better)


def test_points_for_fractions_of_which_more_is_better_shares_for_all_else() -> None:
    # 0.4 points of 0.2 are 2 %: the point margin holds where the relative one would not.
    points = comparison(0.2, 0.203, "f1", True, relative_margin=0.001)
    assert not points.is_relative
    assert points.margin == 0.005
    assert points.variants[1].verdict.word == "equivalent"
    # 0.3 of 20 are 1.5 %, and 0.003 of 0.2 too: both inside 2 %, far outside half a point of 100.
    for base, name, more in ((20.0, "bleu", True), (0.2, "error_rate", False)):
        shares = comparison(base, base * 1.015, name, more, margin=1e-9)
        assert shares.is_relative
        assert shares.margin == 0.02
        assert shares.variants[1].verdict.word == "equivalent"
        difference = shares.variants[1].difference
        assert difference.value == pytest.approx(0.015, abs=0.003)


def test_a_diverged_metric_is_worse_whatever_the_direction() -> None:
    for more_is_better in (True, False):
        runs = judged("fp32", [20.0, 21.0], "x", more_is_better)
        runs += judged("bf16_mixed", [20.0, math.inf], "x", more_is_better)
        (_, other) = compare(runs, margin=0.005, relative_margin=0.02).variants
        assert other.verdict.word == "worse"
        assert "ended with x inf" in other.verdict.reason


def test_the_metric_of_each_split_is_of_its_scores() -> None:
    summary = summary_of()
    summary.metric = Metric(name="f1", higher_is_better=True)
    last = summary.history[-1]
    last.train.metrics, last.validation.metrics = {"f1": 0.1}, {"f1": "nan"}
    summary.test.metrics = {"f1": 0.3}
    assert score(summary, "train") == 0.1
    assert math.isnan(score(summary, "validation") or 0.0)
    assert score(summary, "test") == 0.3
    rows = metric_rows(last, summary.test)
    assert rows["f1"] == MetricRow(train=0.1, validation="nan", test=0.3)
    assert rows["accuracy"].test == summary.test.accuracy
    assert metric_rows(None, Scores(loss=None, accuracy=None)) == {}
