"""`fp16_sr` is another name of `half_sr`: runs under both names are one variant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mprun.cli.main import main
from mprun.config import compose
from mprun.config.compose import parse
from mprun.config.multirun import combinations
from mprun.config.validate import without_inert
from mprun.config.variants import modes, variants
from mprun.precision.layers import check_rounding, layer_precisions, resolve
from mprun.precision.policy import policy
from mprun.records.run_config import variant_hash

LAYERS = "precision.layers={fc1: NAME}"


def hash_of(*overrides: str) -> str:
    composed = compose(["recipe=mnist", *overrides])
    return variant_hash(without_inert(composed.config, composed.resolved))


def test_both_names_are_one_configuration() -> None:
    ours, other = compose(["precision=fp16_sr"]), compose(["precision=half_sr"])
    assert ours.resolved == other.resolved
    assert ours.resolved["precision"]["name"] == "half_sr"
    assert hash_of("precision=fp16_sr") == hash_of("precision=half_sr")


def test_both_names_are_one_precision_of_a_layer() -> None:
    given = [LAYERS.replace("NAME", name) for name in ("fp16_sr", "half_sr")]
    a, b = (hash_of("precision=bf16_sr", override) for override in given)
    assert a == b
    assert compose([given[0]]).resolved["precision"]["layers"] == {"fc1": "half_sr"}


def test_a_preset_can_name_it(tmp_path: Path) -> None:
    folder = tmp_path / "preset"
    folder.mkdir()
    text = (
        "# @package _global_\ndefaults:\n  - override /precision: fp16_sr\npreset:\n  name: mine\n"
    )
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    composed = compose(["recipe=mnist", "preset=mine"], tmp_path)
    assert composed.resolved["precision"]["name"] == "half_sr"


@pytest.mark.parametrize("text", ["precision=half_sr,fp16_sr", "precision=fp16_sr,half_sr"])
def test_a_sweep_runs_it_once(text: str) -> None:
    assert combinations([parse(text)]) == [("precision=half_sr",)]


def test_a_sweep_over_every_mode_runs_it_once() -> None:
    assert "fp16_sr" not in modes()
    every = [combination for (combination,) in combinations([parse("precision=glob(*)")])]
    assert len(every) == len(modes())
    assert "precision=half_sr" in every


def test_a_study_calls_it_half_sr() -> None:
    assert list(variants(["recipe=mnist", "precision=fp32,fp16_sr"]).overrides) == [
        "fp32",
        "half_sr",
    ]
    assert list(variants(["recipe=mnist", "precision=fp16_sr"]).overrides) == ["half_sr"]


def test_layers_of_a_program_take_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    named = resolve(model, {"0": "fp16_sr"})
    assert named == {"0": "half_sr"}
    check_rounding(named, policy("bf16_sr"))
    assert layer_precisions({"0": "fp16_sr"}, policy("bf16_sr"))["0"].stored == torch.float16


def test_a_sweep_of_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from mprun.records.run_record import read_summary

    overrides = ["recipe=linear", "train.max_steps=2", "data.source=generated"]
    assert main(["-m", *overrides, "precision=fp16_sr,half_sr", "seed=0"]) == 0
    (summary,) = Path("outputs").rglob("summary.json")
    assert read_summary(summary.parent).precision == "half_sr"
