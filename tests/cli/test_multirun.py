"""Sweeps: a run for every combination, whole records, one status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mprun.cli.main import main
from mprun.cli.train_command import show_sweep
from mprun.records.run_record import Summary, read_summary
from tests.cli.processes import Forking
from tests.schema import conforms
from tests.waiting import is_filled, wait_for

pytestmark = pytest.mark.usefixtures("native_is_fast", "quick_runs")

QUICK = ["-m", "recipe=linear", "train.max_steps=3"]


def runs() -> list[Path]:
    """The folders of the runs of the only sweep."""
    sweeps = list(Path("outputs").glob("*/*"))
    assert len(sweeps) == 1
    return sorted(path for path in sweeps[0].iterdir() if path.is_dir())


def test_a_run_for_every_combination(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = ["precision=fp32,bf16_mixed", "recipe.model.out_features=4,8", "batch.lr_rule=linear"]
    assert main([*QUICK, *words]) == 0
    found = [read_summary(run) for run in runs()]
    assert [run.name for run in runs()] == ["0", "1", "2", "3"]
    for summary in found:
        conforms(summary, Summary)
        assert (summary.status, summary.steps) == ("completed", 3)
    assert [s.precision for s in found] == ["fp32", "fp32", "bf16_mixed", "bf16_mixed"]
    sizes = [s.memory_bytes.parameters for s in found]
    assert sizes[1] == sizes[3] == 2 * sizes[0] == 2 * sizes[2]
    out, err = capsys.readouterr()
    assert out.partition("sweep in outputs")[2].count("completed") == 4
    assert err.count("batch.lr_rule has no effect") == 4
    assert not list(Path().rglob(".hydra"))
    (runs()[0].parent / ".submitit").mkdir()  # a launcher's own, and no run
    assert show_sweep(runs()[0].parent) == 0


def test_a_run_that_fails_leaves_the_others_whole(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "recipe=linear", "train.max_steps=5", "train.lr=1e-3,1e30,1e-2"]
    assert main(words) == 1
    output = capsys.readouterr()
    assert output.err.startswith("mprun: run 1: the loss became")
    assert output.err.count("\n") == 1
    found = [read_summary(run) for run in runs()]
    assert [s.status for s in found] == ["completed", "failed", "completed"]
    for summary in found:
        conforms(summary, Summary)


def test_a_run_that_cannot_begin_leaves_the_others_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*QUICK, "execution=auto,emulated"]) == 1
    output = capsys.readouterr()
    assert "run 1: execution=emulated" in output.err
    assert "failed" in output.out.partition("sweep in outputs")[2]
    assert [(run / "summary.json").exists() for run in runs()] == [True, False]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["precision=fp32,nope"], "'precision=nope': precision is one of"),
        (["train.lr=1,-1"], "train.lr=-1.0: legal is above 0"),
        (["run.resume=x"], "run.resume with -m"),
        (["seed=interval(0,1)"], "an interval"),
        (["hydra/launcher=nope"], "Hydra refuses the sweep: "),
        (["--show-config"], "leave out -m"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(Path().iterdir())


def test_ranges_and_globs_are_lists_too() -> None:
    assert main([*QUICK, "seed=range(1,2)", "precision=glob(*_mixed)"]) == 0
    found = [read_summary(run) for run in runs()]
    assert {(s.precision, s.seed) for s in found} == {("bf16_mixed", 1), ("fp16_mixed", 1)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_sweep(number: signal.Signals, status: int) -> None:
    words = ["-m", "recipe=linear", "train.epochs=null", "train.max_time_s=120", "seed=0,1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mprun", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wait_for(lambda: any(map(is_filled, Path("outputs").glob("*/*/0/metrics.jsonl"))), process)
    process.send_signal(number)
    out, error = process.communicate()
    assert process.returncode == status, error
    assert "Traceback" not in error + out
    assert [read_summary(run).status for run in runs()] == ["interrupted"]


@pytest.mark.representative("1")
@pytest.mark.parametrize("jobs", [1, 2])
def test_joblib_runs_several_at_once(jobs: int, forking: Forking) -> None:
    """One job runs in that process; two in processes that import torch each."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={jobs}", "train.lr=1e-3,1e30"]
    words.append("recipe.model.out_features=8")
    code = "import runpy; runpy.run_module('mprun', run_name='__main__')"
    done = forking.run(code, "-m", "recipe=linear", "train.max_steps=5", *words)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "mprun: run 1: the loss became" in done.stderr
    found = [read_summary(run) for run in runs()]
    assert [s.status for s in found] == ["completed", "failed"]
    for summary in found:
        conforms(summary, Summary)
