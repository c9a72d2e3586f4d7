"""The roof of shipped recipes: no step is below it, and the count needs no data."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mprun.errors import RunFailedError, UsageError
from mprun.inspect.step_roofline import count_step, plan_step, recipe_roofline
from mprun.records.reader import read_json
from mprun.results.doctor_result import SCHEMA_VERSION, Examination
from mprun.results.roofline_result import Roofline
from tests.experiments import machine
from tests.experiments.machine import measure_nothing
from tests.schema import conforms

pytestmark = pytest.mark.usefixtures("native_is_fast")

TINY = {
    "linear": ["train.batch_size=64"],
    "mnist": ["train.batch_size=64"],
    "fashion_mnist": ["train.batch_size=4"],
    "resnet": ["train.batch_size=4"],
    "char_gpt": ["train.batch_size=2"],
    "transformer": ["train.batch_size=2"],
}


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Examination:
    measure_nothing(monkeypatch)
    return machine.examined()


def roof_of(examined: Examination, *overrides: str, steps: int = 5) -> Roofline:
    return recipe_roofline(plan_step(["device=cpu", *overrides]), examined, steps)


@pytest.mark.representative("linear-fp32", "fashion_mnist-bf16_mixed", "char_gpt-bf16_mixed")
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("recipe", TINY)
def test_a_step_is_held_against_its_least_time(
    recipe: str, precision: str, examined: Examination
) -> None:
    roof = roof_of(examined, f"recipe={recipe}", f"precision={precision}", *TINY[recipe])
    assert conforms(roof, Roofline)
    assert roof.why_real is None
    assert roof.step_time_ms.n == 5
    assert roof.step_time_ms.median is not None
    assert 0 < roof.fused_ms <= roof.least_ms
    assert roof.least_ms == pytest.approx(sum(g.least_ms for g in roof.groups))
    assert roof.share == pytest.approx(roof.least_ms / roof.step_time_ms.median)
    (update,) = [group for group in roof.groups if group.name == "optimizer"]
    assert update.least_ms > 0
    if precision == "bf16_mixed" and roof.execution == "native":
        assert any(g.name == "cast" and g.bytes > 0 for g in roof.groups)
        assert "bfloat16" in roof.gflops


def test_a_count_alone_times_nothing(examined: Examination) -> None:
    roof = roof_of(examined, "recipe=mnist", "train.batch_size=8", steps=0)
    assert roof.step_time_ms.n == 0
    assert (roof.share, roof.outside_ms, roof.page_faults, roof.notes) == (None, None, None, [])
    assert all(group.measured_ms is None for group in roof.groups)


def test_the_matrix_products_of_a_recipe_are_counted_by_hand() -> None:
    planned = plan_step(["recipe=linear", "device=cpu", "train.batch_size=16"])
    ops, _ = count_step(planned)
    weight = planned.plan.recipe.model().weight
    # forward and the gradient of the weight; samples have no gradient
    assert sum(op.flops for op in ops) == 2 * (2 * 16 * weight.numel())


def test_an_emulated_mode_is_held_against_its_native_ops(examined: Examination) -> None:
    roof = roof_of(
        examined,
        *("recipe=linear", "precision=half_sr_full", "train.batch_size=8", "execution=emulated"),
    )
    assert roof.execution == "emulated"
    assert roof.outside_ms is None
    assert any("emulated here" in note for note in roof.notes)


def test_the_record_is_read_back(examined: Examination, tmp_path: Path) -> None:
    roof = roof_of(examined, "recipe=linear", "train.batch_size=8")
    file = tmp_path / "doctor.json"
    for record in (examined, replace(examined, roofline=roof)):
        file.write_text(json.dumps(asdict(record)))
        assert read_json(file, Examination, SCHEMA_VERSION) == record
    text = json.dumps({**asdict(examined), "roofline": {"recipe": 1}})
    file.write_text(text)
    with pytest.raises(UsageError, match=r"doctor\.json.*recipe"):
        read_json(file, Examination, SCHEMA_VERSION)
    old = asdict(examined)
    del old["roofline"]
    file.write_text(json.dumps(old))
    assert read_json(file, Examination, SCHEMA_VERSION) == examined


READS_VALUES = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        {line}
        return self.layer(x)


def model():
    return Model()


def data():
    x = torch.randn(64, 4)
    return {{"train": (x, x.sum(1, keepdim=True))}}


def loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])


DEFAULTS = {{"train.batch_size": 8}}
"""


def test_a_model_that_reads_values_is_counted_in_a_real_step(
    examined: Examination, tmp_path: Path
) -> None:
    file = tmp_path / "reads.py"
    file.write_text(READS_VALUES.format(line="assert x.abs().max().item() < 100"))
    roof = roof_of(examined, f"recipe={file}")
    assert roof.why_real is not None
    assert any("counted in a real step" in note for note in roof.notes)
    assert {g.name for g in roof.groups} >= {"matmul", "optimizer"}


def test_a_step_that_fails_is_one_line(examined: Examination, tmp_path: Path) -> None:
    file = tmp_path / "fails.py"
    file.write_text(READS_VALUES.format(line="raise RuntimeError('planted')"))
    with pytest.raises(RunFailedError, match=r"cannot run the model's step: .*planted") as failed:
        roof_of(examined, f"recipe={file}")
    assert "\n" not in str(failed.value)


def test_a_recipe_that_ignores_the_source_of_data_gives_no_warning() -> None:
    planned = plan_step(["recipe=linear", "device=cpu"])
    assert planned.warnings == []
    assert plan_step(["recipe=mnist", "device=cpu"]).plan.splits.source == "generated"
