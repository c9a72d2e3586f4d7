"""Published figures stand beside measured ones, with hardware and source, and judge nothing."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mprun.records.published_figures import FIGURES, UNNAMED, figures
from mprun.study.compare.comparison import Comparison
from mprun.study.compare.verdicts import compare
from mprun.study.report import exports
from mprun.study.report.comparison_report import PublishedRow, published_lines, published_rows
from mprun.study.report.exports import page
from mprun.study.report.plots import draw
from tests.study.compare.folders import runs_of

ROOT = Path(__file__).resolve().parents[3]
PUBLISHED_RUN = {"batch_size": 8192, "epochs": 5}


def study(recipe: str = "mnist", low: str = "bf16_mixed", **changes: Any) -> Comparison:
    """float32 and one mode, three seeds, that mode twice as fast."""
    changes = {**PUBLISHED_RUN, "recipe": recipe, **changes}
    base = runs_of("fp32", (0.89, 0.90, 0.91), step_ms=20.0, **changes)
    other = runs_of(low, (0.891, 0.901, 0.911), step_ms=10.0, **changes)
    return compare([*base, *other], margin=0.005, relative_margin=0.02)


def row(comparison: Comparison, what: str, published_text: str = "") -> PublishedRow:
    return next(
        r for r in published_rows(comparison) if r.what == what and published_text in r.published
    )


def test_a_measured_figure_stands_beside_the_published_one() -> None:
    found = study()
    accuracy = row(found, "test accuracy")
    assert (accuracy.published, accuracy.here) == ("0.8749", "bf16_mixed 0.9010")
    assert (accuracy.hardware, accuracy.source) == (UNNAMED, "Keras' mixed-precision guide")
    for text in ("more than 2 times", "up to 2 times", "60 % more", "1.5 to 5.5 times"):
        speed = row(found, "speed over fp32", text)
        assert speed.here.startswith("bf16_mixed 2.00x (95 % interval 2.00 to 2.00, n=3)")
    assert row(found, "speed over fp32", "1.5 to").hardware == "V100"
    assert row(found, "speed over fp32", "more than").hardware == "HPU"
    assert row(found, "speed over AMP on a V100").here == "-"


def test_what_was_run_otherwise_here_is_said() -> None:
    found = study(batch_size=512, epochs=4, data__source="generated")
    here = row(found, "test accuracy").here
    assert here == "bf16_mixed 0.9010 (batch 512, 4 epochs, generated data)"


def test_times_of_emulated_runs_are_not_set_beside_published_ones() -> None:
    found = study(execution="emulated")
    assert row(found, "speed over fp32", "up to").here == "bf16_mixed EMULATED"
    assert row(found, "time per sample, after the first epoch").here == "bf16_mixed EMULATED"
    assert row(found, "test accuracy").here == "bf16_mixed 0.9010"


def test_half_with_stochastic_rounding_on_the_ipu() -> None:
    found = study("fashion_mnist", "half_sr", batch_size=12, epochs=10)
    assert row(found, "test accuracy").here == "half_sr 0.9010"
    assert row(found, "test accuracy lost against fp32").here == "half_sr +0.10 points"
    assert row(found, "peak memory over fp32's").here == "half_sr 1.00x"
    assert {r.hardware for r in published_rows(found)} == {"IPU"}


def test_a_model_of_ones_own_has_no_published_rows() -> None:
    assert published_rows(study("own")) == []
    assert published_lines(study("own")) == []


@pytest.mark.parametrize("kind", ["terminal", "page", "markdown", "json"])
def test_they_are_shown_wherever_a_comparison_is(kind: str) -> None:
    found = study()
    text = {
        "terminal": lambda: "\n".join(published_lines(found)),
        "page": lambda: html.unescape(page(found, draw(found, ["difference"]))).replace(
            "\xa0", " "
        ),
        "markdown": lambda: exports.markdown(found),
        "json": lambda: json.dumps(json.loads(exports.json_text(found))["published"]),
    }[kind]()
    wanted = ("0.8749", "0.4217", "more than 2 times", "1.5 to 5.5 times", "V100", "HPU", "Keras'")
    assert [x for x in wanted if x not in text] == []
    assert "bf16" in text
    if kind != "terminal":
        assert "0.8607" in text, "epoch 4"


def test_the_page_on_recipes_has_the_same_figures() -> None:
    """recipes/README.md is written by hand: each published row is that of the data."""
    text = (ROOT / "recipes/README.md").read_text(encoding="utf-8")
    section = text.partition("## `mnist`")[2].partition("## `fashion_mnist`")[0]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", section, re.MULTILINE)
    table = [published_text for _, published_text in rows]
    for kind in ("train_accuracy", "validation_accuracy", "test_accuracy", "test_loss"):
        wanted = [f.text for f in figures({"mnist"}, ("bf16_mixed",)) if f.kind == kind]
        places = [table.index(x) for x in wanted]
        assert places == list(range(places[0], places[0] + len(wanted))), kind
    for figure in FIGURES:
        assert figure.text in text, figure
        assert figure.hardware in text, figure
