"""A run of any length: its summary, its checkpoint and its memory stay bounded."""

from __future__ import annotations

import gc
import io
import tracemalloc
from pathlib import Path

import pytest
import torch

from mprun.cli.main import main
from mprun.precision.arithmetic import NativeArithmetic
from mprun.records.run_folder import RunFolder, read_epochs
from mprun.records.run_record import Epoch, Scores, read_lines, read_summary
from mprun.train import checkpoint
from mprun.train.callbacks import StepLine
from mprun.train.recorder import ConditionsRecorder, Recorder
from mprun.train.stopwatch import Stopwatch
from tests.run.test_resume import assert_same_run
from tests.summaries import example

pytestmark = pytest.mark.usefixtures("quick_runs")

TINY = ["recipe=linear", "recipe.model.in_features=4", "recipe.model.out_features=2"]
NONE = Scores(loss=None, accuracy=None)


def line(step: int, ms: float = 1.0, skipped: bool = False) -> StepLine:
    return StepLine(step, step, 1.0, 1e-3, 1.0, skipped, ms, ms / 10, True, step % 7)


class LongRun:
    """A record of epochs of one step each, without the training."""

    def __init__(self) -> None:
        self.summary = example()
        self.summary.history.clear()
        self.summary.steps = 0
        self.folder = RunFolder(Path("run"))
        cpu, watch = torch.device("cpu"), Stopwatch()
        recorder = Recorder(self.summary, self.folder, NativeArithmetic(), cpu, 10**9, watch)
        self.recorder, self.callbacks = recorder, (recorder, ConditionsRecorder(self.summary))

    def take(self, steps: int) -> None:
        """Steps that are reported a hundred at a time, as the loop does with short ones."""
        first = self.summary.steps + 1
        for begin in range(first, first + steps, 100):
            numbers = range(begin, begin + 100)
            times = [1 + step * 0.37 % 1 for step in numbers]
            lines = list(map(line, numbers, times))
            scores = Scores(loss=1.0, accuracy=None)
            for callback in self.callbacks:
                for step in numbers:
                    callback.on_epoch_end(Epoch(epoch=step, train=scores, validation=NONE), step)
                callback.on_steps(lines)

    def sizes(self) -> tuple[int, int]:
        """Bytes of summary.json and of the record's part of a checkpoint."""
        self.recorder.on_end("completed")
        self.folder.summary(self.summary)
        file = io.BytesIO()
        torch.save(self.recorder.state_dict(), file)
        return Path("run/summary.json").stat().st_size, len(file.getvalue())


def traced_bytes() -> int:
    """Bytes in use; a full collection empties Python's free lists, which keep 2,000 tuples each."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_bytes_do_not_grow_with_the_steps() -> None:
    tracemalloc.start()
    try:
        run = LongRun()
        run.take(4_500)  # every bounded structure was full
        before, at_first = run.sizes(), traced_bytes()
        run.take(9_000)
        after, at_last = run.sizes(), traced_bytes()
    finally:
        tracemalloc.stop()
    # The epochs of the summary are from half of 500 to all of them, the values from half of 4,096.
    assert all(new <= 2.1 * old for old, new in zip(before, after, strict=True))
    assert after[0] < 200_000
    assert after[1] < 150_000
    # A list of the epochs would take megabytes more, one of a number a step 300 kB.
    assert at_last - at_first < 200_000
    run.folder.close()
    assert sum(1 for _ in read_epochs(Path("run"))) == 13_500


def test_a_long_run_resumed_has_the_history_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mprun.train.recorder.MAX_EPOCHS", 8)
    monkeypatch.setattr("mprun.train.recorder.EpochHistory.__init__.__defaults__", (8,))
    words = [*TINY, "train.checkpoint_every_steps=7"]
    assert main([*words, "train.max_steps=60", "run.dir=whole"]) == 0
    assert main([*words, "train.max_steps=25", "run.dir=run"]) == 0
    assert main(["run.resume=run", "train.max_steps=60"]) == 0
    assert_same_run(Path("run"), Path("whole"))
    summary = read_summary(Path("run"))
    assert [x.epoch for x in summary.history][:3] == [1, 9, 17]
    assert len(summary.history) < 12
    lines = read_lines(Path("run"))
    assert [x["epoch"] for x in lines if x["kind"] == "epoch"] == list(range(1, 61))
    journal = torch.load(checkpoint.path_in(Path("run")), weights_only=True)["journal"]
    assert "history" not in journal


def test_skipped_steps_of_every_report_are_counted(tmp_path: Path) -> None:
    run = LongRun()
    run.summary.skipped_steps = 0
    run.recorder.on_steps([line(1, skipped=True), line(2), line(3, skipped=True)])
    run.recorder.on_steps([line(4), line(5, skipped=True)])
    assert run.summary.skipped_steps == 3
