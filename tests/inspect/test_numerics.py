"""The numbers of some steps on the terminal and in pictures, from figures made by hand."""

from __future__ import annotations

import io
import math
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from rich.console import Console

from mprun.inspect import measurement_plots
from mprun.inspect.measurement_plots import numerics_plot
from mprun.inspect.measurements import EITHER, FP32, PRECISION, RANGE
from mprun.inspect.numerics import (
    KINDS,
    RULES,
    NumericsResult,
    numerics_parts,
    rows_table,
    scales_table,
    sentences,
)
from mprun.records.console import print_table
from mprun.records.console.fitted_table import FittedTable
from mprun.watch.updates import RULES as KNOWN_RULES

SHARES = dict.fromkeys(("below_normal", "below_smallest", "becoming_zero", "above_largest"), 0.0)


def histogram(**counts: int) -> dict[str, Any]:
    """`m3=5`: five values of exponent -3."""
    exponents = {k.replace("m", "-").replace("p", ""): n for k, n in counts.items()}
    return {
        "exponents": exponents,
        "powers": {},
        "zero": 5,
        "infinite": 0,
        "nan": 0,
        "largest": 1.0,
    }


def row(kind: str, name: str, db: float, verdict: str | None, **more: Any) -> dict[str, Any]:
    shares = {**SHARES, "below_normal": 0.25, "becoming_zero": 0.125}
    return {
        "kind": kind,
        "name": name,
        "histogram": histogram(m3=10, p0=5),
        "fp16": shares,
        "bf16": SHARES,
        "sqnr_db": {"fp16": db, "bf16": 55.0, "e4m3_scaled": 31.0},
        "verdict": verdict,
        "held": None,
        "loss_scaled": None,
        **more,
    }


SCALED = {
    "recommended": 131072.0,
    "fp16_db": 12.0,
    "in_use": 65536.0,
    "fp16": {**SHARES, "below_normal": 0.5, "becoming_zero": 0.03125},
}
ROWS = [
    row("weights", "a.weight", 70.0, "either"),
    row("activations", "(input)", math.inf, "either"),
    row("activation_gradients", "a", 5.0, "needs range: bf16", loss_scaled=SCALED),
    row("activations", "a", 40.0, "either"),
    row("weight_gradients", "noise", 1.0, None),
    row("updates", "a.weight", 1.0, None),
]


def passed(db: float, name: str, beyond: float | None = None, **more: Any) -> dict[str, Any]:
    """The passes in a format, whose worst gradient keeps `db`."""
    measure = {
        "loss_difference": 0.001,
        "gradients_db": db,
        "worst_db": db,
        "worst_parameter": name,
        "loss_scale": 1.0,
        "beyond_db": beyond,
        **more,
    }
    return {
        "within_tolerance": db >= 20,
        "measure": measure,
        "unavoidable": measure,
        "tolerance": {"loss": 0.01, "gradient_db": 20.0},
    }


PASSES = {"fp16": passed(60.64, "a.weight"), "bf16": passed(47.0, "b.weight")}
LOST = {"nearest": 0.5, "stochastic": 0.25, "kahan": 0.0}
LESS = {"nearest": 0.125, "stochastic": 0.0625, "kahan": None}
CONTENT: dict[str, Any] = {
    "rows": ROWS,
    "verdict": {
        "word": "either",
        "reason": "because",
        "gradients_db": {},
        "passes": PASSES,
        "parameters_db": {},
        "deciding_rows": ["the loss in float16", "activation_gradients a"],
        "rows_of_another_verdict": ["activation_gradients a"],
        "undetermined": ["noise"],
        "zero_gradients": ["off"],
        "reference": {"name": "float64", "reason": ""},
    },
    "loss_scale": {
        "kind": "dynamic",
        "in_use": 65536.0,
        "lowest_in_use": 65536.0,
        "highest_in_use": 65536.0,
        "largest_gradient": 0.25,
        "where": "a",
        "headroom": 2.0,
        "recommended": 131072.0,
        "reason": "2^17 = 131,072: fits; further figures",
        "needed": True,
        "need": "one is needed: without a loss scale a is lost",
        "verdicts": [
            {
                "label": "in use",
                "scale": 65536.0,
                "word": "fine",
                "reason": "all well",
                "becoming_zero": 0.00001,
                "losing_bits": 0.5,
            },
            {
                "label": "none",
                "scale": 1.0,
                "word": "too low",
                "reason": "a is lost",
                "becoming_zero": 0.5,
                "losing_bits": None,
            },
        ],
        "tried_db": {"65536": 60.0},  # of schema_version 2
        "best_tried": 65536.0,
    },
    "lost_updates": {
        "all": {"updated": 9, "lost_in_run": 0.75, "fp16": LOST, "bf16": LOST},
        "by_parameter": {
            "small": {"updated": 1, "lost_in_run": None, "fp16": LESS, "bf16": LESS},
            "large": {"updated": 8, "lost_in_run": 0.0, "fp16": LOST, "bf16": LOST},
        },
    },
}


def result(**changes: Any) -> NumericsResult:
    return msgspec.convert({**CONTENT, **changes}, NumericsResult, str_keys=True)


RESULT = result()


def exponents(**changes: Any) -> Any:
    return measurement_plots.exponents(result(**changes))


def shown(table: FittedTable) -> list[str]:
    console = Console(file=io.StringIO())
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def cells(lines: list[str], first: str) -> list[str]:
    return next(line.split() for line in lines if line.split()[:1] == [first])


def test_kinds_and_rules_are_those_of_the_statistics() -> None:
    assert tuple(RULES) == KNOWN_RULES


def test_rows_are_shown_the_worst_first_and_those_without_verdict_not() -> None:
    lines = shown(rows_table(RESULT, top=9))
    assert "4 of 4 rows" in lines[1]
    assert "gradients times the loss scale 65,536" in lines[1]
    body = lines[lines.index(next(x for x in lines if "──" in x)) + 1 :]
    names = [line.split()[:3] for line in body if line.split()]
    assert [n[0] for n in names] == ["act.", "activ.", "weights", "activ."]
    assert "25.0%" in body[0]  # five of twenty zero
    assert "3.12%" in body[0]  # to 0 with the loss scale in use
    assert "needs range: bf16" in body[0]
    assert body[1].split()[2:8] == ["-", "-", "either", "40", "55", "31"]


def test_loss_scales_and_why_one_will_not_do() -> None:
    lines = shown(scales_table(RESULT))
    assert cells(lines, "in") == ["in", "use", "65,536", "fine", "<0.01%", "50.0%", "all", "well"]
    assert cells(lines, "none") == ["none", "1", "too", "low", "50.0%", "-", "a", "is", "lost"]


COMPARED = "signal over noise of the worst parameter's gradient; 20 dB are needed"


def test_float32_gradients_that_are_wrong_are_the_answer() -> None:
    for db, text in ((14.0, "they differ from float64's by 20%"), (-3.0, "nothing but rounding")):
        wrong = {**CONTENT["verdict"], "float32_gradients": {"db": db, "worst": "a.weight"}}
        lines = sentences(result(verdict=wrong))
        first = " ".join(lines[: lines.index(f"compared with float32: {COMPARED}")])
        assert first.startswith("float32 itself is not good enough for the gradients: ")
        assert text in first
        assert first.endswith(", most in a.weight.")


@pytest.mark.parametrize(
    ("float32", "first"),
    [
        (
            {"loss": 38.4, "float64": 1.02, "op": "sub", "module": "norm"},
            "float32 itself is not good enough here: the loss is 38.4, in float64 1.02; sub in "
            "norm loses it.",
        ),
        (
            {"loss": math.nan, "float64": math.nan, "op": "div", "module": ""},
            "no format is good enough here: the loss is nan in float64 too; div makes it.",
        ),
    ],
)
def test_a_float32_that_is_wrong_is_the_answer(float32: dict[str, Any], first: str) -> None:
    lines = sentences(result(verdict={**CONTENT["verdict"], "float32": float32}))
    after = lines.index(f"compared with float32: {COMPARED}")
    assert " ".join(lines[:after]) == first


def test_sentences() -> None:
    expected = [
        "float16 and bfloat16 are both good enough. float16 needs a loss scale.",
        f"what decides: {COMPARED}",
        "  float16: 60.6 dB (a.weight)",
        "  bfloat16: 47.0 dB (b.weight)",
        "  decided by: the loss in float16, activation_gradients a",
        "not judged, gradients are only rounding errors: noise",
        "not judged, gradients are exactly zero: off",
        "without a loss scale a is lost; 50.0% become 0",
        "  recommended: 2^17 = 131,072: fits",
        "16-bit weights lose updates: 50.0% in bfloat16, 50.0% in float16; cures: bf16_sr, half_sr",
    ]
    assert sentences(RESULT) == expected
    need = "none is needed: without a loss scale all is well"
    free = {**CONTENT["loss_scale"], "needed": False, "need": need}
    expected[0] = "float16 and bfloat16 are both good enough. float16 needs no loss scale."
    expected[7:9] = [
        "without a loss scale all is well; 50.0% become 0",
        "  largest that fits: 2^17 = 131,072: fits",
    ]
    assert sentences(result(loss_scale=free)) == expected


def test_the_answer_alone_is_ten_lines_of_less_than_100_columns() -> None:
    """Whatever the names of layers; the tables come with `verbose`."""
    name = "encoder.layers.11.self_attention.in_projection_of_queries.weight"
    beyond = {"loss_difference": 0.05, "loss_beyond": 0.02, "beyond_parameter": name}
    passes = {"fp16": passed(9.6, name, math.inf), "bf16": passed(-20.0, name, 3.0, **beyond)}
    verdict = {**CONTENT["verdict"], "passes": passes, "undetermined": [name] * 9}
    verdict |= {"zero_gradients": [], "deciding_rows": [f"weight_gradients {name}"] * 9}
    scale = {**CONTENT["loss_scale"], "reason": f"2^17 = 131,072: reached ({name})"}
    scale["need"] = f"one is needed: without a loss scale activation_gradients {name} keep 3 dB"
    found = result(verdict=verdict, loss_scale=scale)
    lines = [*numerics_parts(found, 9, verbose=False)]
    assert len(lines) <= 10
    assert all(isinstance(line, str) and len(line) < 100 for line in lines)
    assert any("activation_gradients encod" in str(line) for line in lines)
    assert str(lines[2]).endswith("), within the noise between batches")
    assert ", 3.0 dB beyond the noise between batches; loss off by 2.00%" in str(lines[3])
    assert len([*numerics_parts(found, 9, verbose=True)]) == len(lines) + 3


def test_formats_with_different_needs_and_what_is_not_finite() -> None:
    coarse = {**passed(12.0, "a"), "tolerance": {"loss": 0.01, "gradient_db": 8.25}}
    passes = {"fp16": passed(-math.inf, "b"), "bf16": coarse}
    lines = sentences(result(verdict={**CONTENT["verdict"], "passes": passes}))
    assert lines[1:4] == [
        "what decides: signal over noise of the worst parameter's gradient",
        "  float16: the gradient of b is not finite; 20 dB are needed",
        "  bfloat16: 12.0 dB (a); 8.25 dB are needed",
    ]
    passes = {"fp16": passed(math.inf, ""), "bf16": passed(3.0, "a", loss_difference=math.nan)}
    lines = sentences(result(verdict={**CONTENT["verdict"], "passes": passes}))
    assert lines[2:4] == ["  float16: no error", "  bfloat16: the loss is not finite"]


@pytest.mark.parametrize("verdict", [EITHER, RANGE, PRECISION, FP32])
def test_the_answer_comes_first_and_names_the_formats_that_are_good_enough(verdict: str) -> None:
    first, second, *_ = sentences(result(verdict={**CONTENT["verdict"], "word": verdict}))
    good = first.partition(" good enough")[0]
    assert ("float16 and bfloat16 are both" in good) == (verdict == EITHER)
    assert ("neither" in good) == (verdict == FP32)
    assert good.startswith("bfloat16 is") == (verdict == RANGE)
    assert ("loss scale" in first) == (verdict in (EITHER, PRECISION))
    assert second == f"what decides: {COMPARED}"


# ---- pictures ------------------------------------------------------------------------------------


def heat(figure: Any, panel: int) -> dict[int, float]:
    """Exponent to the share drawn in the first row of a panel."""
    axes = [a for a in figure.axes if a.images]
    image = axes[panel].images[0]
    low = round(image.get_extent()[0])
    values = image.get_array().filled(math.nan)[0].tolist()
    return {low + n: v for n, v in enumerate(values) if not math.isnan(v)}


def test_the_heat_map_holds_the_shares() -> None:
    figure = exponents()
    panels = [a for a in figure.axes if a.images]
    titles = [a.get_title(loc="left") for a in panels]
    assert titles == [title for _, title in KINDS.values()]
    assert heat(figure, 0) == pytest.approx({-3: 10 / 15, 0: 5 / 15})
    names = [label.get_text() for label in panels[1].get_yticklabels()]
    assert names == ["(input)", "a"]


def test_the_files_have_a_title_and_a_caption() -> None:
    saved = numerics_plot(RESULT, "mnist in fp16_mixed")
    assert list(saved) == ["numerics.png", "numerics.svg"]
    assert saved["numerics.png"].startswith(b"\x89PNG\r")
    root = ElementTree.fromstring(saved["numerics.svg"].decode())
    text = " ".join("".join(e.itertext()) for e in root.iter() if e.tag.endswith("text"))
    for word in ("Sizes of the numbers of mnist in fp16_mixed", "Dashed:", "131,072"):
        assert word in text
