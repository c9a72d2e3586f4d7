"""What is said to a command and not to a run."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest

from mprun.cli.main import COMMANDS
from mprun.config import settings
from mprun.config.reference import docs_of, leaves, options
from mprun.config.schema import Config
from mprun.config.settings import Settings, modes, parse_size, section_of, take, variants
from mprun.errors import UsageError


def test_settings_are_taken_and_the_rest_is_left() -> None:
    words = ["recipe=mnist", "compare.margin=0.01", "seeds=3", "train.lr=1,2", "compare.mix=[data]"]
    found, rest = take(words, "compare", "seeds")
    assert rest == ["recipe=mnist", "train.lr=1,2"]
    assert (found.seeds, found.compare.margin, found.compare.mix) == (3, 0.01, ["data"])
    assert found.compare.fail_if == "none"


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("compare.margn=1", "did you mean 'compare.margin'?"),
        ("compare.mix=[x]", "a list [name, ...] of recipes, data, hardware, code"),
        ("compare.fail_if=wors", "did you mean 'worse'?"),
        ("seeds=0", "seeds=0: legal is 1 or more"),
        ("compare.margin=???", "'compare.margin=???': compare.margin is a number"),
        ("seeds=${x}", "Interpolation key 'x' not found"),
        ("~seeds=glob(*)", "nothing can be deleted; leave seeds out"),
        ("seeds=1,2", "lists several values: a setting has one"),
    ],
)
def test_a_mistake_names_what_is_legal(word: str, text: str) -> None:
    with pytest.raises(UsageError) as error:
        take([word], "compare", "seeds")
    assert text in str(error.value)


def test_no_setting_has_the_name_of_a_part_of_a_run() -> None:
    runs = {key.partition(".")[0] for key in leaves()} | {f.name for f in fields(Config)}
    own = {section_of(x) for command in COMMANDS for x in command.settings}
    assert not runs & {*own, *(f.name for f in fields(Settings))}


def test_every_setting_is_documented() -> None:
    sections = [f.type for f in fields(Settings)]
    classes = [getattr(settings, str(name), None) for name in sections]
    own = [x for command in COMMANDS for x in command.settings]
    for cls in (Settings, *(c for c in (*classes, *own) if is_dataclass(c))):
        assert set(docs_of(cls)) == {f.name for f in fields(cls)}  # type: ignore[arg-type]
        assert all(text.endswith(".") for text in docs_of(cls).values())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("500MB", 500_000_000),
        ("1KB", 1000),
    ],
)
def test_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_size(text, "memory.fits") == size


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "16G", "16 gigs", "-1GiB", "0", "0.0001KB", "9" * 20 + "GB", "1..5GB", "nan"),
        *("12345", "1e9GB", "1+1"),
    ],
)
def test_anything_else_is_refused_with_what_is_legal(text: str) -> None:
    with pytest.raises(UsageError) as told:
        parse_size(text, "memory.fits")
    assert f"'memory.fits={text}'" in str(told.value)
    assert "16GiB" in str(told.value)


# ---- variants of a study -------------------------------------------------------------------------


def test_without_a_mode_every_mode_is_meant_and_float32_comes_first() -> None:
    listed = variants(["recipe=linear"])
    assert next(iter(listed.overrides)) == "fp32"
    assert set(modes()) == {*options("precision")}
    assert set(listed.overrides) == {*modes()} - {"fp64"}  # which answers another question
    assert listed.overrides["half_sr"] == ("precision=half_sr", "recipe=linear")
    assert listed.left_out == {}


def test_lists_are_combined_and_what_cannot_be_is_left_out() -> None:
    listed = variants(["precision=fp32,bf16_mixed", "op_lists=none,hmp", "train.lr=1e-3,1e-2"])
    assert set(listed.overrides) == {
        f"{mode}+train.lr={lr}"
        for mode in ("fp32", "bf16_mixed", "bf16_mixed+hmp")
        for lr in ("0.001", "0.01")
    }
    assert set(listed.left_out) == {"fp32+hmp+train.lr=0.001", "fp32+hmp+train.lr=0.01"}
    assert "op lists choose between" in listed.left_out["fp32+hmp+train.lr=0.001"]


def test_a_combination_without_effect_of_its_own_is_the_variant_it_repeats() -> None:
    """The rounding of float32 parameters changes no bit; that of bfloat16 ones does."""
    listed = variants(["precision=fp32,bf16_true", "precision.rounding=nearest,kahan"])
    assert set(listed.overrides) == {
        "fp32+precision.rounding=nearest",
        "bf16_true+precision.rounding=nearest",
        "bf16_true+precision.rounding=kahan",
    }
    assert listed.left_out == {
        "fp32+precision.rounding=kahan": "the same as fp32+precision.rounding=nearest; "
        "precision.rounding has no effect: precision=fp32 keeps nothing in 16 bits"
    }


@pytest.mark.representative(1, 2)
@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["precision=half_sr"], ["half_sr"]),
        (["precision=bf16_mixed", "op_lists=none,hmp"], ["bf16_mixed", "hmp"]),
        (["precision=bf16_mixed", "batch=base,double"], ["bf16_mixed", "double"]),
    ],
)
def test_names_say_what_varies(words: list[str], names: list[str]) -> None:
    assert list(variants(words).overrides) == names


@pytest.mark.representative(0, 1, 2, 3)
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["precision=fp32,bf16_mixd"], "did you mean 'bf16_mixed'?"),
        (["precision=fp32", "op_lists=hmp"], "op lists choose between"),
        (["precision=fp32,bf16_mixed", "train.lr=1e-3,-1"], "train.lr=-1.0: legal is above 0"),
        (["seed=1"], "seeds=5 runs seeds 0 to 4"),
        (["run.dir=x"], "a study sets seeds and folders itself"),
    ],
)
def test_what_is_wrong_in_every_combination_is_a_mistake(words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as error:
        variants(words)
    assert text in str(error.value)
