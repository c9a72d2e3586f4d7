"""Time and samples to equal quality, in words."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

from mprun.study.compare.comparison import Comparison, EqualQuality, Estimate, Interval
from mprun.study.report import answer, exports
from mprun.study.report.comparison_report import footer
from mprun.study.report.exports import page
from tests.study.compare.test_equal_quality import planted, power, slowed
from tests.study.report.compared import comparison


def ratio(value: float, half: float = 0.02) -> Estimate:
    return Estimate(value, Interval(value - half, value + half), 3)


def needing(samples: float, time: float | None, missed: int = 0) -> Comparison:
    """bf16_mixed at 1.2 times the speed, with these ratios to equal quality."""
    base = comparison(2)
    quality = EqualQuality(
        12_000.0,
        10_000.0,
        ratio(samples),
        1.25 if time is not None else None,
        1.25 if time is not None else None,
        None if time is None else ratio(time),
        missed,
        0.02,
    )
    variant = replace(base.variants[1], throughput_ratio=ratio(1.2), equal_quality=quality)
    return replace(base, variants=(base.variants[0], variant))


def test_a_gain_that_more_samples_eat_is_named_in_the_answer_and_in_every_file() -> None:
    found = needing(1.2, 1.0)
    *_, last = answer.headline(found)
    assert last == (
        "bf16_mixed buys nothing: it trains 1.20 times as fast, but needs 1.20x (95 % interval "
        "1.18 to 1.22, n=3) the samples and 1.00x (95 % interval 0.98 to 1.02, n=3) the time of "
        "fp32 to equal validation loss."
    )
    assert not any("trains 1.20 times as fast as fp32" in s for s in answer.headline(found))
    (row,) = answer.variant_sentences(found)
    assert "so its speed buys nothing" in row.sentence
    assert "so its speed buys nothing" in exports.markdown(found)
    assert "so its speed buys nothing" in page(found, [])
    (line,) = (x for x in footer(found) if "equal validation loss" in x)
    assert "; needs 1.20x (95 % interval 1.18 to 1.22, n=3) the samples" in line


def test_a_real_gain_has_its_figures_and_no_warning() -> None:
    found = needing(1.0, 0.83)
    assert answer.warnings(found) == []
    assert "trains 1.20 times as fast as fp32" in " ".join(answer.headline(found))
    (row,) = answer.variant_sentences(found)
    assert "0.83x (95 % interval 0.81 to 0.85, n=3) the time of fp32" in row.sentence
    assert "nothing" not in row.sentence
    assert "leaves open" not in row.sentence


def test_a_level_that_was_never_reached_is_named() -> None:
    (row,) = answer.variant_sentences(needing(1.0, 0.83, missed=2))
    assert "leaves open whether its speed buys anything" in row.sentence
    assert "in 2 of 3 pairs its best loss stayed more than 2 % above that of fp32" in row.sentence


def test_an_open_time_is_called_open() -> None:
    found = needing(1.1, 0.94)
    quality = found.variants[1].equal_quality
    assert quality is not None
    wide = replace(quality, time_ratio=ratio(0.94, 0.1))
    found = replace(
        found, variants=(found.variants[0], replace(found.variants[1], equal_quality=wide))
    )
    (row,) = answer.variant_sentences(found)
    assert "leaves open whether its speed buys anything" in row.sentence
    assert answer.warnings(found) == []


def test_without_validations_nothing_is_said() -> None:
    found = comparison(4)
    assert answer.warnings(found) == []
    assert not any("validation loss" in s.sentence for s in answer.variant_sentences(found))


def test_a_mode_without_times_has_its_samples() -> None:
    found = needing(1.2, None)
    clause = answer._quality_clause(found, found.variants[1])
    assert clause.startswith("needs 1.20x (95 % interval 1.18 to 1.22, n=3) the samples of fp32")
    assert "the time" not in clause


def test_the_files_for_programs_have_the_figures() -> None:
    found = needing(1.2, 1.0)
    base, row = csv.DictReader(io.StringIO(exports.csv_text(found)))
    assert base["equal_quality_time_ratio"] == ""
    assert float(row["equal_quality_time_ratio"]) == 1.0
    assert float(row["equal_quality_time_ratio_low"]) == 0.98
    assert float(row["equal_quality_samples_ratio"]) == 1.2
    assert float(row["equal_quality_samples"]) == 12_000
    assert row["equal_quality_missed"] == "0"
    plain = json.loads(exports.json_text(found))["variants"]
    assert plain[0]["equal_quality"] is None
    assert plain[1]["equal_quality"]["time_ratio"]["value"] == 1.0
    assert plain[1]["equal_quality"]["tolerance"] == 0.02


def test_planted_records_have_the_sentence_and_a_healthy_mode_has_none(tmp_path: Path) -> None:
    said = answer.headline(planted(tmp_path / "slowed", slowed))
    assert any(sentence.startswith("bf16_mixed buys nothing: it trains 1.20 ") for sentence in said)
    healthy = answer.headline(planted(tmp_path / "power", power))
    assert any("bf16_mixed keeps the accuracy, trains 1.20 times as fast" in s for s in healthy)
    assert not any("nothing" in sentence for sentence in healthy)
