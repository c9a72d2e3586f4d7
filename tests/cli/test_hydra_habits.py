"""What Hydra's users write works as Hydra documents it, or one line says what is legal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from mprun.cli.main import main
from mprun.config import compose
from mprun.records.run_record import read_summary

LINEAR = ["recipe=linear", "train.max_steps=3"]


def test_cfg_job_is_show_config(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*LINEAR, "+train.lr=0.5", "++seed=3"]
    assert main([*words, "--cfg", "job"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown == compose([*LINEAR, "train.lr=0.5", "seed=3"]).resolved
    assert not list(Path().iterdir())


def test_of_two_choices_of_a_group_the_last_counts_and_a_note_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*LINEAR, "seed=1", "precision=fp32", "++seed=2", "precision=bf16_mixed"]
    assert main([*words, "recipe=linear", "--show-config"]) == 0  # the same recipe twice is one
    shown, told = capsys.readouterr()
    assert yaml.safe_load(shown)["seed"] == 2
    assert told == "note: precision is given 2 times; the last one counts: precision=bf16_mixed\n"


@pytest.mark.parametrize(
    ("words", "has"),
    [
        (["--cfg", "hydra"], "choose from"),
        (["--cfg", "job", "--resolve"], "no option '--resolve'; legal: "),
        (["hydra.run.dir=${nope}"], "Hydra refuses it"),
        (["hydra/launcher=joblib"], "mprun -m reads Hydra's own settings"),
        (["~precision"], "leave precision out"),
        (["precision@two=fp32"], "write precision=..."),
    ],
)
def test_what_mprun_does_otherwise_is_one_line(
    words: list[str], has: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LINEAR, *words]) == 2
    error = capsys.readouterr().err
    assert has in error
    assert error.count("\n") == 1
    assert not list(Path().iterdir())


def test_hydra_run_dir_is_the_run_s_folder_with_hydra_s_patterns() -> None:
    given = [*LINEAR, "seed=5", "hydra.run.dir=runs/${oc.env:USERS}/${hydra.job.override_dirname}"]
    os.environ["USERS"] = "ann"
    try:
        assert main(given) == 0
    finally:
        del os.environ["USERS"]
    (summary,) = Path("runs/ann").rglob("summary.json")
    assert read_summary(summary.parent).seed == 5
    assert summary.parent.name == "recipe=linear,seed=5,train.max_steps=3"


def test_a_sweep_s_folders_are_named_by_hydra(capsys: pytest.CaptureFixture[str]) -> None:
    named = ["hydra.sweep.dir=all/${now:%Y}", "hydra.sweep.subdir=s/${hydra.job.override_dirname}"]
    assert main(["-m", *LINEAR, "seed=0,1", *named]) == 0
    found = sorted(Path("all").rglob("summary.json"))
    assert [read_summary(path.parent).seed for path in found] == [0, 1]
    assert all(path.parent.parent.name == "s" for path in found)
    assert "completed" in capsys.readouterr().out.partition("sweep in all")[2]
    assert main(["-m", *LINEAR, "seed=0,1", *named]) == 2
    assert "choose another hydra.sweep.dir" in capsys.readouterr().err


def test_another_sweeper_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *LINEAR, "train.lr=1e-3,2e-3", "hydra/sweeper=optuna"]) == 2
    assert "mprun -m runs every combination" in capsys.readouterr().err
