"""A study's plan: its order, its file, what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mprun.config.settings import StudyRequest, study_request
from mprun.errors import UsageError
from mprun.study.advise import new_advise_study
from mprun.study.double import new_double_study
from mprun.study.study import Study, new_study, new_sweep, resumed_study
from mprun.study.trials import interleaved, put_aside

VARIANTS = {
    "a": ("precision=fp32",),
    "b": ("precision=bf16_mixed",),
    "c": ("precision=fp16_mixed",),
}


def made(command: str = "sweep", of_trials: Sequence[str] = ()) -> Study:
    """A study of two seeds in the folder `s`."""
    request = study_request(command, ["run.dir=s", "seeds=2"], None)
    return new_study(request, VARIANTS, of_trials=of_trials)


def test_seeds_go_over_all_variants_each_starting_with_another() -> None:
    trials = interleaved(VARIANTS, (7, 8, 9, 10))
    assert [t.variant for t in trials] == [*"abc", *"bca", *"cab", *"abc"]
    assert [t.seed for t in trials] == [7] * 3 + [8] * 3 + [9] * 3 + [10] * 3
    places = Counter((t.variant, i % 3) for i, t in enumerate(trials[:9]))
    assert set(places.values()) == {1}  # a Latin square


MNIST = [
    *("recipe=mnist", "data.source=generated", "data.train_limit=320", "data.eval_limit=32"),
    *("precision=fp32,bf16_mixed", "run.dir=s", "speed=plain"),
]
MORE = ("train.validations=10", "train.average_weights=5")


def planned(make: Callable[[StudyRequest], Study], *words: str) -> tuple[str, ...]:
    """What a new study sets in all of its runs."""
    command = make.__name__.split("_")[1]
    given = [x for x in MNIST if command != "double" or not x.startswith("precision")]
    sections = ["advise"] if command == "advise" else []
    request = study_request(command, [*given, *words], Path("own"), *sections)
    return make(request).plan.of_trials


@pytest.fixture
def own_options() -> None:
    Path("own/preset").mkdir(parents=True)
    text = "# @package _global_\npreset: {name: mine}\ntrain: {validations: 3}\n"
    Path("own/preset/mine.yaml").write_text(text, encoding="utf-8")


@pytest.mark.usefixtures("own_options")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], MORE),
        (["data.validation_fraction=0"], MORE[1:]),  # its runs have a test set
        (["train.average_weights=0"], MORE[:1]),
        (["train.validations=4"], MORE[1:]),
        (["preset=mine"], MORE[1:]),
        (["data.validation_fraction=0", "data.test=false"], ()),
        (["train.epochs=null", "train.max_time_s=9"], ()),
    ],
)
def test_a_sweep_adds_scores_that_the_user_did_not_set(
    words: list[str], expected: tuple[str, ...]
) -> None:
    assert planned(new_sweep, *words) == expected


@pytest.mark.usefixtures("own_options")
def test_studies_that_choose_add_them_on_held_out_samples() -> None:
    held_out = ("data.test=false", "data.validation_fraction=0.1")
    words = ["data.validation_fraction=0", "train.batch_size=32"]
    assert planned(new_double_study, *words) == (*held_out, *MORE)
    shutil.rmtree("s")
    words += ["train.epochs=null", "train.max_time_s=9"]  # the study's own steps are planned
    assert planned(new_advise_study, *words) == (*held_out, "train.max_steps=500", *MORE)


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
    made("advise")
    with pytest.raises(UsageError, match="a study of mprun advise; resume it with: mprun advise"):
        resumed_study("sweep", Path("s"))


def test_a_plan_read_again_is_the_same() -> None:
    written = made(of_trials=["train.max_steps=3"])
    study = resumed_study("sweep", Path("s"))
    assert study == written
    assert [t.overrides for t in study.trials[:2]] == [
        ("precision=fp32", "train.max_steps=3"),
        ("precision=bf16_mixed", "train.max_steps=3"),
    ]
    assert study.plan.variants == VARIANTS  # without the overrides of the trials


def test_a_folder_with_another_study_or_with_something_else_is_refused() -> None:
    made()
    with pytest.raises(UsageError, match=r"sweep\.json of another study.*run\.resume=s"):
        made(of_trials=["train.max_steps=3"])
    with pytest.raises(UsageError, match="a study of mprun sweep"):
        made("advise")
    Path("s/sweep.json").rename("s/notes.txt")
    with pytest.raises(UsageError, match=r"s already contains notes\.txt"):
        made()
    Path("s/notes.txt").unlink()
    Path("s").rmdir()
    Path("s").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match=r"s cannot be written \(File exists\)"):
        made()


def test_the_same_study_asked_for_again_is_joined(capsys: pytest.CaptureFixture[str]) -> None:
    assert made() == made()
    assert "s has this study already; its open runs are continued" in capsys.readouterr().err


@pytest.mark.parametrize("of_trials", [(), ("train.max_steps=3",)])
def test_of_studies_that_begin_at_once_the_later_one_joins_if_it_is_the_same(
    of_trials: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one has looked into the folder before there was a plan."""
    first = made()
    monkeypatch.setattr("mprun.study.study._foreign", lambda folder: None)
    if of_trials:
        with pytest.raises(UsageError, match=r"sweep\.json of another study"):
            made(of_trials=of_trials)
    else:
        assert made() == first
    assert resumed_study("sweep", Path("s")) == first


def test_a_study_begins_while_another_process_writes_the_same_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its unfinished file is nobody's other work in the folder."""
    sync, began = os.fsync, []

    def begin_another(file: int) -> None:
        sync(file)
        if not began:
            began.append(True)
            began.append(made())

    monkeypatch.setattr(os, "fsync", begin_another)
    assert made() == began[1]


def test_a_plan_of_a_later_version_or_none_is_refused() -> None:
    with pytest.raises(UsageError, match="is nowhere a study"):
        resumed_study("sweep", Path("nowhere"))
    made()
    plan = json.loads(Path("s/sweep.json").read_text(encoding="utf-8"))
    Path("s/sweep.json").write_text(json.dumps(plan | {"schema_version": 99}), encoding="utf-8")
    with pytest.raises(UsageError, match="schema_version 99"):
        resumed_study("sweep", Path("s"))


def test_what_a_killed_run_left_is_put_aside_and_nothing_is_lost() -> None:
    put_aside(Path("run"))
    for text in ("first", "second"):
        Path("run").mkdir()
        Path("run/metrics.jsonl").write_text(text, encoding="utf-8")
        put_aside(Path("run"))
    assert not Path("run").exists()
    assert Path("run.abandoned-1/metrics.jsonl").read_text(encoding="utf-8") == "first"
    assert Path("run.abandoned-2/metrics.jsonl").read_text(encoding="utf-8") == "second"


def test_a_plan_of_an_earlier_version_is_read() -> None:
    plan = {"schema_version": 1, "command": "sweep", "folder": None, "variants": {"a": ["seed=1"]}}
    plan |= {"seeds": [0], "config_dir": None, "of_trials": []}
    Path("sweep.json").write_text(json.dumps(plan), encoding="utf-8")
    study = resumed_study("sweep", Path())
    assert (study.plan.variants, study.plan.not_tried) == ({"a": ("seed=1",)}, {})
