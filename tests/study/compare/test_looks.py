"""The looks of a study: their levels, the chance to be settled, the verdicts that they give."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.error_rates import study
from mprun.study.compare.comparison import Comparison, Run
from mprun.study.compare.looks import PlannedLooks, chance_to_settle, planned_looks
from mprun.study.compare.statistics import (
    ALPHA,
    Sample,
    difference_p,
    equivalence_p,
    summarise,
)
from mprun.study.compare.verdicts import compare
from tests.study.compare.folders import runs_of

MARGIN = 0.005
TWO = PlannedLooks(tuple(range(7)), planned_looks(7))  # After 4 and 7 seeds


@given(st.integers(2, 1000))
def test_the_levels_add_up_to_the_error_of_one_test(limit: int) -> None:
    looks = planned_looks(limit)
    assert math.isclose(sum(look.level for look in looks), ALPHA)
    pairs = [look.pairs for look in looks]
    assert pairs == sorted(set(pairs))
    assert pairs[-1] == limit
    assert all(b / a <= 2 for a, b in pairwise(pairs))


@pytest.mark.parametrize(
    ("n", "mean", "sd"), [(4, 0.0, 1.0), (4, 0.6, 1.5), (7, 1.4, 1.0), (10, 0.9, 3.0)]
)
def test_the_chance_is_that_of_drawn_means(n: int, mean: float, sd: float) -> None:
    last = planned_looks(20)[-1]
    rng = np.random.default_rng(0)
    drawn = mean + sd * math.sqrt(1 / n - 1 / last.pairs) * rng.standard_t(n - 1, 20_000)
    finals = [Sample(last.pairs, float(x), sd) for x in drawn]
    settled = [equivalence_p(x, 1.0) <= last.level or difference_p(x) <= last.level for x in finals]
    chance = chance_to_settle(Sample(n, mean, sd), 1.0, last)
    assert abs(chance - np.mean(settled)) < 4 * 0.5 / math.sqrt(20_000)  # four standard errors


def test_without_any_spread_the_chance_is_known() -> None:
    last = planned_looks(20)[-1]
    assert chance_to_settle(Sample(4, 0.0, 0.0), 0.005, last) == 1
    assert chance_to_settle(Sample(4, 0.02, 0.0), 0.005, last) == 1


# ---- verdicts ------------------------------------------------------------------------------------

BASE = [0.90, 0.91, 0.92, 0.90, 0.91, 0.92, 0.90]


def shifted(points: Sequence[float]) -> list[float]:
    """The baseline's accuracies with these differences, in points."""
    return [a + x / 100 for a, x in zip(BASE, points, strict=False)]


CLOSE = [0.05, -0.05, 0.02, -0.02]  # Settled at the first look
OPEN = [0.6, -0.2, 0.5, -0.1, 1.5, -1.4, 1.2]  # After 4 there is hope, after 7 none
WILD = [1.5, -1.5, 1.2, -1.3, 1.1, -1.2, 0.3]


def looked(*variants: tuple[str, list[float]], looks: PlannedLooks | None = TWO) -> Comparison:
    """The comparison of variants with fp32."""
    runs: list[Run] = runs_of("fp32", BASE)
    for name, points in variants:
        runs += runs_of(name, shifted(points))
    return compare(runs, margin=MARGIN, relative_margin=0.02, baseline="fp32", looks=looks)


def test_a_variant_is_judged_by_the_look_that_settled_it_whatever_ran_later() -> None:
    found = looked(("bf16_mixed", CLOSE)).variants[1]
    assert (found.verdict.word, found.verdict.closed) == ("equivalent", "settled")
    assert [row.pairs for row in found.looks] == [4]
    # runs beyond the look, which another process had begun, change nothing
    later = looked(("bf16_mixed", [*CLOSE, 3.0, 4.0, 5.0])).variants[1]
    assert later.verdict == found.verdict
    assert later.difference == found.difference


def test_an_open_variant_is_judged_again_at_the_next_look_and_closed_at_the_last() -> None:
    first = looked(("bf16_mixed", OPEN[:6])).variants[1]  # the second look is not complete
    assert (first.verdict.word, first.verdict.closed) == ("inconclusive", "")
    assert first.difference is not None
    assert first.difference.n == 4
    second = looked(("bf16_mixed", OPEN)).variants[1]
    assert [row.pairs for row in second.looks] == [4, 7]
    assert second.verdict.closed == "hopeless"
    assert second.difference is not None
    assert second.difference.n == 7


def test_before_the_first_look_nothing_is_judged() -> None:
    found = looked(("bf16_mixed", CLOSE[:3])).variants[1]
    assert found.verdict.word == "inconclusive"
    assert "first look is after 4 seeds" in found.verdict.reason
    assert found.looks == ()


def test_levels_and_families_are_those_of_holm_over_the_looks() -> None:
    # Settled at the first look: it leaves the family of equivalence, not that of differences
    found = looked(("bf16_mixed", CLOSE), ("tf32", OPEN))
    one, other = found.variants[1:]
    assert [row.word for row in one.looks] == ["equivalent"]
    first, second = planned_looks(7)
    sample = summarise([x / 100 for x in CLOSE], 1 / 10_000)
    assert equivalence_p(sample, MARGIN) <= first.level / 2
    assert one.verdict.level == pytest.approx(1 - 2 * first.level / 2)
    # at the second look the other is alone with its equivalence, and one of two differences
    widest = max(1 - 2 * second.level, 1 - second.level / 2)
    assert other.looks[1].level == pytest.approx(widest)


def test_a_hopeless_variant_says_what_it_would_take() -> None:
    looks = PlannedLooks(tuple(range(8)), planned_looks(8))  # after 4, 7 and 8
    verdict = looked(("bf16_mixed", WILD), looks=looks).variants[1].verdict
    assert (verdict.word, verdict.closed) == ("inconclusive", "hopeless")
    assert "chance to be settled by 8 seeds" in verdict.reason
    assert verdict.more_seeds
    assert verdict.more_seeds > 1


def test_a_variant_that_fails_is_worse_at_its_first_look() -> None:
    runs = runs_of("fp32", BASE[:4]) + runs_of("fp16_mixed", shifted(CLOSE))
    failed = runs[-1].summary
    failed.status, failed.error = "failed", "the loss became nan"
    found = compare(runs, margin=MARGIN, relative_margin=0.02, looks=TWO).variants[1]
    assert (found.verdict.word, found.verdict.closed) == ("worse", "settled")


def test_the_table_says_that_looks_were_planned() -> None:
    notes = looked(("bf16_mixed", CLOSE)).notes
    assert any(note.startswith("looks after 4, 7 seeds, planned before") for note in notes)
    assert not any("in common" in note for note in notes)  # fewer seeds are no mishap here


def test_the_verdicts_are_those_of_the_simulation() -> None:
    """`benchmarks.error_rates` has the same rule over arrays, from which its figures come."""
    rng, looks = np.random.default_rng(1), planned_looks(10)
    names = ("bf16_mixed", "tf32", "bf16_true")
    words = Counter[str]()
    for _ in range(25):
        spread = float(rng.choice([0.2, 0.5, 1.5]))
        drawn = spread * rng.normal(rng.choice([0.0, 2.0], 3), 1, (10, 3))
        expected = study(drawn[None], looks, 1 / 10_000 / MARGIN)
        runs = runs_of("fp32", [0.9] * 10)
        for i, name in enumerate(names):
            runs += runs_of(name, list(0.9 + MARGIN * drawn[:, i]))
        planned = PlannedLooks(tuple(range(10)), looks)
        found = compare(runs, margin=MARGIN, relative_margin=0.02, looks=planned).variants[1:]
        order = [names.index(v.label) for v in found]
        words.update(v.verdict.word for v in found)
        for i, v in zip(order, found, strict=True):
            assert expected.equivalent[0, i] == (v.verdict.word == "equivalent")
            assert expected.different[0, i] == (v.verdict.word in ("better", "worse"))
            assert expected.pairs[0, i] == v.looks[-1].pairs
            hopeless = expected.hopeless[0, i]
            assert not hopeless or v.verdict.closed == "hopeless"
    assert words["equivalent"]
    assert words["inconclusive"]
    assert words["worse"] + words["better"]
