"""Loggers: what all have in common, and TensorBoard, which reads what the loop reported."""

from __future__ import annotations

import math
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mprun.cli.main import main
from mprun.errors import UsageError
from mprun.records.run_record import Epoch, Scores, read_lines, read_summary
from mprun.train.callbacks import StepLine
from mprun.train.loggers import LOGGERS, LoggedRun, build_loggers, check_logger
from mprun.train.loggers.tensorboard_logger import TensorBoardLogger

NONE = Scores(loss=None, accuracy=None)


def step_line(step: int, loss: float = 0.5) -> StepLine:
    return StepLine(
        step=step,
        epoch=1,
        loss=loss,
        lr=0.1 / step,
        loss_scale=1024.0,
        skipped=False,
        step_time_ms=2.0 + step,
        data_time_ms=0.25,
        timed=True,
    )


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder: by tag the points (step, value)."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulated: Any = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulated.Reload()
    tags = accumulated.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in accumulated.Scalars(tag)] for tag in tags}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("tensorboard")
    return tmp_path / "run"


def test_every_scalar_of_a_run_arrives(folder: Path) -> None:
    (logger,) = build_loggers("tensorboard", LoggedRun(folder=folder))
    logger.on_steps([step_line(1, 0.75), step_line(2, 0.5)])
    logger.on_steps([step_line(3, 0.25)])
    epoch = Epoch(
        epoch=1,
        train=Scores(loss=0.5, accuracy=0.125),
        validation=Scores(loss=0.375, accuracy=0.25),
    )
    logger.on_epoch_end(epoch, 3)
    logger.on_test(Scores(loss=1.5, accuracy=0.75), 3)
    logger.finish("completed")
    assert curves(folder / "tensorboard") == {
        "train/loss": [(1, 0.75), (2, 0.5), (3, 0.25)],
        # float32 is what an event holds
        "train/lr": [(n, pytest.approx(0.1 / n, rel=1e-7)) for n in (1, 2, 3)],
        "train/loss_scale": [(1, 1024.0), (2, 1024.0), (3, 1024.0)],
        "time/step_ms": [(1, 3.0), (2, 4.0), (3, 5.0)],
        "time/data_ms": [(1, 0.25), (2, 0.25), (3, 0.25)],
        "train/epoch_loss": [(3, 0.5)],
        "train/epoch_accuracy": [(3, 0.125)],
        "validation/loss": [(3, 0.375)],
        "validation/accuracy": [(3, 0.25)],
        "test/loss": [(3, 1.5)],
        "test/accuracy": [(3, 0.75)],
    }


def test_what_does_not_apply_is_left_out(folder: Path) -> None:
    logger = TensorBoardLogger(LoggedRun(folder=folder))
    train = Scores(loss=0.5, accuracy=None)
    logger.on_epoch_end(Epoch(epoch=1, train=train, validation=NONE), 7)
    logger.on_test(NONE, 7)
    logger.finish("completed")
    assert curves(folder / "tensorboard") == {"train/epoch_loss": [(7, 0.5)]}


def test_broken_losses_are_written_as_they_are(folder: Path) -> None:
    logger = TensorBoardLogger(LoggedRun(folder=folder))
    logger.on_steps([step_line(1, math.nan), step_line(2, math.inf), step_line(3, -math.inf)])
    train = Scores(loss="nan", accuracy=0.0)
    logger.on_epoch_end(Epoch(epoch=1, train=train, validation=NONE), 3)
    logger.on_test(Scores(loss="inf", accuracy=0.0), 3)
    logger.finish("completed")
    written = curves(folder / "tensorboard")
    first, *others = [value for _, value in written["train/loss"]]
    assert math.isnan(first)
    assert others == [math.inf, -math.inf]
    assert math.isnan(written["train/epoch_loss"][0][1])
    assert written["test/loss"] == [(3, math.inf)]


def test_all_is_written_when_a_call_returns(folder: Path) -> None:
    """So that nothing is left to a thread that would run beside the next step."""
    logger = TensorBoardLogger(LoggedRun(folder=folder))
    logger.on_steps([step_line(n) for n in range(1, 201)])
    assert len(curves(folder / "tensorboard")["train/loss"]) == 200
    logger.on_test(Scores(loss=1.0, accuracy=None), 200)
    assert curves(folder / "tensorboard")["test/loss"] == [(200, 1.0)]
    logger.finish("completed")


def test_closing_leaves_no_thread(folder: Path) -> None:
    before = threading.active_count()
    logger = TensorBoardLogger(LoggedRun(folder=folder))
    logger.on_steps([step_line(1)])
    logger.finish("completed")
    assert threading.active_count() == before


def test_a_resumed_run_replaces_what_it_does_again(folder: Path) -> None:
    (logger,) = build_loggers("tensorboard", LoggedRun(folder=folder))
    logger.on_steps([step_line(n, 1.0) for n in range(1, 6)])  # killed here; checkpoint at step 3
    logger.finish("completed")
    time.sleep(1.01)  # TensorBoard orders files by their names, which hold the second
    (logger,) = build_loggers("tensorboard", LoggedRun(folder=folder, first_step=4))
    logger.on_steps([step_line(n, 2.0) for n in range(4, 7)])
    logger.finish("completed")
    assert curves(folder / "tensorboard")["train/loss"] == [
        *[(n, 1.0) for n in (1, 2, 3)],
        *[(n, 2.0) for n in (4, 5, 6)],
    ]


def test_none_is_no_callback(tmp_path: Path) -> None:
    assert build_loggers("none", LoggedRun(folder=tmp_path / "run")) == []


# What is not available


@pytest.fixture
def no_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were not installed."""
    for name in list(sys.modules):
        if name.split(".")[0] == "tensorboard" or name.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)


@pytest.mark.usefixtures("no_tensorboard")
def test_without_the_package_the_fix_is_named() -> None:
    check_logger("none")
    with pytest.raises(UsageError) as caught:
        check_logger("tensorboard")
    message = str(caught.value)
    assert message.startswith("logger=tensorboard needs TensorBoard, which cannot be imported (")
    assert message.endswith("; pip install 'mprun[tensorboard]'")
    assert "\n" not in message


def test_an_unknown_logger_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        check_logger("tensorbord")
    assert str(caught.value) == (
        "logger.name=tensorbord: legal: none, tensorboard, mlflow, wandb, trackio; "
        "did you mean 'tensorboard'?"
    )
    with pytest.raises(UsageError, match=r"legal: none, tensorboard, mlflow, wandb, trackio$"):
        build_loggers("", LoggedRun(folder=Path("run")))


def test_each_has_its_file_of_the_group() -> None:
    conf = Path(__file__).resolve().parents[2] / "conf" / "logger"
    assert sorted(p.stem for p in conf.glob("*.yaml")) == sorted(LOGGERS)


# In a run

LINEAR = ["recipe=linear", "train.max_steps=12", "run.dir=run"]


@pytest.mark.usefixtures("folder")
def test_a_run_writes_what_its_record_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINEAR, "logger=tensorboard"]) == 0
    assert capsys.readouterr().err == ""
    written = curves(Path("run/tensorboard"))
    lines = [x for x in read_lines(Path("run")) if x["kind"] == "step"]
    assert len(lines) == 12
    for tag, key in [
        ("train/loss", "loss"),
        ("train/lr", "lr"),
        ("train/loss_scale", "loss_scale"),
        ("time/step_ms", "step_time_ms"),
        ("time/data_ms", "data_time_ms"),
    ]:
        # float32 is what an event holds
        assert written[tag] == [(x["step"], pytest.approx(x[key], rel=1e-6)) for x in lines]
    losses = [float(e.train.loss or math.nan) for e in read_summary(Path("run")).history]
    epoch_losses = [value for _, value in written["train/epoch_loss"]]
    assert epoch_losses == pytest.approx(losses, rel=1e-6)


@pytest.mark.usefixtures("no_tensorboard")
def test_without_the_package_no_run_begins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINEAR, "logger=tensorboard"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mprun: logger=tensorboard needs TensorBoard")
    assert err.count("\n") == 1
    assert list(Path.cwd().iterdir()) == []
