"""Other names of modes (`fp16_sr`, Lightning's, Keras'): runs under both are one variant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mprun.config import compose
from mprun.config.compose import parse
from mprun.config.multirun import combinations
from mprun.config.validate import without_inert
from mprun.errors import UsageError
from mprun.precision.layers import check_rounding, layer_precisions, resolve
from mprun.precision.policy import policy
from mprun.records.mode_names import (
    ALIASES,
    KERAS_NAMES,
    LIGHTNING_NAMES,
    MEANT,
    own_label,
)
from mprun.records.run_config import variant_hash
from mprun.study.compare.verdicts import compare
from tests.study.compare.folders import runs_of

pytestmark = pytest.mark.usefixtures("quick_runs")

LAYERS = "precision.layers={fc1: NAME}"


def hash_of(*overrides: str) -> str:
    composed = compose(["recipe=mnist", *overrides])
    return variant_hash(without_inert(composed.config, composed.resolved))


@pytest.mark.parametrize("name", ["fp16_sr", "16-mixed"])
def test_both_names_are_one_configuration(name: str) -> None:
    other, ours = compose([f"precision={name}"]), compose([f"precision={ALIASES[name]}"])
    assert other.resolved == ours.resolved
    assert ours.resolved["precision"]["name"] == ALIASES[name]
    assert hash_of(f"precision={name}") == hash_of(f"precision={ALIASES[name]}")


@pytest.mark.parametrize("form", ["precision={}", "precision='{}'", "+precision={}"])
def test_every_other_name_is_read_as_the_mode(form: str) -> None:
    for name, mode in ALIASES.items():
        assert parse(form.format(name)).input_line == f"precision={mode}"


def test_names_stand_for_the_dtypes_that_their_libraries_give_them() -> None:
    """By the words in a name: `true` and plain dtypes store 16 bits, `mixed` stores float32."""
    for name in (*LIGHTNING_NAMES, *KERAS_NAMES):
        row, low = policy(name), "bfloat16" if "bf" in name else "float16"
        wide = {"32": "float32", "64": "float64"}
        compute = next((wide[bits] for bits in wide if bits in name), low)
        assert row.compute_dtype == compute
        assert row.param_dtype == ("float32" if "mixed" in name else compute)


@pytest.mark.parametrize("word", ["bf16", "fp16", "half", "amp", "mixed", "fp8", "int8"])
def test_a_name_that_fits_several_modes_is_answered_with_each(word: str) -> None:
    with pytest.raises(UsageError) as error:
        compose([f"precision={word}"])
    said = str(error.value).partition("did you mean ")[2]
    assert all(f"'{mode}'" in said for mode in MEANT[word])


def test_a_mode_of_one_s_own_under_such_a_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision/bf16-mixed.yaml").write_text("name: mine\n", encoding="utf-8")
    with pytest.raises(UsageError, match="is mprun's bf16_mixed; give your mode another name"):
        compose(["recipe=mnist"], tmp_path)


def test_settings_that_name_a_mode_take_the_other_names() -> None:
    from mprun.inspect.memory_of_modes import plan_modes

    planned = plan_modes(["recipe=linear", "precision=bf16-mixed"], None, "mixed_float16")
    assert [mode.label for mode in planned.modes] == ["fp16_mixed", "bf16_mixed"]
    runs = [*runs_of("fp32", [0.9, 0.9]), *runs_of("bf16_mixed", [0.9, 0.9])]
    found = compare(runs, margin=0.005, relative_margin=0.02, baseline="mixed_bfloat16")
    assert found.baseline == "bf16_mixed"
    assert own_label("16-mixed+hmp x2") == "fp16_mixed+hmp x2"
    with pytest.raises(UsageError, match="did you mean 'bf16_mixed'"):
        compare(runs, margin=0.005, relative_margin=0.02, baseline="bf16")


def test_both_names_are_one_precision_of_a_layer() -> None:
    given = [LAYERS.replace("NAME", name) for name in ("fp16_sr", "half_sr")]
    a, b = (hash_of("precision=bf16_sr", override) for override in given)
    assert a == b
    assert compose([given[0]]).resolved["precision"]["layers"] == {"fc1": "half_sr"}


@pytest.mark.parametrize("name", ["fp16_sr", "mixed_bfloat16"])
def test_a_preset_can_name_it(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "preset"
    folder.mkdir()
    text = (
        f"# @package _global_\ndefaults:\n  - override /precision: {name}\npreset:\n  name: mine\n"
    )
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    composed = compose(["recipe=mnist", "preset=mine"], tmp_path)
    assert composed.resolved["precision"]["name"] == ALIASES[name]


@pytest.mark.parametrize(
    ("listed", "once"),
    [
        ("half_sr,fp16_sr", ["half_sr"]),
        ("fp16_sr,half_sr", ["half_sr"]),
        ("bf16-mixed,32-true,'mixed_bfloat16'", ["bf16_mixed", "fp32"]),
    ],
)
def test_a_sweep_runs_it_once(listed: str, once: list[str]) -> None:
    found = combinations([parse(f"precision={listed}")])
    assert found == [(f"precision={name}",) for name in once]


def test_layers_of_a_program_take_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    named = resolve(model, {"0": "fp16_sr"})
    assert named == {"0": "half_sr"}
    check_rounding(named, policy("bf16_sr"))
    assert layer_precisions({"0": "fp16_sr"}, policy("bf16_sr"))["0"].stored == torch.float16
