"""One decision between two folders, and the levels of a stream of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks.change_stream import STREAMS, by_level, streams
from mprun.errors import UsageError
from mprun.study.compare import decision
from mprun.study.compare.comparison import Comparison, Run
from mprun.study.compare.decision import (
    Claim,
    Decision,
    decide,
    decide_in_stream,
    next_level,
    two_sides,
)
from mprun.study.compare.verdicts import compare
from tests.study.compare.folders import run_of, runs_of

BEFORE = [0.950, 0.960, 0.955, 0.945, 0.952]
NOISE = [0.0001, -0.0002, 0.0003, 0.0, -0.0001]
GAIN = [0.010, 0.012, 0.011, 0.009, 0.013]


def side(folder: str, gains: Sequence[float], **changes: Any) -> list[Run]:
    """Runs of fp32 in a folder, better than `BEFORE` by these differences."""
    return [
        run_of("fp32", seed, Path(folder, f"{seed}"), accuracy=BEFORE[seed] + gain, **changes)
        for seed, gain in enumerate(gains)
    ]


def compared(gains: Sequence[float], name: str = "b", alpha: float = 0.05) -> Comparison:
    """Folder `name`, better than folder a by these differences."""
    runs = [*side("a", [0.0] * 5), *side(name, gains)]
    sides, base, mix = two_sides([Path("a"), Path(name)], runs, [])
    terms = {"margin": 0.005, "relative_margin": 0.02, "alpha": alpha}
    return compare(sides, baseline=base, mix=mix, **terms)  # type: ignore[arg-type]


def asked(file: Path, gains: Sequence[float], name: str = "b", claim: Claim = "better") -> Decision:
    return decide_in_stream(file, claim, lambda alpha: compared(gains, name, alpha))[1]


# ---- the sides -----------------------------------------------------------------------------------


def test_one_variant_in_two_folders_has_two_sides_whose_code_may_differ() -> None:
    runs = [*side("a", NOISE, git_commit="1"), *side("x/b", GAIN, git_commit="2")]
    sides, base, mix = two_sides([Path("a"), Path("x/b/summary.json")], runs, [])
    assert [r.summary.variant for r in sides] == ["fp32 (a)"] * 5 + ["fp32 (x/b)"] * 5
    assert base == sides[0].summary.variant_hash != sides[5].summary.variant_hash
    assert list(mix) == ["code"]
    assert [r.summary.variant for r in runs] == ["fp32"] * 10  # of the records nothing changes


def test_code_may_not_differ_within_a_folder() -> None:
    runs = [*side("a", NOISE), *side("b", [0.0]), *side("b", [0.0], git_commit="2")]
    with pytest.raises(UsageError, match=r"in code \(commit=None in 1 run; commit=2 in 1 run\)"):
        two_sides([Path("a"), Path("b")], runs, [])
    assert len(two_sides([Path("a"), Path("b")], runs, ["code"])[0]) == 7


def test_of_two_folders_the_first_is_the_baseline_whatever_their_modes() -> None:
    runs = [
        *(run_of("bf16_mixed", i, Path(f"a/{i}")) for i in range(2)),
        *(run_of("fp32", i, Path(f"b/{i}")) for i in range(2)),
    ]
    sides, base, mix = two_sides([Path("a"), Path("b")], runs, [])
    found = compare(sides, baseline=base, mix=mix, margin=0.005, relative_margin=0.02)
    assert [v.label for v in found.variants] == ["bf16_mixed (a)", "fp32 (b)"]
    assert [v.precision for v in found.variants] == ["bf16_mixed", "fp32"]


@pytest.mark.parametrize(("paths", "is_first"), [(["a"], False), (["a", "b", "c"], True)], ids=str)
def test_other_arguments_have_the_variants_of_any_comparison(
    paths: list[str], is_first: bool
) -> None:
    runs = [*side("a", NOISE), *side("b", GAIN)]
    sides, base, mix = two_sides(list(map(Path, paths)), runs, ["data"])
    assert (sides, list(mix)) == (runs, ["data"])
    assert base == (runs[0].summary.variant_hash if is_first else None)


@pytest.mark.parametrize(
    ("modes", "said"),
    [(["fp32"], "of 1: fp32;"), (["fp32", "bf16_mixed", "tf32"], "of 3: fp32, bf16_mixed, tf32;")],
    ids=str,
)
def test_a_decision_is_between_two_variants(modes: list[str], said: str) -> None:
    runs = [run for mode in modes for run in runs_of(mode, BEFORE)]
    with pytest.raises(UsageError, match=said) as caught:
        decide(compare(runs, margin=0.005, relative_margin=0.02), "better")
    assert "compare.baseline=LABEL" in str(caught.value)


# ---- the decision --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gains", "claim", "word", "keep"),
    [
        (NOISE, "unharmed", "equivalent", True),
        (NOISE, "better", "equivalent", False),
        (GAIN, "unharmed", "better", True),
        (GAIN, "better", "better", True),
        ([-x for x in GAIN], "unharmed", "worse", False),
        ([-0.01, 0.02, 0.01, -0.02, 0.0], "unharmed", "inconclusive", None),
        ([-0.01, 0.02, 0.01, -0.02, 0.0], "better", "inconclusive", None),
        (GAIN[:1], "better", "inconclusive", None),
    ],
    ids=str,
)
def test_a_verdict_and_a_claim_make_a_decision(
    gains: list[float], claim: Claim, word: str, keep: bool | None
) -> None:
    found = decide(compared(gains), claim)
    assert (found.verdict, found.keep, found.seeds) == (word, keep, len(gains))
    assert (found.baseline, found.variant) == ("fp32 (a)", "fp32 (b)")
    assert found.difference == pytest.approx(np.mean(gains))
    assert (found.p is None) == (len(gains) == 1)


@pytest.mark.parametrize("gains", [GAIN, [-x for x in GAIN], NOISE], ids=str)
def test_p_values_are_scipys(gains: list[float]) -> None:
    """Of losses less is better, so that the other side is tested."""
    found = decide(compared(gains), "better")
    assert found.p == pytest.approx(stats.ttest_1samp(gains, 0, alternative="greater").pvalue)
    runs = [
        run_of(mode, seed, loss=0.5 + sign * gain, metric="loss")
        for mode, sign in (("fp32", 0), ("bf16_mixed", 1))
        for seed, gain in enumerate(gains)
    ]
    found = decide(compare(runs, margin=0.005, relative_margin=0.02), "better")
    assert found.p == pytest.approx(stats.ttest_1samp(gains, 0, alternative="less").pvalue)


DIFFERENCES = st.lists(st.floats(-0.02, 0.02), min_size=2, max_size=5)


@given(gains=DIFFERENCES, level=st.floats(0.0001, 0.05))
def test_p_is_the_smallest_level_at_which_a_change_is_kept(
    gains: list[float], level: float
) -> None:
    for claim, factor in (("better", 2), ("unharmed", 1)):
        found = decide(compared(gains, alpha=factor * level), claim)
        assert found.p is not None
        if abs(found.p / level - 1) > 1e-6:  # not where roundings decide
            # Equivalent goes first, and nothing is gained by it
            keeps = found.p < level and not (claim == "better" and found.verdict == "equivalent")
            assert bool(found.keep) == keeps


# ---- levels --------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=60))
def test_levels_never_spend_more_than_5_percent_for_each_change_kept(kept: list[bool]) -> None:
    """From this the error follows: the estimate of wrong ones is at most 5 % of those kept."""
    levels = [next_level(kept[:t]) for t in range(len(kept) + 1)]
    assert all(0 < level <= 0.05 for level in levels)
    for t in range(len(kept) + 1):
        assert sum(levels[: t + 1]) <= 0.05 * max(1, sum(kept[:t]))


def test_levels_are_those_of_the_paper() -> None:
    """LORD++ as in Ramdas et al., with the first wealth w: w g(t) + (5 % - w) g(t - k_1) + .."""
    zeta = 3.931949211809545  # of 1.3, from tables
    kept = [False, True, False, True, True, False]
    shares = [0.05 * (7 - t) ** -1.3 / zeta for t in (0, 4, 5)]
    assert next_level(kept) == pytest.approx(sum(shares), rel=1e-12)
    # All of the 5 % is spent by a stream that never ends: the rest is an integral
    spent = sum(next_level([False] * t) for t in range(1000))
    assert spent + 0.05 / zeta * 1000.5**-0.3 / 0.3 == pytest.approx(0.05, rel=1e-6)


@pytest.mark.parametrize("fresh", [True, False])
def test_few_streams_keep_a_change_that_changes_nothing(fresh: bool) -> None:
    wrong = streams(by_level, 5, 0.0, fresh).any(1).mean()
    assert 0.01 < wrong <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / STREAMS)


# ---- the file of a stream ------------------------------------------------------------------------


def test_each_decision_has_the_level_that_those_before_it_leave(tmp_path: Path) -> None:
    file, kept = tmp_path / "new" / "s.jsonl", list[bool | None]()
    for number, gains in enumerate([NOISE, GAIN, GAIN, GAIN, NOISE[:2]], start=1):
        found = asked(file, gains, f"b{number}")
        assert found.alpha == next_level(kept)
        assert (found.tests, found.stream) == (number, str(file))
        assert found.level == pytest.approx(
            1 - 2 * found.alpha * (1 + (found.verdict == "equivalent"))
        )
        kept.append(found.keep)
    assert kept[:4] == [False, True, True, True]
    lines = [json.loads(x) for x in file.read_text(encoding="utf-8").splitlines()]
    assert [x["decision"]["keep"] for x in lines] == kept
    spent = math.fsum(x["decision"]["alpha"] for x in lines)
    assert lines[-1]["wealth"] == pytest.approx(0.15 - spent)
    assert "variant: b1/0 2024-03-01T" in lines[0]["question"][6]


def test_the_same_question_has_the_same_answer_and_spends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    first = asked(file, GAIN)
    asked(file, NOISE, "c")
    before = file.read_bytes()
    comparison, again = decide_in_stream(file, "better", lambda alpha: compared(GAIN, "b", alpha))
    assert again == first
    assert comparison.variants[1].verdict.level == first.level  # the table says the same
    assert file.read_bytes() == before
    assert asked(file, GAIN, claim="unharmed").tests == 3  # another question


@pytest.mark.parametrize(
    "damage", [b"{", b"[]", b"\xff", b'{"time": "", "question": [], "wealth": 0}', b"[" * 9999]
)
def test_a_damaged_line_is_named(damage: bytes, tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    asked(file, NOISE)
    file.write_bytes(file.read_bytes() + damage)
    with pytest.raises(UsageError, match=r"s\.jsonl: line 2 is damaged .* restore it"):
        asked(file, GAIN, "c")


def test_a_file_that_cannot_be_had_is_a_mistake_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "LOCK_TIMEOUT_S", 0.0)
    with pytest.raises(UsageError, match="name another"):
        asked(tmp_path, NOISE)  # a folder
    file = tmp_path / "s.jsonl"
    with (
        FileLock(tmp_path / ".s.jsonl.lock"),
        pytest.raises(UsageError, match=r"cannot be locked, read or written \(.*lock"),
    ):
        asked(file, NOISE)
    assert not file.exists()


def test_decisions_made_at_once_follow_one_another(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda i: asked(file, NOISE, f"b{i}"), range(6)))
    assert sorted(x.tests or 0 for x in found) == [1, 2, 3, 4, 5, 6]
    assert len({x.alpha for x in found}) == 6
