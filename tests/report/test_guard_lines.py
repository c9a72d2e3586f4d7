"""The end of a run says what its guard found, in a bounded line, and the file says it in full."""

from __future__ import annotations

from pathlib import Path

from mprun.records.mode_names import guard_layers, layer_values
from mprun.records.reader import load_yaml
from mprun.records.run_record import GuardedGemm, GuardRow, GuardThresholds, Summary
from mprun.report.tables import guard_lines
from tests.summaries import example

FOLDER = Path("out puts")


def summary(action: str, *found: tuple[str, str], layers: dict[str, str] | None = None) -> Summary:
    made = example()
    made.precision = made.requested.gemms = "fp8_rowwise"
    made.requested.layers = layers or {}
    gemms = [
        GuardedGemm(
            module=module,
            product=product,
            steps=1 + number,
            first_step=1,
            underflow=0.5,
            error="inf",
            factors=["input"],
        )
        for number, (module, product) in enumerate(found)
    ]
    thresholds = {"8": GuardThresholds(underflow=0.05, error=1e-4)}
    made.guard = GuardRow(action=action, thresholds=thresholds, gemms=gemms)
    return made


def test_without_a_guard_there_is_no_line_and_no_file() -> None:
    assert guard_lines(example(), FOLDER) == []
    assert guard_layers(example()) is None


def test_nothing_found_is_an_answer() -> None:
    assert guard_lines(summary("log"), FOLDER) == ["guard: no product passed a threshold"]
    assert guard_layers(summary("log")) is None


def test_the_line_names_layers_and_products() -> None:
    found = ("fc", "forward"), ("head", "grad_input"), ("fc", "grad_weight")
    first, second = guard_lines(summary("log", *found), FOLDER)
    assert first == (
        "guard: 3 products of 2 layers passed a threshold: fc (forward in 1 step, grad_weight in "
        "3 steps), head (grad_input in 2 steps)"
    )
    assert second.startswith("'precision.layers_file=out puts/guard_layers.yaml', in place of")


def test_the_line_is_bounded() -> None:
    line = guard_lines(summary("promote", *((f"f{n}", "forward") for n in range(8))), FOLDER)[0]
    assert line.startswith("guard: promoted 8 products of 8 layers: f0 (")
    assert line.endswith("f4 (forward in 5 steps) and 3 more")


def test_the_file_has_the_formats_that_a_layer_had() -> None:
    layers = {"a": "fp8", "a.b": "forward=nvfp4,grad_input=fp8", "c": "bf16"}
    found = ("a.b.x", "forward"), ("a.y", "grad_input"), ("d", "forward")
    text = guard_layers(summary("log", *found, layers=layers))
    assert text is not None
    assert layer_values(load_yaml(text)) == {
        **layers,
        "a.b.x": "forward=bf16,grad_input=fp8",
        "a.y": "forward=fp8,grad_input=bf16,grad_weight=fp8",
        "d": "forward=bf16,grad_input=fp8_rowwise,grad_weight=fp8_rowwise",
    }
