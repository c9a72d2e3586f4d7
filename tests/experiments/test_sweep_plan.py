"""A sweep's plan: its order, its file, what it refuses."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from mprun.errors import UsageError
from mprun.experiments.sweep import new_sweep, read_sweep
from mprun.experiments.trials import interleaved, put_aside

WORDS = {"a": ("precision=fp32",), "b": ("precision=bf16_mixed",), "c": ("precision=fp16_mixed",)}


def test_seeds_go_over_all_variants_each_beginning_with_another() -> None:
    trials = interleaved(WORDS, (7, 8, 9, 10))
    assert [t.variant for t in trials] == [*"abc", *"bca", *"cab", *"abc"]
    assert [t.seed for t in trials] == [7] * 3 + [8] * 3 + [9] * 3 + [10] * 3
    places = Counter((t.variant, i % 3) for i, t in enumerate(trials[:9]))
    assert set(places.values()) == {1}  # a Latin square


def test_a_trial_has_a_folder_name_whatever_its_variant_is_called() -> None:
    names = ["precision.layers={fc*: fp32}/..", "precision.layers={fc?: fp32}/..", "x" * 300]
    trials = interleaved(dict.fromkeys(names, ("x=1",)), (3,))
    assert [t.name for t in trials[:2]] == [
        "precision.layers=_fc___fp32__..-seed3",
        "precision.layers=_fc___fp32__..~2-seed3",
    ]
    for trial in trials:
        assert Path(trial.name).name == trial.name
        assert len(trial.name) < 120


def test_a_study_of_another_command_is_refused() -> None:
    new_sweep("advise", WORDS, range(2), "s")
    with pytest.raises(UsageError, match="a study of mprun advise; resume it with: mprun advise"):
        read_sweep("sweep", Path("s"))


def test_a_plan_read_again_is_the_same() -> None:
    made = new_sweep("sweep", WORDS, range(2), "s", None, ["train.max_steps=3"])
    found = read_sweep("sweep", Path("s"))
    assert found == made
    assert [t.words for t in found.trials[:2]] == [
        ("precision=fp32", "train.max_steps=3"),
        ("precision=bf16_mixed", "train.max_steps=3"),
    ]
    assert found.variants == WORDS  # without what is of the trials alone


def test_a_folder_that_holds_something_is_refused() -> None:
    new_sweep("sweep", WORDS, range(2), "s")
    with pytest.raises(UsageError, match=r"holds sweep\.json already.*run\.resume=s"):
        new_sweep("sweep", WORDS, range(2), "s")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1}', "\xff"])
def test_a_damaged_plan_is_refused(text: str) -> None:
    Path("sweep.json").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=r"sweep\.json is (damaged|not valid JSON)"):
        read_sweep("sweep", Path())


def test_a_plan_of_a_later_version_or_none_is_refused() -> None:
    with pytest.raises(UsageError, match="is it a sweep"):
        read_sweep("sweep", Path("nowhere"))
    new_sweep("sweep", WORDS, range(2), "s")
    kept = json.loads(Path("s/sweep.json").read_text(encoding="utf-8"))
    Path("s/sweep.json").write_text(json.dumps(kept | {"schema_version": 99}), encoding="utf-8")
    with pytest.raises(UsageError, match="schema_version 99"):
        read_sweep("sweep", Path("s"))


def test_what_a_killed_run_left_is_put_aside_and_nothing_is_lost() -> None:
    put_aside(Path("run"))
    for text in ("first", "second"):
        Path("run").mkdir()
        Path("run/metrics.jsonl").write_text(text, encoding="utf-8")
        put_aside(Path("run"))
    assert not Path("run").exists()
    assert Path("run.abandoned-1/metrics.jsonl").read_text(encoding="utf-8") == "first"
    assert Path("run.abandoned-2/metrics.jsonl").read_text(encoding="utf-8") == "second"
