"""A run that was cut off and goes on is the run that was not cut off, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mprun.cli.main import main
from mprun.records.run_record import Summary, read_lines, read_summary
from mprun.train import checkpoint
from tests.run.conftest import AtStep
from tests.run.processes import Forking
from tests.schema import conforms

pytestmark = pytest.mark.usefixtures("quick_runs")

MNIST = [
    "recipe=mnist",
    "recipe.model.units=32",
    "data.source=generated",
    "data.train_limit=600",
    "data.eval_limit=64",
    "data.validation_fraction=0.1",
    "train.batch_size=64",
]
MODES = {
    "fp32": ["precision=fp32"],
    "tf32": ["precision=tf32"],
    "bf16_mixed": ["precision=bf16_mixed"],
    # A scale that grows every five steps overflows within a few.
    "fp16_mixed": ["precision=fp16_mixed", "loss_scale=dynamic", "loss_scale.growth_interval=5"],
}


def trained(run: Path) -> dict[str, Any]:
    """The trainer's part of the last checkpoint."""
    state: dict[str, Any] = torch.load(checkpoint.path_in(run), weights_only=True)["trainer"]
    return state


def assert_equal(a: Any, b: Any, path: str = "$") -> None:
    """Equal in every bit, tensors included; wall times may differ."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a.keys() - {"trained_s"}:
            assert_equal(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


def exact_lines(run: Path) -> list[dict[str, Any]]:
    """What of the lines does not depend on the clock."""
    clocked = ("step_time_ms", "data_time_ms")
    return [{k: v for k, v in x.items() if k not in clocked} for x in read_lines(run)]


def assert_same_run(run: Path, whole: Path) -> None:
    """Weights, optimizer, order, lines and scores of both are the same."""
    assert_equal(trained(run), trained(whole))
    assert exact_lines(run) == exact_lines(whole)
    steps = [x["step"] for x in read_lines(run) if x["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    ours, theirs = read_summary(run), read_summary(whole)
    conforms(ours, Summary)
    assert ours.status == theirs.status == "completed"
    for key in ("history", "train", "test", "steps", "epochs", "skipped_steps", "loss_scale"):
        assert getattr(ours, key) == getattr(theirs, key), key


def crash() -> None:
    raise ZeroDivisionError("planted")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.representative("fp16_mixed")
@pytest.mark.parametrize("mode", MODES)
def test_a_run_given_more_steps_is_the_longer_run(mode: str) -> None:
    words = [*MNIST, *MODES[mode]]
    assert main([*words, "train.max_steps=20", "run.dir=whole"]) == 0
    assert main([*words, "train.max_steps=7", "run.dir=run"]) == 0
    assert read_summary(Path("run")).steps == 7
    assert main(["run.resume=run", "train.max_steps=20"]) == 0
    assert_same_run(Path("run"), Path("whole"))
    if mode == "fp16_mixed":
        scales = {x["loss_scale"] for x in read_lines(Path("run")) if x["kind"] == "step"}
        assert len(scales) > 2


@pytest.mark.representative("accumulated-13", "linear-1")
@pytest.mark.parametrize("first", [1, 10, 13])
@pytest.mark.parametrize("recipe", ["mnist", "linear", "accumulated", "unvalidated"])
def test_it_holds_wherever_in_an_epoch_the_run_ended(recipe: str, first: int) -> None:
    words = {
        "mnist": MNIST,
        "linear": ["recipe=linear"],
        "accumulated": [*MNIST, "train.accumulate=2", "train.optimizer.name=adamw"],
        "unvalidated": [*MNIST, "data.validation_fraction=0"],
    }[recipe]
    assert main([*words, "train.max_steps=16", "run.dir=whole"]) == 0
    assert main([*words, f"train.max_steps={first}", "run.dir=run"]) == 0
    assert main(["run.resume=run", "train.max_steps=14"]) == 0
    assert main(["run.resume=run", "train.max_steps=16"]) == 0
    assert_same_run(Path("run"), Path("whole"))


@pytest.mark.representative("crash-1-cosine", "terminate-143-linear")
@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
@pytest.mark.parametrize(("fault", "status"), [(crash, 1), (terminate, 143)])
def test_a_schedule_goes_on_where_it_was(
    at_step: AtStep,
    fault: Callable[[], None],
    status: int,
    scheduler: str,
) -> None:
    words = [*MNIST, f"train.scheduler={scheduler}", "train.max_steps=20"]
    words.append("train.checkpoint_every_steps=4")
    assert main([*words, "run.dir=whole"]) == 0
    at_step(11, fault)
    assert main([*words, "run.dir=run"]) == status
    assert trained(Path("run"))["step"] == (8 if fault is crash else 11)
    assert main(["run.resume=run"]) == 0
    assert_same_run(Path("run"), Path("whole"))


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(
    at_step: AtStep,
) -> None:
    assert main([*MNIST, "train.max_steps=12", "run.dir=whole"]) == 0
    at_step(5, crash)
    assert main([*MNIST, "train.max_steps=12", "run.dir=run"]) == 1
    assert [x["step"] for x in read_lines(Path("run")) if x["kind"] == "step"] == [1, 2, 3, 4]
    assert main(["run.resume=run"]) == 0
    assert_same_run(Path("run"), Path("whole"))


def test_a_completed_run_takes_no_further_step() -> None:
    assert main([*MNIST, "train.epochs=2", "run.dir=run"]) == 0
    before, lines = read_summary(Path("run")), exact_lines(Path("run"))
    state = trained(Path("run"))
    for _ in range(2):
        assert main(["run.resume=run"]) == 0
        after = read_summary(Path("run"))
        conforms(after, Summary)
        assert after.history == before.history
        assert after.started_at == before.started_at
        assert (after.status, after.steps, after.test) == (
            "completed",
            before.steps,
            before.test,
        )
        assert exact_lines(Path("run")) == lines
        assert_equal(trained(Path("run")), state)


def test_a_line_cut_short_is_replaced() -> None:
    assert main([*MNIST, "train.max_steps=12", "run.dir=whole"]) == 0
    assert main([*MNIST, "train.max_steps=7", "run.dir=run"]) == 0
    with Path("run/metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind":"step","step":8,"lo')
    assert main(["run.resume=run", "train.max_steps=12"]) == 0
    assert_same_run(Path("run"), Path("whole"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run, to be copied."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main(["recipe=linear", "train.max_steps=3", f"run.dir={folder}"]) == 0
    return folder


def copy_of(run: Path) -> Path:
    for source in (p for p in run.rglob("*") if p.is_file()):
        target = Path("run") / source.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    return Path("run")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which these words are refused."""
    capsys.readouterr()
    assert main(["run.resume=run", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_damaged_checkpoint_is_reported_in_one_line(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = checkpoint.path_in(copy_of(finished))
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"no checkpoint"):
        file.write_bytes(damaged)
        assert "is not a checkpoint of mprun" in refused(capsys)
        assert file.read_bytes() == damaged
    torch.save({"format_version": checkpoint.FORMAT_VERSION + 1}, file)
    assert "has format 2, this mprun reads up to 1" in refused(capsys)
    torch.save({"format_version": 1, "trainer": {}}, file)
    assert "lacks choices, journal" in refused(capsys)
    sharded = {"format_version": 1, "choices": {}, "trainer": {}, "journal": {}, "shards": {}}
    torch.save(sharded, file)
    assert "parallel=fsdp2 in shards, which this one does not read" in refused(capsys)
    for strange in ({"format_version": "new"}, [1], torch.zeros(1)):
        torch.save(strange, file)
        assert "is not a checkpoint of mprun" in refused(capsys)


def test_damaged_lines_are_reported_in_one_line(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_of(finished)
    Path("run/metrics.jsonl").write_bytes(b"\0\0\0\n\xff\n")
    assert "metrics.jsonl is damaged" in refused(capsys)


ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143}


@pytest.mark.representative("3-SIGTERM")
@pytest.mark.parametrize("number", ENDS, ids=lambda x: x.name)
@pytest.mark.parametrize("every", [3, 10])
def test_killed_during_validation(forking: Forking, number: signal.Signals, every: int) -> None:
    words = [*MNIST, "data.train_limit=640", "train.eval_batch_size=8", "train.epochs=2"]
    words.append(f"train.checkpoint_every_steps={every}")
    assert forking.run([*words, "run.dir=whole"], Path.cwd()) == 0
    environment = {"END_EVALUATION": str(int(number))}
    assert forking.run([*words, "run.dir=run"], Path.cwd(), environment) == ENDS[number]
    assert [x["kind"] for x in read_lines(Path("run"))] == ["step"] * 10
    assert forking.run(["run.resume=run"], Path.cwd()) == 0
    assert_same_run(Path("run"), Path("whole"))
