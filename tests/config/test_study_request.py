"""Which variants overrides stand for."""

from __future__ import annotations

import pytest

from mprun.config.reference import options
from mprun.config.settings import modes, variants
from mprun.errors import UsageError


def test_without_a_mode_every_mode_is_meant_and_float32_comes_first() -> None:
    listed = variants(["recipe=linear"])
    assert next(iter(listed.overrides)) == "fp32"
    assert set(listed.overrides) == set(modes()) == {*options("precision")}
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


def test_modes_that_cannot_be_with_what_was_asked_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = ["fp32", "bf16_mixed", "fp16_mixed", "half_sr"]
    monkeypatch.setattr("mprun.config.settings.modes", lambda folder: some)
    listed = variants(["op_lists=hmp"])
    assert set(listed.overrides) == {"bf16_mixed", "fp16_mixed"}
    assert set(listed.left_out) == {"fp32", "half_sr"}


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


@pytest.mark.representative(0, 2, 3, 5)
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["precision=fp32,bf16_mixd"], "did you mean 'bf16_mixed'?"),
        (["train.lrr=1"], "did you mean 'train.lr'?"),
        (["precision=fp32", "op_lists=hmp"], "op lists choose between"),
        (["precision=fp32,bf16_mixed", "train.lr=1e-3,-1"], "train.lr=-1.0: legal is above 0"),
        (["train.epochs=0"], "train.epochs=0: legal is 1 or more"),
        (["seed=1"], "seeds=5 runs seeds 0 to 4"),
        (["run.dir=x"], "a study sets seeds and folders itself"),
    ],
)
def test_what_is_wrong_in_every_combination_is_a_mistake(words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as error:
        variants(words)
    assert text in str(error.value)
