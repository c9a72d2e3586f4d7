"""Overrides as a preset say the same as the overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from mprun.config import compose
from mprun.records.run_config import variant_hash
from mprun.study.advise import preset_text, write_preset

CASES = [
    ["recipe=mnist", "precision=bf16_mixed"],
    ["recipe=linear", "precision=half_sr", "loss_scale=static", "loss_scale.value=1024"],
    ["recipe=mnist", "op_lists=hmp", "train.lr=2e-3", "precision.layers={0: fp32}"],
    ["recipe=mnist", "precision=fp16_mixed", "train.clip_norm=null", "recipe.model.units=64"],
    ["recipe=mnist", "batch=double", "batch.lr_rule=sqrt", "train.scheduler=cosine"],
]


@pytest.mark.representative(2, 4)
@pytest.mark.parametrize("words", CASES, ids=lambda w: w[1])
def test_a_preset_is_the_same_run_and_the_same_variant(words: list[str]) -> None:
    path = write_preset(Path("made"), "advised", preset_text("advised", words, ["why\nso"]))
    assert path == Path("made/preset/advised.yaml")
    found, meant = compose(["preset=advised"], Path("made")).resolved, compose(words).resolved
    assert found.pop("preset") == meant.pop("preset") | {"name": "advised"}
    assert found == meant
    assert variant_hash(found) == variant_hash(meant)


def test_the_command_line_wins_over_a_preset() -> None:
    write_preset(Path("made"), "advised", preset_text("advised", CASES[0], ["why"]))
    words = ["preset=advised", "precision=fp32", "train.lr=1"]
    config = compose(words, Path("made")).config
    assert (config.precision.name, config.train.lr) == ("fp32", 1.0)
