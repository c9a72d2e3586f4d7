"""`import mprun`: what it gives, and that it costs nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict

import pytest

import mprun
from mprun.config import compose
from mprun.config.reference import options
from mprun.precision.policy import SHIPPED_MODES
from mprun.records.mode_names import ALIASES


def test_importing_it_does_not_import_torch() -> None:
    code = (
        "import sys, mprun\n"
        "assert {'Precision', 'Recipe', 'numerics', 'optim', 'policy'} <= set(dir(mprun))\n"
        "assert 'torch' not in sys.modules and 'yaml' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_names_are_those_of_the_packages() -> None:
    from mprun import numerics, optim
    from mprun.precision import Precision
    from mprun.recipe import Recipe

    assert (mprun.Precision, mprun.Recipe) == (Precision, Recipe)
    assert (mprun.optim, mprun.numerics) == (optim, numerics)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'mprun' has no attribute 'Precison'"):
        mprun.Precison  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", options("precision"))
def test_a_policy_is_the_one_that_a_run_of_that_mode_has(name: str) -> None:
    section = compose([f"precision={name}"]).resolved["precision"]
    row = asdict(mprun.policy(name))
    assert row == {key: section[key] for key in row}


def test_an_unknown_policy_is_one_line_with_the_legal_names() -> None:
    with pytest.raises(
        ValueError, match=r"no precision mode is named 'bf16_st'; did you mean"
    ) as e:
        mprun.policy("bf16_st")
    assert all(name in str(e.value) for name in (*SHIPPED_MODES, *ALIASES))
    assert "\n" not in str(e.value)


def test_every_mode_is_a_file_and_other_names_stand_for_modes() -> None:
    assert {*SHIPPED_MODES} == {*options("precision")}
    assert {*ALIASES.values()} <= {*SHIPPED_MODES}
    assert not {*ALIASES} & {*SHIPPED_MODES}
    assert mprun.policy("mixed_bfloat16") == mprun.policy("bf16_mixed")
    with pytest.raises(ValueError, match="did you mean 'bf16_mixed'"):
        mprun.policy("bf16")
