"""`mprun search-ops` on the hostile models: what does not stand a dtype, that and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mprun.cli.main import main
from tests.adversarial.models import CASES
from tests.adversarial.recipe import FLOAT32_IS_EXACT, WORDS, write_recipe
from tests.adversarial.seeds import SEEDS

pytestmark = pytest.mark.usefixtures("native_is_fast")


@pytest.fixture(autouse=True)
def recipe(in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe(in_empty_folder)
    monkeypatch.setenv("COLUMNS", "200")


def searched(case: str, precision: str, seed: int, *more: str) -> dict[str, Any]:
    """search_ops.json of a case."""
    words = (*WORDS, f"recipe.model.case={case}", f"precision={precision}", f"seed={seed}")
    assert main(["search-ops", *words, "run.dir=run", *more]) == 0
    found: dict[str, Any] = json.loads(Path("run/search_ops.json").read_text(encoding="utf-8"))
    return found


HOSTILE = {
    # An input of 1e5 is no float16: the layer that takes it is to blame.
    ("outlier_beyond_fp16", "fp16_mixed"): ["linear"],
    # The logarithm of what `exp` flushed to 0.
    ("log_of_zero", "fp16_mixed"): ["exp"],
    ("fp16_hostile", "fp16_mixed"): ["square"],
    # The sum of offset and input, and the product with it: all that `offset` computes.
    ("bf16_hostile", "bf16_mixed"): ["add", "linear"],
}
"""Case and mode to the ops that have to be in float32."""
FEW = ("search_ops.batches=2",)


def test_the_cases_that_have_to_be_found_are_those_that_training_shows_to_fail() -> None:
    """`test_truth.py` shows by training that these are the ones."""
    mixed = {(n, m) for n, case in CASES.items() for m in case.fails if m.endswith("_mixed")}
    assert set(HOSTILE) == mixed


@pytest.mark.representative("outlier_beyond_fp16-*-0", "bf16_hostile-*-0")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "precision"), HOSTILE)
def test_the_hostile_op_is_found_and_nothing_else(name: str, precision: str, seed: int) -> None:
    found = searched(name, precision, seed)
    assert sorted(found["answer"]["high"]) == HOSTILE[name, precision]
    assert found["answer"]["harm"] <= 1


@pytest.mark.representative("mask-fp16_mixed-0", "dead_relu-bf16_mixed-0")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "precision"),
    [(n, m) for n in CASES for m in ("fp16_mixed", "bf16_mixed") if (n, m) not in HOSTILE],
)
def test_a_model_that_trains_in_a_mode_needs_no_op_in_float32(
    name: str, precision: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found, zero = searched(name, precision, seed, *FEW), CASES[name].zero
    assert found["answer"]["high"] == []
    assert found["answer"]["harm"] <= 1
    # Zero by the gradients in float64 (test_truth.py), some of them in float32 as well.
    exact = name in FLOAT32_IS_EXACT
    assert found["zero_gradients"] == ([*zero] if exact else [])
    assert found["unjudged_parameters"] == ([] if exact else [*zero])
    reason = "gradients are exactly zero" if exact else "gradients are only rounding errors"
    said = f"not judged, {reason}: {', '.join(zero)}" if zero else "not judged"
    assert (said in capsys.readouterr().out) == bool(zero)
