"""`train.average_weights` in whole runs: modes, resuming, records, messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mprun.cli.main import main
from mprun.records.run_record import AveragedScores, read_summary
from mprun.train import checkpoint
from mprun.train.weight_average import TOO_EARLY
from tests.run.conftest import AtStep
from tests.run.test_data_of_any_kind import PLAIN, recipe
from tests.run.test_resume import (
    MNIST,
    assert_equal,
    assert_same_run,
    crash,
    exact_lines,
    terminate,
    trained,
)

pytestmark = pytest.mark.usefixtures("quick_runs")

PLACES = 4  # Of 16 steps: 13 to 16
WORDS = [*MNIST, "train.max_steps=16"]
AVERAGED = [*WORDS, f"train.average_weights={PLACES}"]
MODES = {
    "fp32": [],
    "fp16_mixed": ["loss_scale.growth_interval=5"],
    "half_sr": [],
    "bf16_true": ["precision.rounding=kahan"],
    "fp8_tensorwise": [],
}


def averaged(run: str) -> AveragedScores:
    found = read_summary(Path(run)).averaged
    assert found is not None
    return found


@pytest.mark.representative("half_sr", "fp8_tensorwise")
@pytest.mark.parametrize("mode", MODES)
def test_it_changes_nothing_else_in_any_mode(mode: str) -> None:
    """The sums are those of the weights that shorter runs end with."""
    more = [f"precision={mode}", *MODES[mode], "train.validations=3"]
    assert main([*WORDS, *more, "run.dir=plain"]) == 0
    assert main([*AVERAGED, *more, "run.dir=run"]) == 0
    state = trained(Path("run"))
    average = state.pop("average")
    assert_equal(state, trained(Path("plain")))
    assert exact_lines(Path("run")) == exact_lines(Path("plain"))
    run, plain = read_summary(Path("run")), read_summary(Path("plain"))
    for key in ("history", "train", "test", "variant_hash", "warnings"):
        assert getattr(run, key) == getattr(plain, key), key
    scores = averaged("run")
    assert scores.places == average["count"] == PLACES
    assert average["places"] == [13, 14, 15, 16]
    for found, last in ((scores.validation, run.history[-1].validation), (scores.test, run.test)):
        assert found.loss != last.loss  # some steps apart
        assert float(found.loss or math.nan) == pytest.approx(float(last.loss or 0), rel=0.3)
    states = []
    for step in (13, 14, 15):
        words = [*WORDS, *more, f"train.max_steps={step}", f"run.dir=to-{step}"]
        assert main(words) == 0
        states.append(trained(Path(f"to-{step}"))["model"])
    for name, total in average["sums"].items():
        values = [x[name].double() for x in (*states, state["model"])]
        assert torch.equal(total, sum(values)), name


@pytest.mark.parametrize(("fault", "status"), [(crash, 1), (terminate, 143)])
@pytest.mark.parametrize("step", [11, 15])
def test_a_resumed_run_has_the_same_mean(
    at_step: AtStep, fault: Callable[[], None], status: int, step: int
) -> None:
    words = [*AVERAGED, "train.checkpoint_every_steps=2", "precision=half_sr"]
    assert main([*words, "run.dir=whole"]) == 0
    at_step(step, fault)
    assert main([*words, "run.dir=run"]) == status
    assert ("average" in trained(Path("run"))) == (step == 15)
    assert main(["run.resume=run"]) == 0
    assert_same_run(Path("run"), Path("whole"))
    assert averaged("run") == averaged("whole")
    assert main(["run.resume=run"]) == 0  # takes no further step
    assert averaged("run") == averaged("whole")


def test_a_checkpoint_of_an_earlier_version_is_continued() -> None:
    assert main([*AVERAGED, "run.dir=run"]) == 0
    file = checkpoint.path_in(Path("run"))
    state = torch.load(file, weights_only=True)
    del state["trainer"]["average"]
    torch.save(state, file)
    assert main(["run.resume=run", "train.max_steps=18"]) == 0
    assert averaged("run").places == 2  # 15 to 18 without the steps before


def test_steps_that_are_not_planned(capsys: pytest.CaptureFixture[str]) -> None:
    held = '"validation": DataLoader(TensorDataset(*samples(9)), batch_size=4)'
    words = [recipe("DataLoader(Stream(22), 4)", held), *PLAIN, "train.average_weights=3"]
    assert main([*words, "train.epochs=2", "run.dir=stream"]) == 0
    text = "train.average_weights has no effect: the number of steps is not planned"
    assert text in capsys.readouterr().err
    assert read_summary(Path("stream")).averaged is None
    assert main([*words, "train.max_steps=8", "run.dir=steps"]) == 0
    assert averaged("steps").places == 3
    assert averaged("steps").test.loss is None
    nothing: Any = [recipe("DataLoader(Stream(22), 4)"), *PLAIN, "train.average_weights=3"]
    assert main([*nothing, "train.max_steps=8", "run.dir=nothing"]) == 0
    assert "train.average_weights has no effect: there are no samples" in capsys.readouterr().err


def test_a_limit_of_time_before_the_last_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["train.epochs=null", "train.max_steps=1000000", "train.max_time_s=0.5"]
    words = [*MNIST, *limits, "run.dir=run"]
    assert main([*words, "train.average_weights=5"]) == 0
    assert f"no averaged weights were scored: {TOO_EARLY}" in capsys.readouterr().out
    summary = read_summary(Path("run"))
    assert summary.averaged is None
    assert summary.warnings[-1].endswith(TOO_EARLY)


def test_a_parameter_without_a_mean_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    more = """
def model():
    module = nn.Linear(3, 1)
    module.codes = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    return module
"""
    held = '"validation": DataLoader(TensorDataset(*samples(9)), batch_size=4)'
    words = [recipe("TensorDataset(*samples())", held, more), *PLAIN, "train.average_weights=2"]
    assert main([*words, "train.max_steps=8", "run.dir=run"]) == 0
    assert "scored: the parameter codes is stored as" in capsys.readouterr().out
    assert read_summary(Path("run")).averaged is None
