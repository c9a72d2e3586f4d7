"""Published figures are shown with hardware and source, and judge nothing."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from mprun.records.published_figures import FIGURES, UNNAMED, figures
from mprun.study.compare.comparison import Comparison
from mprun.study.compare.verdicts import compare
from mprun.study.report import exports
from mprun.study.report.comparison_report import published, published_line
from mprun.study.report.exports import page
from mprun.study.report.plots import draw
from tests.study.compare.folders import runs_of

ROOT = Path(__file__).resolve().parents[3]


def study(recipe: str = "mnist", low: str = "bf16_mixed") -> Comparison:
    """float32 and one mode, three seeds."""
    base = runs_of("fp32", (0.89, 0.90, 0.91), recipe=recipe)
    other = runs_of(low, (0.891, 0.901, 0.911), recipe=recipe)
    return compare([*base, *other], margin=0.005, relative_margin=0.02)


def test_figures_of_the_recipe_and_of_its_modes_are_shown_with_their_sources() -> None:
    found = published(study())
    accuracy = next(x for x in found if x.what == "test accuracy")
    assert (accuracy.text, accuracy.hardware, accuracy.source) == (
        "0.8749",
        UNNAMED,
        "Keras' mixed-precision guide",
    )
    speed = {x.text: x.hardware for x in found if x.what == "speed over fp32"}
    assert speed["more than 2 times"] == "HPU"
    assert speed["1.5 to 5.5 times"] == "V100"
    half = published(study("fashion_mnist", "half_sr"))
    assert {x.hardware for x in half} == {"IPU"}


def test_a_model_of_ones_own_has_no_published_rows() -> None:
    assert published(study("own")) == []


@pytest.mark.parametrize("kind", ["terminal", "page", "markdown", "json"])
def test_they_are_shown_wherever_a_comparison_is(kind: str) -> None:
    found = study()
    text = {
        "terminal": lambda: "\n".join(map(published_line, published(found))),
        "page": lambda: html.unescape(page(found, draw(found, ["difference"]))).replace(
            "\xa0", " "
        ),
        "markdown": lambda: exports.markdown(found),
        "json": lambda: json.dumps(json.loads(exports.json_text(found))["published"]),
    }[kind]()
    wanted = ("0.8749", "0.4217", "more than 2 times", "1.5 to 5.5 times", "V100", "HPU", "Keras'")
    assert [x for x in wanted if x not in text] == []
    assert "0.8607" in text, "epoch 4"


def test_the_page_on_recipes_has_the_same_figures() -> None:
    """recipes/README.md is written by hand: each published row is that of the data."""
    text = (ROOT / "recipes/README.md").read_text(encoding="utf-8")
    section = text.partition("## `mnist`")[2].partition("## `fashion_mnist`")[0]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", section, re.MULTILINE)
    table = [published_text for _, published_text in rows]
    for what in ("training accuracy", "validation accuracy", "test accuracy", "test loss"):
        keras = figures({"mnist"}, ("bf16_mixed",))
        wanted = [f.text for f in keras if f.what.partition(",")[0] == what]
        places = [table.index(x) for x in wanted]
        assert places == list(range(places[0], places[0] + len(wanted))), what
    for figure in FIGURES:
        assert figure.text in text, figure
        assert figure.hardware in text, figure
