"""Every row of the four systems has a test: one that bears its name, or one of another folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import test_study_commands
from tests.parity import test_parity
from tests.precision import test_loss_scale

pytestmark = pytest.mark.usefixtures("one_traced_step")

ROWS = {"A": 13, "B": 10, "C": 10, "D": 14}
"""How many rows there are of each system."""
ELSEWHERE: dict[str, list[Callable[..., None]]] = {
    "a12": [test_study_commands.test_double_compares_every_rule_after_equal_epochs],
    "b3": [
        test_parity.test_fp16_mixed_equals_autocast_with_grad_scaler,
        test_loss_scale.test_two_optimizers_equal_grad_scalers_bit_for_bit,
    ],
    "b6": [test_study_commands.test_advise_recommends_and_writes_what_mprun_takes],
    "c4": [
        test_loss_scale.test_float16_gradients_are_unscaled_in_float32_until_update,
        test_loss_scale.test_unscale_and_step_are_step_in_every_bit,
    ],
}
"""Rows that tests of other folders prove, all or a part of them."""


def test_each_row_has_a_test() -> None:
    text = "".join(p.read_text(encoding="utf-8") for p in Path(__file__).parent.glob("test_*.py"))
    tested = set(re.findall(r"^def test_([abcd]\d+)_", text, flags=re.MULTILINE))
    assert tested | {*ELSEWHERE} == {
        f"{s.lower()}{n}" for s, rows in ROWS.items() for n in range(1, rows + 1)
    }
