"""No sentence about a comparison claims more than the interval in that same sentence carries.

Studies are drawn at random (numbers of seeds, effects, spreads, ties, equal values, collapsed
seeds, noisy times, orders of runs) and go through the real `compare` and the real sentences. The
oracle reads each sentence as a reader does: the words, the printed interval, the printed margin.
Equality may be claimed where the interval lies inside the margin, a difference where the interval
leaves out "no difference", and nothing otherwise. What was decided is checked against scipy's
p-values and the closed testing principle, of which Holm's method is a short cut.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mprun.records.run_record import Metric
from mprun.study.compare.comparison import Comparison, Run, Variant
from mprun.study.compare.times import SAME, WIDE
from mprun.study.compare.verdicts import compare
from mprun.study.report import answer, cells, exports
from tests.study.compare.folders import summary_of

SEEDS = (2, 3, 5, 10)
MARGIN = 0.005
RELATIVE_MARGIN = 0.02
NOON = datetime(2024, 3, 1, 12, tzinfo=timezone.utc)
TEMPLATE = summary_of()


class Study(NamedTuple):
    """What is simulated: a baseline and `variants` modes, all with the same truth."""

    n: int
    variants: int = 1
    metric: str = "accuracy"
    effect: float = 0.0
    """True difference, in margins; positive is a larger metric."""
    spread: float = 0.5
    """Standard deviation of the pairs' differences, in margins."""
    grid: float = 0.0
    """Values are multiples of this, so that they tie; 0 for none."""
    collapse: float = 0.0
    """The share of a mode's seeds that end with a metric far off."""
    speed: float = 1.0
    """True ratio of throughputs."""
    noise: float = 0.01
    """Standard deviation of a time's logarithm."""
    is_interleaved: bool = True


def run(name: str, seed: int, start: int, study: Study, value: float, step_ms: float) -> Run:
    """A run as its record has it."""
    value = round(value / study.grid) * study.grid if study.grid else value
    summary = replace(
        TEMPLATE,
        variant=name,
        variant_hash=name,
        precision=name,
        seed=seed,
        started_at=(NOON + timedelta(minutes=start)).isoformat(timespec="milliseconds"),
        test=replace(TEMPLATE.test, **{study.metric: value}),
        metric=Metric(name=study.metric, higher_is_better=study.metric == "accuracy"),
        step_time_ms=replace(TEMPLATE.step_time_ms, median=step_ms),
        samples_per_second=128e3 / step_ms,
    )
    return Run(Path(f"{name}-{seed}"), summary)


def simulated(study: Study, rng: np.random.Generator) -> Comparison:
    """One study of this kind, compared."""
    n, names = study.n, ["fp32", *(f"mode{i}" for i in range(study.variants))]
    level = 0.9 if study.metric == "accuracy" else 1.0
    margin = MARGIN if study.metric == "accuracy" else RELATIVE_MARGIN * level
    base = level + rng.normal(0, 0.002, n)
    runs = []
    for place, name in enumerate(names):
        differences = margin * (study.effect + rng.normal(0, study.spread, n)) if place else 0.0
        collapsed = rng.random(n) < study.collapse if place else np.zeros(n, bool)
        far_off = 0.1 if study.metric == "accuracy" else 5.0
        values = np.where(collapsed, far_off, base + differences)
        times_ms = 10 * np.exp(rng.normal(0, study.noise, n)) / (study.speed if place else 1.0)
        for seed in range(n):
            start = seed * len(names) + place if study.is_interleaved else place * n + seed
            runs.append(run(name, seed, start, study, float(values[seed]), float(times_ms[seed])))
    return compare(runs, margin=MARGIN, relative_margin=RELATIVE_MARGIN)


# ---- the oracle: what a reader reads -------------------------------------------------------------

NUMBER = r"([+-]?[\d.]+(?:e[+-]\d+)?)"
METRIC = re.compile(
    rf"(?P<verb>keeps|improves|worsens|leaves open whether it keeps) the (?:accuracy|loss)"
    rf"(?: \(about (?P<more>\d+) more seeds? would settle it\))?: {NUMBER} (?:points|%), "
    rf"(?P<level>[\d.]+) % interval {NUMBER} to {NUMBER}$"
)
SPEED = re.compile(
    rf"(?P<words>trains {NUMBER} times as fast|takes {NUMBER}x the time|"
    rf"trains as fast within 5 %|leaves speed open|"
    rf"has too few runs to judge speed|trains (?:faster|slower), with too few runs to estimate by "
    rf"how much|has no verdict on speed) "
    rf"\((?:ratio of samples per s|per sample|measured (?P<ratio>{NUMBER})x the samples per s)"
    rf"(?:, 95 % interval (?P<low>{NUMBER}) to (?P<high>{NUMBER}), n=(?P<n>\d+))?"
    rf"(?:; about (?P<more>\d+) more seeds? would settle it)?(?:; (?P<why>[a-z ,]+))?\)$"
)


def is_inside(low: float, high: float, margin: float) -> bool:
    """The printed ends are compared: one that is rounded onto the margin would mislead."""
    return -margin <= low and high <= margin


def check_metric_clause(clause: str, found: Comparison, word: str) -> None:
    """The verb is the one that the printed interval carries."""
    match = METRIC.match(clause)
    assert match is not None, clause
    low, high = (float(x) for x in match.groups()[-2:])
    margin = 100 * found.margin
    verb = match["verb"]
    upwards = "improves" if found.higher_is_better else "worsens"
    downwards = "worsens" if found.higher_is_better else "improves"
    words = {"keeps": "equivalent", "improves": "better", "worsens": "worse"}
    assert words.get(verb, "inconclusive") == word, clause
    if verb == "keeps":
        assert is_inside(low, high, margin), clause
    elif verb == upwards:
        assert low > 0, clause
    elif verb == downwards:
        assert high < 0, clause
    else:
        assert low <= 0 <= high, clause
        assert not is_inside(low, high, margin), clause


def check_speed_clause(clause: str, found: Variant) -> None:
    match = SPEED.match(clause)
    assert match is not None, clause
    words, ratio = match["words"], found.throughput_ratio
    if "no verdict" in words:
        assert match["low"] is None, clause
        assert match["why"], clause
        return
    low, high = float(match["low"]), float(match["high"])
    assert int(match["n"]) == ratio.n
    is_wide = ratio.interval is not None and ratio.interval.high > WIDE * ratio.value
    is_slower = "x the time" in words
    if is_slower or any(x in words for x in ("times as fast", "trains faster", "trains slower")):
        assert low > 1 or high < 1, clause
        assert is_slower == (ratio.value < 1 and "too few runs" not in words), clause
        assert not is_slower or low > 1, clause  # of the time, not of the speed
        assert ("faster" in words) <= (low > 1), clause
        assert ("slower" in words) <= (high < 1), clause
        assert ("too few runs" in words) == is_wide, clause
    elif "as fast within" in words:
        assert 1 / SAME <= low <= 1 <= high <= SAME, clause
    else:
        assert low <= 1 <= high, clause
        assert not (low > 1 / SAME and high < SAME), clause
        assert ("too few runs" in words) == is_wide, clause
    shown = re.search(rf"{NUMBER}x? (?:times as fast|the samples|the time)", clause)
    value = 1 / ratio.value if is_slower else ratio.value
    # The table has the same ratio; a hundredth is the last digit shown.
    assert float(shown[1]) == pytest.approx(value, abs=0.00501 + 0.005 * value)


def check(found: Comparison) -> None:
    """Every sentence and cell of a comparison against what it shows."""
    findings = zip(
        found.variants[1:], cells.rows(found)[1:], answer.variant_sentences(found), strict=True
    )
    for variant, row, finding in findings:
        clauses = split_clauses(finding)
        check_metric_clause(clauses[0], found, variant.verdict.word)
        check_speed_clause(clauses[1], variant)
        check_decision(found, variant)
        check_reason(found, variant)
        printed = METRIC.match(clauses[0])
        low, high = printed.groups()[-2:]
        assert row.difference[1].startswith(f"{low} to {high} ("), clauses[0]
        assert f"({printed['level']}%)" in row.difference[1]
        assert variant.verdict.level is not None
        assert printed["level"] == f"{100 * variant.verdict.level:.4g}"
    for sentence in answer.headline(found):
        check_headline(sentence, found)


def split_clauses(sentence: str) -> list[str]:
    """The clauses between semicolons that stand outside of brackets."""
    depth, clauses = 0, [""]
    for letter in sentence.removesuffix("."):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == ";" and depth == 0:
            clauses.append("")
        else:
            clauses[-1] += letter
    return [clause.strip() for clause in clauses]


def check_reason(found: Comparison, variant: Variant) -> None:
    """The reason under the table has an interval of its own, with the same meaning."""
    match = re.search(rf"the [\d.]+ % interval, {NUMBER} to {NUMBER} (?:points|%),",
                      variant.verdict.reason)  # fmt: skip
    assert match is not None, variant.verdict.reason
    low, high = map(float, match.groups())
    margin = 100 * found.margin
    match variant.verdict.word:
        case "equivalent":
            assert is_inside(low, high, margin), variant.verdict.reason
        case "inconclusive":
            assert low <= 0 <= high, variant.verdict.reason
            assert not is_inside(low, high, margin), variant.verdict.reason
        case _:
            assert low > 0 or high < 0, variant.verdict.reason


def check_headline(sentence: str, found: Comparison) -> None:
    """It names no variant whose interval does not carry what is said of it."""
    for variant in found.variants[1:]:
        if not sentence.startswith(f"{variant.label} "):
            continue
        assert variant.verdict.word in ("equivalent", "better"), sentence
        if "times as fast" in sentence or "trains faster" in sentence:
            ratio = variant.throughput_ratio
            assert ratio.interval.low > 1 or ratio.interval.high < 1, sentence
        return
    assert sentence.startswith("No variant was shown to keep"), sentence


def check_decision(found: Comparison, variant: Variant) -> None:
    """The interval that decided is scipy's of the paired differences at the level stated."""
    verdict = variant.verdict
    assert verdict.interval is not None
    assert verdict.level is not None
    differences = paired(found, variant)
    sd = float(np.std(differences, ddof=1))
    if found.metric == "accuracy":
        sd = max(sd, 1 / (TEMPLATE.data.test_samples * math.sqrt(12)))
    error, mean = sd / math.sqrt(len(differences)), float(np.mean(differences))
    half = stats.t.ppf((1 + verdict.level) / 2, len(differences) - 1) * error
    assert verdict.interval == pytest.approx((mean - half, mean + half), rel=1e-6, abs=1e-12)
    least = 0.9 if verdict.word == "equivalent" else 0.95
    assert verdict.level >= least - 1e-12


def paired(found: Comparison, variant: Variant) -> list[float]:
    """The differences, from the runs' records."""
    values = [
        {r.summary.seed: getattr(r.summary.test, found.metric) for r in v.runs}
        for v in (found.variants[0], variant)
    ]
    base, ours = values
    scale = float(np.mean(list(base.values()))) if found.is_relative else 1.0
    return [(ours[seed] - base[seed]) / scale for seed in base]


# ---- many studies --------------------------------------------------------------------------------


def drawn(rng: np.random.Generator) -> Study:
    """A study of any kind."""
    return Study(
        n=int(rng.choice(SEEDS)),
        variants=int(rng.choice([1, 3])),
        metric=str(rng.choice(["accuracy", "loss"])),
        effect=float(rng.choice([0, 0.5, 1, -1, 4, -4])),
        spread=float(rng.choice([0, 1e-6, 0.1, 0.5, 2, 20])),
        grid=float(rng.choice([0, 0, 0.0005, 0.005])),
        collapse=float(rng.choice([0, 0, 0.1, 0.5])),
        speed=float(rng.choice([1, 1.02, 0.99, 1.3, 0.5, 2])),
        noise=float(rng.choice([0, 1e-6, 0.003, 0.02, 0.2, 1])),
        is_interleaved=bool(rng.random() < 0.8),
    )


def check_many(studies: int, seed: int) -> Counter[str]:
    """Draw, compare and read studies; which words were met."""
    rng = np.random.default_rng(seed)
    met: Counter[str] = Counter()
    for _ in range(studies):
        study = drawn(rng)
        found = simulated(study, rng)
        check(found)
        for variant, finding in zip(
            found.variants[1:], answer.variant_sentences(found), strict=True
        ):
            match = SPEED.match(split_clauses(finding)[1])
            met[variant.verdict.word] += 1
            met[re.sub(rf"{NUMBER}(?=x| times)", "r", match["words"])] += 1
    return met


EVERY_WORD = {
    *("equivalent", "better", "worse", "inconclusive"),
    *(
        "trains r times as fast",
        "takes rx the time",
        "trains as fast within 5 %",
        "leaves speed open",
    ),
    *("has too few runs to judge speed", "has no verdict on speed"),
    *(f"trains {word}, with too few runs to estimate by how much" for word in ("faster", "slower")),
}


def test_every_sentence_claims_what_its_interval_carries() -> None:
    met = check_many(400, seed=0)
    assert set(met) == EVERY_WORD
    assert min(met.values()) >= 2, met


def test_the_files_hold_the_interval_that_decided() -> None:
    rng = np.random.default_rng(3)
    for _ in range(10):
        found = simulated(drawn(rng), rng)
        read = json.loads(exports.json_text(found))["variants"]
        table = list(csv.DictReader(io.StringIO(exports.csv_text(found))))
        for variant, in_json, row in zip(found.variants[1:], read[1:], table[1:], strict=True):
            verdict = variant.verdict
            assert in_json["verdict"]["interval"] == verdict.interval._asdict()
            assert in_json["verdict"]["level"] == verdict.level == float(row["verdict_level"])
            low, high = float(row["verdict_low"]), float(row["verdict_high"])
            assert (low, high) == verdict.interval
            assert in_json["no_time_verdict"] == row["no_time_verdict"] == variant.no_time_verdict


@pytest.mark.exhaustive
def test_every_sentence_of_many_studies_claims_what_its_interval_carries() -> None:
    assert set(check_many(30_000, seed=1)) == EVERY_WORD


VALUES = st.floats(0.0, 1.0) | st.sampled_from([0.9, 0.905, 0.895, 0.9001])


@settings(max_examples=150)
@given(st.lists(st.tuples(VALUES, VALUES, st.floats(0.1, 10)), min_size=2, max_size=6))
def test_whatever_the_figures_a_sentence_claims_what_its_interval_carries(
    rows: list[tuple[float, float, float]],
) -> None:
    study = Study(len(rows))
    runs = [
        run(name, seed, 2 * seed + place, study, row[place], (10.0, 10.0 * row[2])[place])
        for seed, row in enumerate(rows)
        for place, name in enumerate(("fp32", "mode0"))
    ]
    check(compare(runs, margin=MARGIN, relative_margin=RELATIVE_MARGIN))


# ---- several variants ----------------------------------------------------------------------------


def closed_testing(p_values: Sequence[float]) -> list[bool]:
    """Which hypotheses are rejected: those of which every set that holds them is, by Bonferroni.

    The closed testing principle (Marcus, Peritz and Gabriel, 1976), with no ordering of p-values.
    """
    places = range(len(p_values))
    sets = [s for size in places for s in combinations(places, size + 1)]
    rejected = {s: min(p_values[i] for i in s) <= 0.05 / len(s) for s in sets}
    return [all(rejected[s] for s in sets if i in s) for i in places]


@pytest.mark.representative("3")
@pytest.mark.parametrize("n", SEEDS)
def test_verdicts_on_several_variants_are_those_of_closed_testing(n: int) -> None:
    rng = np.random.default_rng(n)
    for _ in range(60):
        study = Study(n, 4, "loss", float(rng.choice([0, 1.5])), float(rng.choice([0.2, 0.6, 1.5])))
        found = simulated(study, rng)
        differences = [paired(found, v) for v in found.variants[1:]]
        apart = closed_testing([float(stats.ttest_1samp(d, 0).pvalue) for d in differences])
        equal = closed_testing([tost(d, RELATIVE_MARGIN) for d in differences])
        for variant, is_equal, is_apart, d in zip(
            found.variants[1:], equal, apart, differences, strict=True
        ):
            sign = "worse" if np.mean(d) > 0 else "better"
            expected = "equivalent" if is_equal else sign if is_apart else "inconclusive"
            assert variant.verdict.word == expected


def tost(differences: Sequence[float], margin: float) -> float:
    """scipy's larger p-value of the two one-sided tests."""
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    return float(max(above, below))


# ---- a rare failure ------------------------------------------------------------------------------


@pytest.mark.representative("2", "10")
@pytest.mark.parametrize("n", SEEDS)
def test_a_collapse_is_unseen_as_often_as_the_note_says(n: int) -> None:
    """One seed in ten collapses; a study that meets none of them finds the mode equivalent."""
    studies, rng = 150, np.random.default_rng(7)
    study = Study(n, spread=0.02, collapse=0.1)
    words = [simulated(study, rng).variants[1].verdict.word for _ in range(studies)]
    equivalent = words.count("equivalent")
    low, high = stats.binom.ppf([1e-4, 1 - 1e-4], studies, 0.9**n)
    assert low <= equivalent <= high
    found = simulated(Study(n, spread=0.02), np.random.default_rng(0))
    (note,) = [note for note in found.notes if "a failure on 1 seed in 10" in note]
    assert f"{n} seeds can miss" in note
    assert note.endswith(f"with probability {100 * 0.9**n:.0f} %")
