"""Values of `precision.layers`, and the files that commands write of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mprun.records.layer_values import layer_values, layers_file, with_high_products


@pytest.mark.parametrize(
    ("value", "high", "expected"),
    [
        ("mxfp8", ["grad_input"], "forward=mxfp8,grad_input=bf16,grad_weight=mxfp8"),
        ("mxfp8", [], "forward=mxfp8,grad_input=mxfp8,grad_weight=mxfp8"),
        ("fp8_rowwise_hp", ["forward", "grad_input", "grad_weight"], "bf16"),
        ("forward=fp8,grad_weight=fp32", ["forward"], "forward=bf16,grad_weight=fp32"),
        ("forward=fp8", ["forward"], "forward=bf16"),
    ],
)
def test_products_of_a_value_are_kept_high(value: str, high: list[str], expected: str) -> None:
    assert with_high_products(value, high) == expected


def test_a_file_of_layers_reads_as_what_was_written() -> None:
    layers = {
        "fc1": "bf16",
        "blocks.0.fc": "forward=mxfp8,grad_input=bf16,grad_weight=mxfp8",
        "*": "fp8",
    }
    Path("layers.yaml").write_text(layers_file("Made by a test.\nTwo lines.", layers))
    text = Path("layers.yaml").read_text()
    assert text.startswith('# Made by a test.\n# Two lines.\n"fc1": bf16\n')
    assert layer_values(yaml.safe_load(text)) == layers
