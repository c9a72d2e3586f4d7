"""What Hydra's users write works as Hydra documents it, or one line says what is legal."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mprun.cli.main import main
from mprun.config import compose
from mprun.records.run_record import read_summary

LINEAR = ["recipe=linear", "train.max_steps=3"]


def test_a_prefix_of_hydra_s_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*LINEAR, "+train.lr=0.5", "++seed=3"]
    assert main([*words, "--show-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown == compose([*LINEAR, "train.lr=0.5", "seed=3"]).resolved
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("words", "has"),
    [
        (["--cfg", "job"], "no option '--cfg'; legal: "),
        (["hydra.run.dir=x"], "run.dir=FOLDER names the folder"),
        (["hydra/launcher=joblib"], "those of a launcher are legal, with -m"),
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


def test_a_sweep_s_folder_is_named_by_run_dir(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", *LINEAR, "seed=0,1"]
    assert main([*words, "run.dir=all"]) == 0
    found = sorted(Path("all").rglob("summary.json"))
    assert [read_summary(path.parent).seed for path in found] == [0, 1]
    assert [path.parent for path in found] == [Path("all/0"), Path("all/1")]
    assert "completed" in capsys.readouterr().out.partition("sweep in all")[2]
    assert main([*words, "run.dir=all"]) == 2
    assert "run.dir=all already contains" in capsys.readouterr().err
    assert main([*words, "run.dir=a,b"]) == 2
    assert "a sweep has one folder" in capsys.readouterr().err
    assert main([*words, "hydra/sweeper=optuna"]) == 2
    assert "those of a launcher are legal, with -m" in capsys.readouterr().err
