"""Whether a batch is doubled."""

from __future__ import annotations

from mprun.experiments.double import double
from tests.experiments import comparison, variant


def test_faster_and_as_good_is_doubled_with_the_best_rule() -> None:
    found = double(
        comparison(
            variant("x2", metric=0.91),
            variant("x2 linear", metric=0.92),
            variant("x2 sqrt", "worse", metric=0.93),
        )
    )
    assert (found.answer, found.label) == ("double it", "x2 linear")
    assert found.reason.startswith("x2 linear: 2.00 [1.90, 2.10] of the base batch's samples")


def test_of_losses_the_lowest_is_best() -> None:
    rows = comparison(variant("a", metric=0.5), variant("b", metric=0.4), higher_is_better=False)
    assert double(rows).label == "b"


def test_no_faster_is_not_doubled() -> None:
    slow = (0.9, 0.8, 1.0)
    found = double(comparison(variant("a", throughput=slow), variant("b", throughput=slow)))
    assert (found.answer, found.label) == ("don't", None)
    assert found.reason.startswith("it is no faster: 0.90 [0.80, 1.00]")


def test_worse_with_every_rule_is_not_doubled() -> None:
    failed = double(comparison(variant("a", "worse", throughput=None)))
    assert failed.answer == "don't"
    found = double(comparison(variant("a", "worse"), variant("b", "worse")))
    assert found.answer == "don't"
    assert "worse with every learning-rate rule" in found.reason


def test_what_cannot_be_told_is_not_told() -> None:
    undecided = double(comparison(variant("a", "worse"), variant("b", "inconclusive")))
    assert undecided.answer == "inconclusive"
    noisy = double(comparison(variant("a", throughput=(1.1, 0.9, 1.3))))
    assert noisy.answer == "inconclusive"
    unknown = double(comparison(variant("a", throughput=None)))
    assert (unknown.answer, unknown.reason) == (
        "inconclusive",
        "no step was timed, the runs are too short",
    )
    assert double(comparison()).answer == "inconclusive"
    emulated = double(comparison(variant("a", throughput=None, execution="emulated")))
    assert emulated.answer == "inconclusive"
    assert "emulated" in emulated.reason
