"""What plots are drawn from, and that nothing a run lacks breaks a drawing."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.study.compare.comparison import Comparison, Estimate, Run
from mprun.study.report import canvas
from mprun.study.report import plots as report_plots
from mprun.study.report.canvas import DARK, LIGHT, Plot, colour
from mprun.study.report.plots import NAMES, draw
from tests.study.report.compared import HOSTILE, comparison, lines, of_losses
from tests.study.report.pages import Pages


def plots(found: Comparison, *names: str) -> dict[str, Plot]:
    """The plots of these names, or all."""
    return {plot.name: plot for plot in draw(found, names or NAMES)}


def texts(plot: Plot) -> list[str]:
    """The texts of a drawing, without its title."""
    root = ElementTree.fromstring(plot.svg)
    return ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("text")]


def said(plot: Plot) -> str:
    return " ".join((plot.caption, *plot.notes))


# ---- what is read --------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), min_size=1, max_size=5),
    st.integers(1, 40),
)
def test_a_band_is_the_median_and_range_of_bin_means(runs: list[list[float]], points: int) -> None:
    curves_ = [(np.arange(1.0, len(y) + 1), np.array(y)) for y in runs]
    found = report_plots.band(curves_, points)
    width = math.ceil(max(map(len, runs)) / points)
    assert found.width == width
    assert len(found.x) <= points
    for place_, (middle, low, high) in enumerate(
        zip(found.middle, found.low, found.high, strict=True)
    ):
        chunks = [y[place_ * width : (place_ + 1) * width] for y in runs]
        means = [math.fsum(c) / len(c) for c in chunks if c]
        near = {"rel_tol": 1e-9, "abs_tol": 1e-7}  # sums of up to 60 numbers of up to 1e6
        assert math.isclose(middle, statistics.median(means), **near)
        assert math.isclose(low, min(means), **near)
        assert math.isclose(high, max(means), **near)


def test_a_band_leaves_out_what_is_not_finite_and_does_not_fear_steps_that_are_none() -> None:
    x = np.array([1.0, 2.0, np.nan, np.inf, -5.0, 1e300, 3.0])
    found = report_plots.band([(x, np.array([1.0, np.nan, 1.0, 1.0, 1.0, 1.0, 3.0]))])
    assert found.x.tolist() == [1.0, 3.0]
    assert found.middle.tolist() == [1.0, 3.0]
    assert report_plots.band([(x, np.full(7, np.inf))]) is None
    assert report_plots.band([]) is None


@pytest.mark.representative(0, 3, 5)
@pytest.mark.parametrize(
    "text", ["no json\n", "[]\n", '{"kind": "step"\n', "\udcff\n", '"text"\n', "[" * 5000 + "\n"]
)
def test_a_damaged_line_is_told_and_the_rest_drawn(tmp_path: Path, text: str) -> None:
    found = comparison(1, tmp_path, seeds=2)
    path = found.variants[0].runs[1].path / "metrics.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    loss = plots(found, "loss")["loss"]
    assert "fp32, seed 1: metrics.jsonl is damaged" in said(loss)
    assert loss.svg


def test_lines_with_wrong_types_are_no_steps(tmp_path: Path) -> None:
    row = {"kind": "step", "step": "x", "loss": None, "step_time_ms": [], "loss_scale": {}}
    folder = tmp_path / "runs"
    found = comparison(2, folder)
    for v in found.variants:
        for run in v.runs:
            text = "".join(json.dumps(x) + "\n" for x in (row, {"kind": 3}, {"kind": "step"}))
            (run.path / "metrics.jsonl").write_text(text)
    assert plots(found, "loss")["loss"].caption == "No run logged a finite loss."


def write_again(run: Run, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run.path / "metrics.jsonl").write_text(text)


# ---- drawings ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ten(pages: Pages) -> dict[str, Plot]:
    return {plot.name: plot for plot in pages.drawn("ten")[1]}


def test_ten_variants_are_drawn_and_named_in_every_plot(ten: dict[str, Plot]) -> None:
    assert tuple(ten) == NAMES
    found = comparison(10)
    for name, plot in ten.items():
        assert plot.png.startswith(b"\x89PNG\r\n\x1a\n")
        shown = {text.partition(":")[0].removesuffix(" (emulated)") for text in texts(plot)}
        named = found.variants if name == "metric-time" else found.variants[1:]
        assert {v.label for v in named} <= shown, name


def test_batch_sizes_that_differ_are_drawn_over_epochs(tmp_path: Path) -> None:
    found = comparison(2, tmp_path)
    for run in found.variants[1].runs:
        run.summary.batch_size = 256
    assert "epoch" in texts(plots(found, "loss")["loss"])


def test_matplotlib_s_settings_are_put_back(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    with pytest.raises(RuntimeError, match="inside"):
        canvas.picture_files("x", "x", "", _failing)
    draw(comparison(1, tmp_path), ["difference"])
    assert dict(matplotlib.rcParams) == before


def _failing() -> Any:
    raise RuntimeError("inside")


# ---- what runs do not have -----------------------------------------------------------------------

Change = Callable[[Comparison], Comparison]


def without_lines(found: Comparison) -> Comparison:
    for v in found.variants:
        for run in v.runs:
            (run.path / "metrics.jsonl").unlink()
    return found


def each(**fields: Any) -> Change:
    def change(found: Comparison) -> Comparison:
        return replace(found, variants=tuple(replace(v, **fields) for v in found.variants))

    return change


NAN = Estimate(math.nan, None, 2)
LACKING: dict[str, tuple[Change, dict[str, str]]] = {
    "no metrics.jsonl": (
        without_lines,
        {"loss": "metrics.jsonl cannot be read: No such file or directory"},
    ),
    "no runs": (each(runs=()), {"loss": "No run logged a finite loss"}),
    "no times": (each(step_time_ms=None), {"metric-time": "No variant has both"}),
    "no metric": (each(metric=None), {"metric-time": "No variant has both"}),
    "no pairs": (each(difference=None), {"difference": "No other variant has a seed in common"}),
    "metric gone": (each(metric=NAN, difference=NAN), {"metric-time": "No variant has both"}),
    "all emulated": (each(execution="emulated"), {"metric-time": "Hollow"}),
    "a regression": (of_losses, {"difference": "Training loss minus that of fp32"}),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_is_missing_is_said(tmp_path: Path, name: str) -> None:
    change, expected = LACKING[name]
    drawn = plots(change(comparison(2, tmp_path)), *expected)
    for plot, text in expected.items():
        assert text in said(drawn[plot])


def test_losses_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    found = comparison(2, tmp_path)
    write_again(found.variants[1].runs[0], [{**x, "loss": "nan"} for x in lines()])
    write_again(found.variants[1].runs[1], [{**x, "loss": "inf"} for x in lines()[-3:]])
    loss = plots(found, "loss")["loss"]
    assert "bf16_mixed: 2 runs logged losses that are not finite; they are left out." in loss.notes
    assert loss.svg


@pytest.mark.representative(0, 6)
@pytest.mark.parametrize(
    "label",
    [HOSTILE, "_begins so", "$x^2$", "a" * 300, "", "\u65e5\u672c\u8a9e \U0001f600", "\x00\ud800"],
)
def test_any_label_can_be_drawn(tmp_path: Path, label: str) -> None:
    found = comparison(2, tmp_path)
    variants = (found.variants[0], replace(found.variants[1], label=label))
    for plot in draw(replace(found, variants=variants), ["loss", "metric-time"]):
        ElementTree.fromstring(plot.svg)
        if label.startswith(("_", "$")) and plot.name == "loss":
            assert label in texts(plot)


# ---- colours -------------------------------------------------------------------------------------


def luminance(text: str) -> float:
    """Relative luminance, WCAG 2.1."""
    parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first: str, second: str) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_and_series_stand_out_from_the_page(theme: dict[str, str]) -> None:
    for text in ("ink", "muted", "good", "bad", "open"):
        assert contrast(theme[text], theme["paper"]) >= 4.5
        assert contrast(theme[text], theme["wash"]) >= 4.5
    for index in range(1, 10):
        assert contrast(colour(index, theme), theme["paper"]) >= 3
