"""Loggers: what all have in common, and TensorBoard, which reads what the loop reported."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mprun.cli.main import main
from mprun.errors import UsageError
from mprun.records.run_config import OWN_TAGS
from mprun.records.run_record import Epoch, Scores, Status, read_lines, read_summary
from mprun.train import loggers
from mprun.train.callbacks import StepLine
from mprun.train.logger import LoggedRow, LoggedRun, Logger, run_tags
from mprun.train.loggers import LOGGERS, TensorBoardLogger, build_loggers, check_logger
from tests.train.logged import MNIST, curves_of

pytestmark = pytest.mark.usefixtures("quick_runs")

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


def test_a_resumed_run_replaces_what_it_does_again(folder: Path) -> None:
    (logger,) = build_loggers("tensorboard", LoggedRun(folder=folder))
    logger.on_steps([step_line(n, 1.0) for n in range(1, 6)])  # killed here; checkpoint at step 3
    logger.finish("completed")
    # TensorBoard orders files by their names, which hold the second: this one is older.
    (first,) = (folder / "tensorboard").iterdir()
    second = first.name.split(".")[3]
    first.rename(first.with_name(first.name.replace(second, f"{int(second) - 1:010d}")))
    (logger,) = build_loggers("tensorboard", LoggedRun(folder=folder, first_step=4))
    logger.on_steps([step_line(n, 2.0) for n in range(4, 7)])
    logger.finish("completed")
    assert curves(folder / "tensorboard")["train/loss"] == [
        *[(n, 1.0) for n in (1, 2, 3)],
        *[(n, 2.0) for n in (4, 5, 6)],
    ]


# What is not available


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("tensorboard", "TensorBoard"),
        ("mlflow", "MLflow"),
        ("wandb", "Weights & Biases"),
    ],
)
def test_without_the_package_no_run_begins(
    name: str, title: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in list(sys.modules):
        if module.split(".")[0] == name or module.startswith(f"torch.utils.{name}"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    check_logger("none")
    assert main([*LINEAR, f"logger={name}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(
        rf"mprun: logger={name} needs {title}, which cannot be imported \(.*\); "
        rf"pip install 'mprun\[{name}\]'\n",
        err,
    )
    assert list(Path.cwd().iterdir()) == []


def test_an_unknown_logger_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        check_logger("tensorbord")
    assert "legal: none, mlflow, tensorboard, wandb" in str(caught.value)
    assert "did you mean 'tensorboard'?" in str(caught.value)


def test_fields_without_effect_are_named() -> None:
    given = ["logger", "logger.name", "logger.tags.a", "logger.mode", "train.lr"]
    assert list(loggers.unused_fields("tensorboard", given).values()) == [
        "logger.mode has no effect: logger=tensorboard does not use it"
    ]
    assert list(loggers.unused_fields("none", given)) == ["logger.tags.a", "logger.mode"]


# In a run

LINEAR = ["recipe=linear", "train.max_steps=12", "run.dir=run"]


@pytest.mark.usefixtures("folder")
def test_a_run_writes_what_its_record_holds(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MNIST, "train.max_steps=7", "run.dir=run"]  # with validation and test
    assert main([*words, "logger=tensorboard", "logger.project=p"]) == 0
    assert "logger.project has no effect: logger=tensorboard" in capsys.readouterr().err
    wanted = {  # float32 is what an event holds
        name: [(step, pytest.approx(value, rel=1e-6)) for step, value in points]
        for name, points in curves_of(Path("run")).items()
    }
    assert curves(Path("run/tensorboard")) == wanted


# What all have in common


class InMemory(Logger):
    """Has in memory what a tracker would get; fails where it is asked to."""

    NAME = "mlflow"
    TITLE = "InMemory"
    MODULE = "json"
    WRITE_EVERY_S = 3600.0
    fails_in = ""
    made: ClassVar[list[InMemory]] = []

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rows: list[LoggedRow] = []
        self.calls: list[str] = []
        self.made.append(self)

    def _called(self, name: str) -> None:
        print("chatter")
        self.calls.append(name)
        if name == self.fails_in:
            raise ConnectionError("gone\nfor good")

    def begin(self, earlier: str | None) -> str:
        self._called("begin")
        return earlier or "one"

    def write(self, rows: Sequence[LoggedRow]) -> None:
        self._called("write")
        self.rows += rows

    def end(self, status: Status) -> None:
        self._called("end")
        self.calls.append(status)

    def steps(self, name: str) -> list[int]:
        return [row.step for row in self.rows if name in row.values]


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> type[InMemory]:
    """`logger=mlflow` is `InMemory`."""
    monkeypatch.setattr(InMemory, "made", [])
    monkeypatch.setitem(LOGGERS, "mlflow", InMemory)
    return InMemory


def test_the_order_of_calls(in_memory: type[InMemory], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINEAR, "logger=mlflow"]) == 0
    (logger,) = in_memory.made
    calls = [call for call in logger.calls if call != "write"]
    assert calls == ["begin", "end", "completed"]
    assert logger.steps("train/loss") == list(range(1, 13))
    assert "chatter" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("fails_in", ["begin", "write", "end"])
def test_a_logger_that_fails_ends_no_run(
    in_memory: type[InMemory],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails_in: str,
) -> None:
    assert main([*LINEAR[:-1], "run.dir=whole"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(in_memory, "fails_in", fails_in)
    assert main([*LINEAR, "logger=mlflow"]) == 0
    warning = (
        "logger=mlflow failed and is off from here on (ConnectionError: gone); "
        "the run and its record go on"
    )
    assert "".join(capsys.readouterr()).count("logger=mlflow failed") == 1
    summary = read_summary(Path("run"))
    assert (summary.status, summary.warnings) == ("completed", [warning])
    losses = [
        [x["loss"] for x in read_lines(Path(run)) if x["kind"] == "step"]
        for run in ("run", "whole")
    ]
    assert losses[0] == losses[1]
    (logger,) = in_memory.made
    assert logger.calls.count(fails_in) == 1


def test_each_step_reaches_a_curve_once(in_memory: type[InMemory]) -> None:
    assert main([*LINEAR, "logger=mlflow"]) == 0
    record = Path("run/logger.json")
    assert main(["run.resume=run", "train.max_steps=14"]) == 0
    first, second = in_memory.made
    assert first.steps("train/loss") + second.steps("train/loss") == list(range(1, 15))
    # as if the process had logged a step that no checkpoint has, and was killed then
    record.write_text(record.read_text().replace('"train/loss": 14', '"train/loss": 15'))
    assert main(["run.resume=run", "train.max_steps=17"]) == 0
    assert in_memory.made[2].steps("train/loss") == [16, 17]


@pytest.mark.parametrize(
    "content", ["{", '{"schema_version": 1, "logger": "mlflow", "id": "../x"}']
)
def test_a_damaged_logger_record_begins_another_run(
    in_memory: type[InMemory], content: str
) -> None:
    assert main([*LINEAR, "logger=mlflow"]) == 0
    Path("run/logger.json").write_text(content)
    assert main(["run.resume=run", "train.max_steps=14"]) == 0
    assert in_memory.made[1].steps("train/loss") == [13, 14]


def test_any_loop_can_use_a_logger(in_memory: type[InMemory], tmp_path: Path) -> None:
    (logger,) = build_loggers("mlflow", LoggedRun(folder=tmp_path))
    assert isinstance(logger, in_memory)
    logger.scalars({"loss": 1.0}, 1)
    logger.scalars({"loss": 2.0}, 1)  # a step that the curve has
    logger.scalars({"loss": 0.5, "accuracy": 0.25}, 2)
    logger.finish("completed")
    assert logger.calls == []  # nothing was begun
    logger.flush()
    assert [(row.step, row.values) for row in logger.rows] == [
        (1, {"loss": 1.0}),
        (2, {"loss": 0.5, "accuracy": 0.25}),
    ]
    logger.finish("running")
    assert logger.calls[-1] == "interrupted"


def test_parameters_are_flat_and_have_plain_names() -> None:
    content = {"a": {"b": 1, "c": {"d": None}}, "list": [1, 2], "globs": {"x.*": "fp32"}, "no": {}}
    assert LoggedRun(folder=Path("run"), configuration=content).parameters == {
        "a.b": 1,
        "a.c.d": None,
        "list": "[1, 2]",
        "globs": '{"x.*": "fp32"}',
        "no": "{}",
    }


def test_the_own_tags_are_those_that_a_user_cannot_set() -> None:
    assert main(LINEAR) == 0
    assert {*run_tags(read_summary(Path("run"))), "status"} == set(OWN_TAGS)
