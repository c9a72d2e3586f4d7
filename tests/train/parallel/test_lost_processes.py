"""A process that is killed, fails or is stopped: nothing is lost, and the reason is one line."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mprun.cli.main import main
from mprun.records.run_record import read_lines, read_summary
from mprun.train import checkpoint
from tests.run.test_resume import assert_equal, trained
from tests.train.parallel.processes import Ended, Groups, Torchrun, own_errors
from tests.train.parallel.test_equal_runs import assert_same_training, losses
from tests.waiting import wait_for

STEPS = 12
PLAIN = [f"train.max_steps={STEPS}", "train.checkpoint_every_steps=2", "speed=plain"]
WORDS = [
    *("recipe=mnist", "recipe.model.units=16", "data.source=generated", "data.train_limit=160"),
    *("data.eval_limit=64", "train.batch_size=16", *PLAIN),
]
"""Epochs of five steps of 32 samples."""
LINEAR = [
    *("recipe=linear", "recipe.model.in_features=32", "recipe.model.out_features=8"),
    *("recipe.model.samples=160", "train.batch_size=16", *PLAIN),
]
"""The same without images, which a process that torchrun starts would have to draw."""


def check_readable(folder: Path) -> None:
    assert yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    read_lines(folder)
    assert read_summary(folder).status in ("failed", "running")
    checkpoint.load(folder)


def assert_same_run(a: str, b: str) -> None:
    """The same run bit for bit, each process's random numbers and times' places too."""
    assert_same_training(a, b)
    one, other = trained(Path(a)), trained(Path(b))
    for name in ("rng", "processes", "sums", "last_scores"):
        assert_equal(one[name], other[name], name)
    steps = [x["step"] for x in read_lines(Path(a)) if x["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    assert read_summary(Path(a)).status == "completed"
    assert not [*Path(a).rglob(".*.tmp")]


def killed(groups: Groups, words: list[str], folder: str, rank: int, step: int) -> Ended:
    ended = groups.run(
        [*words, f"run.dir={folder}"], environment={"PLANTED": f"kill {rank} {step}"}
    )
    assert ended.statuses[rank] == -9
    return ended


def check_killed(ended: Ended, folder: str, rank: int) -> None:
    """The process that is left ended soon, and said in one line which one is gone."""
    assert ended.statuses[1 - rank] == 1, ended.errors
    assert len(ended.errors) == 1, ended.errors
    (line,) = ended.errors
    assert line.startswith("mprun: ")
    assert f"process {rank} of 2" in line
    assert "was killed" in line
    assert f"run.resume={Path(folder).resolve()}" in line


@pytest.fixture(scope="module")
def whole_runs(groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs that nothing happened to, by recipe, mode and kind."""
    folder = tmp_path_factory.mktemp("whole")

    def whole(mode: str, kind: str, recipe: list[str] = WORDS) -> str:
        path = folder / f"{recipe[0]}-{mode}-{kind}"
        if not path.exists():
            words = [*recipe, f"precision={mode}", f"parallel={kind}"]
            assert groups.run([*words, f"run.dir='{path}'"]).statuses == [0, 0]
        return str(path)

    return whole


@pytest.mark.representative("half_sr-ddp-1", "fp32-fsdp2-0")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("mode", ["fp32", "half_sr", "fp16_mixed"])
def test_a_killed_process_ends_the_others_and_the_run_goes_on(
    groups: Groups, whole_runs: Any, mode: str, kind: str, rank: int
) -> None:
    words = [*WORDS, f"precision={mode}", f"parallel={kind}"]
    whole = whole_runs(mode, kind)
    ended = killed(groups, words, "run", rank, 8)
    check_killed(ended, "run", rank)
    check_readable(Path("run"))
    ended = groups.run(["run.resume=run"])
    assert ended.statuses == [0, 0], ended.errors
    assert_same_run("run", whole)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_kills_at_any_time_leave_a_run_that_goes_on(groups: Groups, whole_runs: Any) -> None:
    chance = random.Random(5)
    whole = whole_runs("half_sr", "ddp")
    for number in range(10):
        folder = f"run-{number}"
        words = [*WORDS, "precision=half_sr", "parallel=ddp", f"run.dir={folder}"]
        groups.start(words)
        groups.wait_until_connected()
        time.sleep(chance.uniform(0, 3))
        rank = chance.randrange(2)
        with contextlib.suppress(ProcessLookupError):  # the run was quicker
            os.kill(groups.pids[rank], signal.SIGKILL)
        ended = groups.wait()
        assert "Traceback" not in "\n".join(ended.errors)
        if (Path(folder) / "config.yaml").exists():
            ended = groups.run([f"run.resume={folder}"])
        else:
            ended = groups.run(words)
        assert ended.statuses == [0, 0], ended.errors
        assert_same_run(folder, whole)


@pytest.mark.representative("1-fp32-ddp", "4-half_sr-fsdp2")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("mode", ["fp32", "half_sr"])
@pytest.mark.parametrize("processes", [1, 4])
def test_another_number_of_processes_resumes_the_run(
    groups: Groups, whole_runs: Any, processes: int, mode: str, kind: str
) -> None:
    words = [*WORDS, f"precision={mode}", f"parallel={kind}"]
    assert groups.run([*words, "train.max_steps=6", "run.dir=run"]).statuses == [0, 0]
    resume = ["run.resume=run", f"train.max_steps={STEPS}"]
    if processes == 1:
        assert main(resume) == 0
    else:
        ended = groups.run(resume, processes)
        assert ended.statuses == [0] * processes, ended.errors
    summary = read_summary(Path("run"))
    assert summary.batch.effective == 32
    assert summary.parallel.world_size == processes
    # sums in another order: 7 digits in float32, 3 in the 16-bit mode, magnified by 6 steps
    tolerance = 1e-4 if mode == "fp32" else 5e-2
    whole = whole_runs(mode, kind)
    torch.testing.assert_close(losses("run"), losses(whole), rtol=tolerance, atol=0)
    if processes == 1:  # two micro-batches: the same sums
        assert losses("run") == losses(whole)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_fault_of_one_process_is_named(groups: Groups, kind: str) -> None:
    ended = groups.run(
        [*WORDS, f"parallel={kind}", "run.dir=run"], environment={"PLANTED": "raise 1 6"}
    )
    assert ended.statuses == [1, 1]
    assert len(ended.errors) == 1, ended.errors
    (line,) = ended.errors
    assert "process 1 of 2" in line
    assert "planted fault" in line
    check_readable(Path("run"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_loss_that_becomes_nan_everywhere_is_one_error(groups: Groups, kind: str) -> None:
    words = [*WORDS, f"parallel={kind}", "train.lr=1e30", "run.dir=run"]
    ended = groups.run(words)
    assert ended.status == 1
    assert len(ended.errors) == 1, ended.errors
    (line,) = ended.errors
    assert "the loss became" in line
    assert read_summary(Path("run")).status == "failed"


def check_stopped(ended: Ended) -> None:
    assert ended.status != 0
    assert "resume with: mprun" in ended.out[0]
    assert f"run.resume={Path('run')}" in ended.out[0]
    assert not own_errors(ended)
    assert read_summary(Path("run")).status == "interrupted"


def test_a_stopped_run_goes_on_bit_for_bit(groups: Groups, whole_runs: Any) -> None:
    words = [*WORDS, "precision=half_sr", "parallel=ddp", "run.dir=run"]
    groups.start(words, environment={"PLANTED": "wait 1 6"})
    wait_for(Path("reached").exists)
    for pid in groups.pids:
        os.kill(pid, signal.SIGINT)  # torchrun sends SIGTERM: the next test
    ended = groups.wait()
    assert ended.status == 130
    check_stopped(ended)
    assert groups.run(["run.resume=run"]).statuses == [0, 0]
    assert_same_run("run", whole_runs("half_sr", "ddp"))


def test_a_run_goes_on_that_torchrun_stopped(groups: Groups, whole_runs: Any) -> None:
    run = Torchrun(
        [*LINEAR, "precision=fp32", "parallel=ddp", "run.dir=run"],
        environment={"PLANTED": "wait 1 6"},
    )
    wait_for(Path("reached").exists, run.process)
    run.terminate()
    check_stopped(run.wait())
    assert groups.run(["run.resume=run"]).statuses == [0, 0]
    assert_same_run("run", whole_runs("fp32", "ddp", LINEAR))


def test_processes_that_torchrun_starts_again_are_refused(groups: Groups) -> None:
    """mprun does not continue the run by itself, and must not begin a second one."""
    ended = groups.run([*LINEAR, "parallel=ddp"], environment={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert ended.statuses == [1, 1]
    assert all("run.resume=FOLDER" in line for line in own_errors(ended))
    assert not [*Path().rglob("summary.json")]
