"""Time and samples to equal quality, in words."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

from mprun.study.compare.comparison import Comparison, EqualQuality, Estimate, Interval
from mprun.study.report import answer, exports
from mprun.study.report.comparison_report import footer
from mprun.study.report.exports import page
from tests.each import each
from tests.study.report.compared import comparison


def ratio(value: float, half: float = 0.02) -> Estimate:
    return Estimate(value, Interval(value - half, value + half), 3)


def needing(samples: float, time: float | None, missed: int = 0, half: float = 0.02) -> Comparison:
    """bf16_mixed at 1.2 times the speed, with these ratios to equal quality."""
    base = comparison(2)
    quality = EqualQuality(
        12_000.0,
        10_000.0,
        ratio(samples),
        1.25 if time is not None else None,
        1.25 if time is not None else None,
        None if time is None else ratio(time, half),
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
    first = answer.headline(needing(1.0, 0.83))[0]
    assert first.startswith("bf16_mixed reaches fp32's validation loss in 0.83 [0.81, 0.85] of the")
    assert "trains 1.20 times as fast as fp32" in first
    assert "not known" not in first

    (row,) = answer.variant_sentences(found)
    assert "so its speed buys nothing" in row
    assert "so its speed buys nothing" in exports.markdown(found)
    assert "so its speed buys nothing" in page(found, [])
    (line,) = (x for x in footer(found) if "equal validation loss" in x)
    assert "; needs 1.20x (95 % interval 1.18 to 1.22, n=3) the samples" in line


def test_a_run_too_short_for_a_curve_and_a_loss_that_is_missed_are_said() -> None:
    base = needing(1.0, 0.83)
    variant = base.variants[1]
    assert variant.equal_quality is not None
    reason = "2 validations in a run, 4 are needed; a run validates after each epoch"
    short = replace(variant.equal_quality, time_ratio=None, no_figure=reason)
    for quality, said in (
        (
            short,
            "time to equal validation loss is not known (2 validations in a run, 4 are needed)",
        ),
        (None, "time to equal validation loss is not known (no run was validated)"),
        (replace(variant.equal_quality, missed=2), "of the time (never in 2 of 3 pairs), keeps"),
    ):
        found = replace(variant, equal_quality=quality)
        text = answer.headline(replace(base, variants=(base.variants[0], found)))[0]
        assert said in text
        assert ("0.83" in text) == ("of the time" in text)


OPEN = "leaves open whether its speed buys anything"


@each(
    ("found", "says", "does_not_say"),
    [
        (
            needing(1.0, 0.83),
            ["0.83x (95 % interval 0.81 to 0.85, n=3) the time of fp32"],
            ["nothing", "leaves open"],
        ),
        (
            needing(1.0, 0.83, missed=2),
            [OPEN, "in 2 of 3 pairs its best loss stayed more than 2 % above that of fp32"],
            [],
        ),
        (needing(1.1, 0.94, half=0.1), [OPEN], []),
        (
            needing(1.2, None),
            ["needs 1.20x (95 % interval 1.18 to 1.22, n=3) the samples of fp32"],
            ["the time"],
        ),
        (comparison(2), [], ["validation loss"]),
    ],
    ids=["a real gain", "a level never reached", "an open time", "no times", "no validations"],
)
def test_a_sentence_says_what_is_needed_and_a_warning_is_of_no_gain_alone(
    found: Comparison, says: list[str], does_not_say: list[str]
) -> None:
    assert answer.warnings(found) == []
    (sentence,) = answer.variant_sentences(found)
    assert [text for text in says if text not in sentence] == []
    assert [text for text in does_not_say if text in sentence] == []


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
