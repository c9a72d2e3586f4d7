"""The linear layers of recipes, and what doctor says of formats for them."""

from __future__ import annotations

import json

import pytest

from mprun.cli.main import main
from mprun.inspect.step_roofline import layer_shapes, plan_step
from mprun.results.estimates import Shape
from tests.experiments.machine import measure_nothing

pytestmark = pytest.mark.usefixtures("native_is_fast")

QUICK = ["doctor.steps=0", "device=cpu"]


@pytest.fixture(autouse=True)
def examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_nothing(monkeypatch)


@pytest.mark.parametrize("mode", ["bf16_mixed", "mxfp8"])
def test_shapes_are_those_of_the_layers_in_a_step(mode: str) -> None:
    """Without the last layer: ten classes are no multiple of 16."""
    planned = plan_step(["recipe=mnist", f"precision={mode}", "train.batch_size=100", "device=cpu"])
    shapes, converted = layer_shapes(planned)
    assert shapes == {Shape(100, 784, 256): ["0"], Shape(100, 256, 256): ["2"]}
    assert converted == ["2"]


def test_doctor_predicts_for_each_gpu_that_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["doctor", "recipe=mnist", "precision=bf16_mixed", *QUICK]
    assert main([*words, "doctor.gpus=[h200,b200]", "doctor.json=true"]) == 0
    found = json.loads(capsys.readouterr().out)["formats"]
    assert [gains["gpu"] for gains in found] == ["NVIDIA H200 SXM", "NVIDIA B200"]
    assert {gains["source"] for gains in found} == {"predicted"}
    assert found[1]["speedup"].keys() >= {"mxfp8", "nvfp4"}
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "linear layers on NVIDIA H100 SXM, PREDICTED: speedup over bfloat16" in printed
    assert "mxfp8 pays for 0 of 2 linear layers on NVIDIA B200" in printed


def test_a_recipe_without_such_layers_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "recipe=fashion_mnist", "precision=fp32", *QUICK]) == 0
    assert "the step calls no linear layer" in " ".join(capsys.readouterr().out.split())
