"""MLflow reads what a run's record holds; the module's runs share a store."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mprun.cli.main import main
from mprun.records.run_record import read_lines, read_summary
from mprun.train.loop import Trainer
from tests.train.conftest import Fresh
from tests.train.logged import (
    LINEAR,
    MNIST,
    curves_of,
    parameters_of,
    record_of,
    resume,
    tags_of,
    train,
)

pytestmark = [
    pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed"),
    pytest.mark.usefixtures("native_is_fast", "quick_runs"),
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `outputs`: the store is in it, for all runs up to three levels below."""
    return tmp_path_factory.mktemp("mlflow") / "outputs"


def client(outputs: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{outputs}/mlflow.db")


def logged(run: Path, outputs: Path) -> Any:
    """What MLflow has of a run."""
    return client(outputs).get_run(record_of(run).id)


def curve(run: Path, outputs: Path, name: str) -> list[tuple[int, float]]:
    points = client(outputs).get_metric_history(record_of(run).id, name)
    return [(point.step, point.value) for point in points]


def test_configuration_tags_and_scalars(
    outputs: Path, capsys: pytest.CaptureFixture[str], in_empty_folder: Path
) -> None:
    run = outputs / "day" / "study" / "whole"
    words = [*MNIST, "train.max_steps=7", "logger=mlflow", "logger.tags={team: vision}"]
    assert train(run, *words, "precision=bf16_mixed") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "INFO" not in out
    assert f"note: to see the run: mlflow ui --backend-store-uri sqlite:///{outputs}" in out
    has = logged(run, outputs)
    assert has.info.run_name == "bf16_mixed seed 0"
    assert client(outputs).get_experiment(has.info.experiment_id).name == "mnist"
    assert has.info.status == "FINISHED"
    assert has.data.params == {name: str(value) for name, value in parameters_of(run).items()}
    own = {k: v for k, v in has.data.tags.items() if not k.startswith("mlflow.")}
    assert own == tags_of(run) | {"team": "vision"}
    wanted = curves_of(run)
    assert has.data.metrics.keys() == wanted.keys()
    assert {name: curve(run, outputs, name) for name in wanted} == wanted
    assert list(in_empty_folder.iterdir()) == []


def test_a_resumed_run_continues_its_run_and_repeats_no_step(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plain = outputs / "day" / "resumed", Trainer.optimizer_step
    with monkeypatch.context() as patch:

        def step(self: Trainer, *given: Any) -> Any:
            if self.step == 6:
                raise ZeroDivisionError("planted")
            return plain(self, *given)

        patch.setattr(Trainer, "optimizer_step", step)
        assert train(run, *LINEAR, "train.max_steps=10", "logger=mlflow") == 1
    before = record_of(run).id
    assert logged(run, outputs).info.status == "FAILED"
    assert logged(run, outputs).data.tags["status"] == "failed"
    assert [n for n, _ in curve(run, outputs, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert resume(run, "train.max_steps=12") == 0
    assert record_of(run).id == before
    assert logged(run, outputs).info.status == "FINISHED"
    assert curve(run, outputs, "train/loss") == curves_of(run)["train/loss"]
    assert curve(run, outputs, "train/epoch_loss") == curves_of(run)["train/epoch_loss"]
    assert logged(run, outputs).data.params["train.max_steps"] == "10"  # they cannot be changed


def test_a_server_that_is_not_there_costs_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as taken:  # a port on which nobody answers
        taken.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        run = tmp_path / "run"
        words = [*LINEAR, "train.max_steps=6", "logger=mlflow", f"logger.uri='{uri}'"]
        assert train(run, *words) == 0
    assert capsys.readouterr().out.count("warning: logger=mlflow failed and is off") == 1
    summary = read_summary(run)
    assert summary.status == "completed"
    assert [x.partition(" (")[0] for x in summary.warnings] == [
        "logger=mlflow failed and is off from here on"
    ]
    assert sum(line["kind"] == "step" for line in read_lines(run)) == 6


def test_the_trials_of_a_sweep_are_runs(outputs: Path) -> None:
    study = outputs / "day" / "sweep"
    words = ["recipe=linear", "precision=fp32,bf16_mixed", "seeds=1", "train.max_steps=4"]
    assert main(["sweep", *words, "logger=mlflow", f"run.dir={study}"]) == 0
    trials = [study / "fp32-seed0", study / "bf16_mixed-seed0"]
    assert {logged(x, outputs).info.status for x in trials} == {"FINISHED"}


def test_it_is_imported_only_when_it_is_the_logger(fresh: Fresh, tmp_path: Path) -> None:
    words = [*LINEAR, "train.max_steps=2", "run.dir=run"]
    imported = fresh.imported(words, tmp_path)
    assert not {"mlflow", "wandb"} & imported
