"""`train.validations`: scores at equal parts of the planned steps, which change nothing else."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.cli.main import main
from mprun.records.run_folder import read_epochs, read_validation_losses
from mprun.records.run_record import read_lines, read_summary
from mprun.train.evaluation import Evaluator, PartEnds
from tests.run.conftest import AtStep
from tests.run.test_data_of_any_kind import PLAIN, recipe
from tests.run.test_resume import MNIST, assert_equal, assert_same_run, crash, terminate, trained

pytestmark = pytest.mark.usefixtures("quick_runs")

RANDOM = "DataLoader(Augmented(), batch_size=4, shuffle=True)"


def validations(run: str) -> list[dict[str, Any]]:
    return [x for x in read_lines(Path(run)) if x["kind"] == "validation"]


@given(planned=st.integers(1, 300), parts=st.integers(1, 400))
def test_parts_end_where_the_formula_says(planned: int, parts: int) -> None:
    expected = {round(k * planned / parts) for k in range(1, parts + 1)} - {0}
    ends = PartEnds(planned, parts)
    assert {step for step in range(-1, planned + 2) if step in ends} == expected
    assert 5 not in PartEnds(None, parts)


def test_each_scores_what_a_run_that_ends_there_does() -> None:
    assert main([*MNIST, "train.max_steps=23", "train.validations=6", "run.dir=run"]) == 0
    lines = validations("run")
    # and the ends of the epochs, which have ten steps; step 23 is both
    assert [(x["step"], x["epoch"]) for x in lines] == [
        *((4, 1), (8, 1), (10, 1), (12, 2), (15, 2), (19, 2), (20, 2), (23, 3)),
    ]
    for line in lines:
        words = [f"train.max_steps={line['step']}", f"run.dir=to-{line['step']}"]
        assert main([*MNIST, *words]) == 0
        assert validations(f"to-{line['step']}")[-1] == line
    summary = read_summary(Path("run"))
    assert summary.validations == len(lines) == len(read_validation_losses(Path("run")))
    ends = [lines[2], lines[6], lines[7]]
    for epochs in (summary.history, [*read_epochs(Path("run"))]):
        assert [x.validation.loss for x in epochs] == [x["loss"] for x in ends]


KINDS = {
    "fp32": MNIST,
    "fp16_mixed": [*MNIST, "precision=fp16_mixed", "loss_scale.growth_interval=5"],
    "half_sr": [*MNIST, "precision=half_sr"],
    "all": [*MNIST, "precision=half_sr", "precision.rounding_scope=all"],
    "fp8": [*MNIST, "precision=fp8_tensorwise"],
}


def assert_unchanged(words: list[str]) -> None:
    """A run with validations trains and ends as one without, bit for bit."""
    more = ["train.checkpoint_every_steps=4", "train.log_every=1"]
    assert main([*words, *more, "run.dir=plain"]) == 0
    assert main([*words, *more, "train.validations=7", "run.dir=run"]) == 0
    assert_equal(trained(Path("run")), trained(Path("plain")))
    plain, run = read_summary(Path("plain")), read_summary(Path("run"))
    for key in ("history", "train", "test", "steps", "skipped_steps", "variant_hash"):
        assert getattr(plain, key) == getattr(run, key), key
    assert (run.validations or 0) > (plain.validations or 0)
    assert run.time_budget_s is not None
    steps = [x["loss"] for x in read_lines(Path("run")) if x["kind"] == "step"]
    assert steps == [x["loss"] for x in read_lines(Path("plain")) if x["kind"] == "step"]


@pytest.mark.representative("fp16_mixed", "all")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_else_changes(kind: str) -> None:
    assert_unchanged([*KINDS[kind], "train.max_steps=16"])


def test_random_samples_and_modules_that_stay_in_evaluation_mode() -> None:
    """numpy, `random` and torch draw while it validates; a module is never in training mode."""
    more = """
def model():
    module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 1))
    module[2].eval()
    return module
"""
    held = '"validation": DataLoader(Augmented(9), batch_size=4, shuffle=True)'
    words = [recipe(RANDOM, held, more), *PLAIN]
    assert_unchanged([*words, "train.epochs=3"])


@pytest.mark.parametrize(("fault", "status"), [(crash, 1), (terminate, 143)])
@pytest.mark.parametrize("step", [9, 11, 15])
def test_a_resumed_run_has_each_once(at_step: AtStep, fault: Any, status: int, step: int) -> None:
    """Checkpoints are at 4, 8, ..., places at 2, 4, 6, ..., and epochs end at 10 and 20."""
    words = [*MNIST, "train.max_steps=20", "train.validations=10", "train.checkpoint_every_steps=4"]
    assert main([*words, "run.dir=whole"]) == 0
    at_step(step, fault)
    assert main([*words, "run.dir=run"]) == status
    assert main(["run.resume=run"]) == 0
    assert_same_run(Path("run"), Path("whole"))
    assert read_summary(Path("run")).validations == read_summary(Path("whole")).validations == 10
    assert max(Counter(x["step"] for x in validations("run")).values()) == 1


def test_a_run_stopped_while_it_validates(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*MNIST, "data.train_limit=300", "train.max_steps=12", "train.validations=4"]
    assert main([*words, "run.dir=whole"]) == 0
    plain, count = Evaluator.scores, iter(range(100))

    def scores(self: Evaluator, batches: Any) -> Any:
        if next(count) == 2:  # at step 6, after those at 3 and at the epoch's end
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, batches)

    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "scores", scores)
        assert main([*words, "run.dir=run"]) == 143
    assert trained(Path("run"))["step"] == 6
    assert main(["run.resume=run"]) == 0
    assert_same_run(Path("run"), Path("whole"))


def test_streams(capsys: pytest.CaptureFixture[str]) -> None:
    held = '"validation": DataLoader(TensorDataset(*samples(9)), batch_size=4)'
    words = [recipe("DataLoader(Stream(22), 4)", held), *PLAIN]
    # six steps are an epoch: its end is not known before, and its line is written once
    assert_unchanged([*words, "train.max_steps=14"])
    assert [x["step"] for x in validations("run")] == [2, 4, 6, 8, 10, 12, 14]
    assert read_summary(Path("run")).validations == 7
    assert main([*words, "train.epochs=2", "train.validations=3", "run.dir=unplanned"]) == 0
    assert "train.validations has no effect: the number of steps" in capsys.readouterr().err
    assert [x["step"] for x in validations("unplanned")] == [6, 12]
