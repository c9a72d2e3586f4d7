"""Which weights of the runs a comparison judges: the last ones, or averaged ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mprun.errors import UsageError
from mprun.records.run_record import AveragedScores, Scores
from mprun.study.compare.comparison import Comparison, Run
from mprun.study.compare.verdicts import compare
from mprun.study.report.answer import margin_text
from mprun.study.report.cells import axis_name, metric_name
from mprun.study.report.exports import json_text
from tests.study.compare.folders import run_of

LAST = {"fp32": [0.90, 0.93, 0.88, 0.91], "bf16_mixed": [0.93, 0.89, 0.92, 0.88]}
MEAN = {"fp32": [0.94, 0.95, 0.94, 0.95], "bf16_mixed": [0.9401, 0.9501, 0.9399, 0.9500]}


def of_mean(accuracy: float, places: int = 5, **changes: Any) -> AveragedScores:
    none = Scores(loss=None, accuracy=None)
    test = changes.pop("test", Scores(loss=1.0, accuracy=accuracy))
    return AveragedScores(places=places, validation=changes.pop("validation", none), test=test)


def runs(left_out: int = 0, places: int = 5) -> list[Run]:
    """Eight runs; the last `left_out` have no averaged weights."""
    made = [
        run_of(mode, seed, accuracy=last, averaged=of_mean(MEAN[mode][seed], places + seed))
        for mode, every in LAST.items()
        for seed, last in enumerate(every)
    ]
    for run in made[len(made) - left_out :]:
        run.summary.averaged = None
    return made


def judged(found: list[Run], **options: Any) -> Comparison:
    return compare(found, margin=0.005, relative_margin=0.02, **options)


def test_auto_judges_averaged_weights_where_every_run_has_them() -> None:
    found = judged(runs())
    (variant,) = found.variants[1:]
    assert (found.weights, found.places, found.split) == ("averaged", 5, "test")
    assert variant.metric is not None
    assert variant.metric.value == pytest.approx(sum(MEAN["bf16_mixed"]) / 4)
    assert variant.verdict.word == "equivalent"
    content = json.loads(json_text(found))
    assert (content["weights"], content["places"]) == ("averaged", 5)


@pytest.mark.parametrize("weights", ["last", "auto"])
def test_last_weights_are_judged_as_if_there_were_no_others(weights: str) -> None:
    with_mean = runs() if weights == "last" else runs(left_out=1)
    found, plain = judged(with_mean, weights=weights), judged(runs(left_out=8))
    assert (found.weights, found.places) == ("last", None)
    for row, other in zip(found.variants, plain.variants, strict=True):
        assert (row.metric, row.difference, row.verdict) == (
            *(other.metric, other.difference, other.verdict),
        )
    assert found.variants[1].verdict.word == "inconclusive"


def test_a_note_says_that_runs_without_averaged_weights_make_the_last_ones_judged() -> None:
    note = "the last weights are judged: 3 of 8 runs averaged none"
    assert note in judged(runs(left_out=3)).notes
    assert not [x for x in judged(runs(left_out=8)).notes if "averaged" in x]


def test_averaged_is_refused_where_runs_lack_them() -> None:
    text = "3 of 8 runs have no test metric of averaged weights; legal: auto, last"
    with pytest.raises(UsageError, match=text):
        judged(runs(left_out=3), weights="averaged")
    with pytest.raises(UsageError, match="8 of 8 runs have no train metric"):
        judged(runs(), weights="averaged", split="train")
    assert judged(runs(), weights="averaged").weights == "averaged"
    assert judged(runs(), split="train").weights == "last"


def test_a_mean_that_is_not_finite_counts_against_its_variant() -> None:
    found = runs()
    for run in found:
        run.summary.metric.name, run.summary.metric.higher_is_better = "loss", False
    found[-1].summary.averaged = of_mean(0.9, test=Scores(loss="nan", accuracy=None))
    (variant,) = judged(found).variants[1:]
    assert variant.verdict.word == "worse"
    assert variant.verdict.reason == "1 of 4 runs ended with loss nan"


def test_the_metric_is_named_in_full_where_it_is_named_first() -> None:
    found = judged(runs())
    assert metric_name(found) == "test accuracy of averaged weights (5 places of the last tenth)"
    assert axis_name(found) == "test accuracy of averaged weights"
    assert margin_text(found) == (
        "differences of test accuracy of averaged weights (5 places of the last tenth) within 0.50 "
        "points do not matter"
    )
    last = judged(runs(), weights="last")
    assert metric_name(last) == axis_name(last) == "test accuracy"
