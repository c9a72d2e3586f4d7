"""Native runs whose ops were computed in float32 are labelled, and no gain is claimed from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mprun.precision.products import CONVOLUTION_BACKWARD, CONVOLUTIONS, MATMULS
from mprun.records.console.formatting import OP_FAMILIES, substitution_label
from mprun.study.advise import advise
from mprun.study.compare.verdicts import compare
from mprun.study.report import answer, cells, exports, tables
from mprun.study.report.exports import page
from mprun.study.report.plots import draw
from tests.study.compare.folders import runs_of, summary_of


def substituted(*ops: str) -> list[dict[str, str]]:
    return [{"op": op, "dtype": "float16", "reason": "computed in float32"} for op in ops]


@pytest.mark.parametrize(
    ("ops", "shown"),
    [
        ((), ""),
        (("aten.addmm", "aten.mm"), "matmuls in fp32"),
        (("aten.mm", "aten.convolution"), "matmuls, convolutions in fp32"),
        (("aten.convolution", "aten.convolution_backward"), "convolutions in fp32"),
        (("aten.convolution_backward",), "conv gradients in fp32"),
        (("aten.lstm", "aten.bmm.default"), "matmuls, lstm in fp32"),
        (("\x1b[31m" + "x" * 40,), "\\x1b[31mxxxxxxxxx... in fp32"),
    ],
)
def test_the_label_names_families_of_ops(ops: Sequence[str], shown: str) -> None:
    assert substitution_label([summary_of("fp16_mixed", substitutions=substituted(*ops))]) == shown


def test_every_op_that_a_cpu_substitutes_has_a_family() -> None:
    short = {
        str(op).removeprefix("aten.").partition(".")[0]
        for op in (*MATMULS, *CONVOLUTIONS, *CONVOLUTION_BACKWARD)
    }
    assert short <= {op for ops in OP_FAMILIES.values() for op in ops}


ACCURACIES = (0.91, 0.92, 0.90, 0.915)


def study(ops: Sequence[str]) -> Any:
    """fp16_true half as long as fp32, with these ops computed in float32."""
    low = runs_of("fp16_true", ACCURACIES, substitutions=substituted(*ops))
    for i, run in enumerate(low):
        run.summary.samples_per_second = 2 * 10_000.0 + i
        run.summary.step_time_ms.median = 5.0 + i / 100
        run.summary.memory_bytes.peak = 2**20
    base = runs_of("fp32", ACCURACIES)
    for run in base:
        run.summary.samples_per_second = 10_000.0
        run.summary.step_time_ms.median = 10.0
    return compare([*base, *low], margin=0.005, relative_margin=0.02)


def test_a_gain_is_claimed_of_native_float16_alone() -> None:
    """The same figures twice: the second time the matmuls were computed in float32."""
    own, fp32_fallback = study([]), study(["aten.addmm"])
    assert advise(own, {}, "time").label == "fp16_true"
    refused = advise(fp32_fallback, {}, "time")
    assert refused.label == "fp32"
    assert refused.rejected["fp16_true"].startswith("matmuls in fp32: 0.50 ")
    assert advise(fp32_fallback, {}, "memory").label == "fp16_true"
    (headline,) = answer.headline(own)
    assert "times as fast" in headline
    (headline,) = answer.headline(fp32_fallback)
    assert "times as fast" not in headline
    assert "less peak memory" in headline


def test_the_label_stands_in_table_page_and_files() -> None:
    found = study(["aten.addmm"])
    variant = found.variants[1]
    assert variant.step_time_ratio is not None, "the time is this machine's"
    assert cells.rows(found)[1].label == ("fp16_true", "matmuls in fp32")
    assert cells.rows(found)[0].label == ("fp32", "")
    assert "<small>matmuls in fp32</small>" in page(found, draw(found, names=["difference"]))
    assert "| fp16\\_true (matmuls in fp32) |" in exports.markdown(found)
    assert exports.csv_text(found).splitlines()[2].startswith("fp16_true,")
    assert ",native,matmuls in fp32," in exports.csv_text(found)
    assert '"substituted": "matmuls in fp32"' in exports.json_text(found)
    assert any("so matmuls in fp32: fp16_true; " in note for note in found.notes)
    lines = str(tables.result(variant.runs[0].summary)).splitlines()
    (step_time,) = (line for line in lines if line.startswith("step time"))
    assert step_time.endswith(", matmuls in fp32")
