"""What Hydra's users write works as Hydra documents it, or one line says what is legal."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
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


SWEEPER = """
from hydra.plugins.sweeper import Sweeper
from hydra.core.plugins import Plugins
from hydra.core.config_store import ConfigStore
import json, pathlib

class Halving(Sweeper):
    '''Tries a learning rate, then half of it or double, by the metric of the runs.'''
    def __init__(self): pass
    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)
    def sweep(self, arguments):
        given = [a for a in arguments if "interval" not in a]
        results = {}
        for n, lr in enumerate((1.0, 0.1, -1.0)):
            (done,) = self.launcher.launch([[*given, f"train.lr={lr}"]], initial_job_idx=n)
            try:
                results[lr] = done.return_value
            except Exception as error:
                results[lr] = type(error).__name__
        pathlib.Path("results.json").write_text(json.dumps(results))

ConfigStore.instance().store(
    group="hydra/sweeper", name="halving", node={"_target_": f"{__name__}.Halving"})
"""


def test_another_sweeper_gets_each_run_s_metric(tmp_path: Path) -> None:
    plugin = tmp_path / "plugins" / "hydra_plugins" / "halving" / "halving.py"
    plugin.parent.mkdir(parents=True)
    (plugin.parent / "__init__.py").touch()
    plugin.write_text(SWEEPER, encoding="utf-8")
    words = ["-m", *LINEAR, "train.lr=interval(0.1,1)", "hydra/sweeper=halving"]
    ended = subprocess.run(
        [sys.executable, "-m", "mprun", *words],
        env={**os.environ, "PYTHONPATH": str(plugin.parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr  # the last one's learning rate is refused
    results = json.loads(Path("results.json").read_text(encoding="utf-8"))
    runs = sorted(Path("outputs").glob("*/*/[01]"))
    losses = [read_summary(run).train.loss for run in runs]
    assert [results["1.0"], results["0.1"]] == losses
    assert all(math.isfinite(float(loss)) for loss in losses if loss is not None)
    assert losses[0] != losses[1]
    assert results["-1.0"] == "UsageError"
