"""Full disks, folders in use, not enough memory: one line, the right status, a usable record."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mprun.cli.main import main
from mprun.precision import Precision
from mprun.records import run_folder
from mprun.records.files import write_atomic
from mprun.records.run_folder import RunFolder
from mprun.records.run_record import Summary, read_lines, read_summary
from mprun.train import checkpoint
from tests.run.processes import Forking
from tests.schema import conforms

pytestmark = pytest.mark.usefixtures("quick_runs")

RUN = ["recipe=linear", "train.max_steps=20", "train.checkpoint_every_steps=5", "run.dir=run"]

Stderr = Callable[[], str]


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Stderr:
    """The one line a failed run says."""

    def read() -> str:
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        return lines[0]

    return read


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fails_after(n: int, plain: Callable[..., Any], fault: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, for `n` calls."""
    left = [n]

    def call(*given: Any, **named: Any) -> Any:
        left[0] -= 1
        return plain(*given, **named) if left[0] >= 0 else fault()

    return call


def goes_on_like_a_whole_run() -> None:
    """Resuming `run` gives the weights of a run that met no fault."""
    assert main(["run.resume=run"]) == 0
    conforms(read_summary(Path("run")), Summary)
    assert main([*RUN[:-1], "run.dir=whole"]) == 0
    one, other = (torch.load(checkpoint.path_in(Path(x)))["trainer"] for x in ("run", "whole"))
    assert one["step"] == other["step"] == 20
    for name, weight in one["model"].items():
        assert torch.equal(weight, other["model"][name])
    steps = [x["step"] for x in read_lines(Path("run")) if x["kind"] == "step"]
    assert steps == list(range(1, 21))


@pytest.mark.representative("1-lines", "2-summary", "1-checkpoint")
@pytest.mark.parametrize("what", ["lines", "summary", "checkpoint"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, stderr: Stderr, what: str, n: int) -> None:
    with monkeypatch.context() as patch:
        if what == "checkpoint":
            patch.setattr(checkpoint, "write_atomic", fails_after(n, write_atomic, full))
        else:
            patch.setattr(RunFolder, what, fails_after(n, getattr(RunFolder, what), full))
            patch.setattr("mprun.train.sums.EVERY_S", 0.0)
            patch.setattr("mprun.train.recorder.WRITE_SUMMARY_EVERY_S", 0.0)
        assert main(RUN) == 1
    line = stderr()
    assert line.startswith("mprun: the record cannot be written (No space left on device)")
    assert line.endswith("make room, then: mprun run.resume=run")
    lines = list(read_lines(Path("run")))  # of steps and of epochs
    steps = [x["step"] for x in lines if x["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(lines) >= n - (what == "summary")
    summary = read_summary(Path("run"))
    assert summary.status == ("running" if what == "summary" else "failed")
    assert summary.failed_by == (None if what == "summary" else "machine")
    assert not list(Path("run").rglob("*.tmp"))
    goes_on_like_a_whole_run()


def test_a_disk_full_from_the_start(monkeypatch: pytest.MonkeyPatch, stderr: Stderr) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_atomic", full)
        assert main(RUN) == 1
    assert stderr().endswith("make room, then: start again in another folder")


def test_a_disk_full_where_the_run_fails_anyway(
    monkeypatch: pytest.MonkeyPatch, stderr: Stderr
) -> None:
    monkeypatch.setattr(RunFolder, "summary", fails_after(1, RunFolder.summary, full))
    assert main([*RUN, "train.lr=1e30"]) == 1
    assert stderr().startswith("mprun: the loss became")


def test_a_run_folder_removed_meanwhile(monkeypatch: pytest.MonkeyPatch, stderr: Stderr) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(RunFolder, "summary", gone)
    monkeypatch.setattr(Path, "write_text", gone)
    assert main(RUN) == 1
    assert stderr().startswith("mprun: the run failed: FileNotFoundError")


def test_a_real_limit_on_file_sizes(forking: Forking) -> None:
    words = [*RUN, "train.optimizer.name=adamw"]
    # The checkpoint of some MB does not fit, the lines do.
    assert forking.run(words, Path.cwd(), {"FILE_LIMIT": "500000"}) == 1
    log = Path("log.txt").read_text(encoding="utf-8")
    (line,) = [x for x in log.splitlines() if x.startswith("mprun: ")]
    assert line.startswith("mprun: the record cannot be written (File too large)")
    assert "Traceback" not in log
    assert [x["step"] for x in read_lines(Path("run")) if x["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert read_summary(Path("run")).status == "failed"
    assert not checkpoint.path_in(Path("run")).exists()
    assert not list(Path("run").rglob("*.tmp"))
    assert main(["run.resume=run"]) == 0
    assert read_summary(Path("run")).steps == 20


@pytest.mark.parametrize("where", ["outputs", "run"])
def test_a_file_in_the_folders_place(where: str, stderr: Stderr) -> None:
    Path(where).write_text("mine", encoding="utf-8")
    words = RUN[:-1] if where == "outputs" else RUN
    assert main(words) == 2
    assert where in stderr()
    assert Path(where).read_text(encoding="utf-8") == "mine"


def test_a_folder_another_run_is_in(stderr: Stderr) -> None:
    assert main(RUN) == 0
    files = [p for p in Path("run").rglob("*") if p.is_file() and p.name != ".lock"]
    before = {p: p.read_bytes() for p in files}
    other = RunFolder(Path("run"), keep=lambda line: True)
    for words in (RUN, ["run.resume=run", "train.max_steps=30"]):
        assert main(words) == 2
        assert "another mprun is running there" in stderr()
    other.close()
    assert main(RUN) == 2  # and one that is done is no place for another either
    assert "already contains a run" in stderr()
    assert before == {p: p.read_bytes() for p in files}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
        ),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, stderr: Stderr, error: BaseException
) -> None:
    def exhausted() -> None:
        raise error

    plain = Precision.forward
    real = fails_after(3, plain, exhausted)

    def forward(self: Precision, model: nn.Module, x: Tensor) -> Any:
        measured = isinstance(x, FakeTensor)  # the footprint's steps
        return (plain if measured else real)(self, model, x)

    monkeypatch.setattr(Precision, "forward", forward)
    assert main(RUN) == 1
    assert stderr() == (
        "mprun: out of memory on cpu with 64 samples a micro-batch; try a smaller "
        "train.batch_size with train.accumulate"
    )
    summary = read_summary(Path("run"))
    conforms(summary, Summary)
    assert (summary.status, summary.failed_by, summary.steps) == ("failed", "machine", 3)
    assert "out of memory" in str(summary.error)
    assert [x["step"] for x in read_lines(Path("run")) if x["kind"] == "step"] == [1, 2, 3]


def test_a_nan_without_a_loss_scale(monkeypatch: pytest.MonkeyPatch, stderr: Stderr) -> None:
    plain = Precision.forward

    def broken(*given: Any) -> Any:
        return plain(*given) * float("nan")

    monkeypatch.setattr(Precision, "forward", broken)
    assert main(RUN) == 1
    assert stderr().startswith("mprun: the loss became nan at step 1 in precision=fp32")
    summary = read_summary(Path("run"))
    conforms(summary, Summary)
    assert (summary.status, summary.failed_by) == ("failed", "run")
    assert not checkpoint.path_in(Path("run")).exists()
