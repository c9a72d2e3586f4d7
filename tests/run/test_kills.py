"""Runs killed at random moments: every folder stays readable, every run resumes bit for bit.

A kill is SIGKILL, which no process can prepare for. Some come at a random time after the start of
the process. The others wait for what is over in a moment: a checkpoint or a summary half written. A
process kills itself at the latter, or the disk is slow, so that kills from outside meet it.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mprun.records.run_record import read_lines, read_summary
from mprun.train import checkpoint
from tests.run.processes import Forking
from tests.run.test_resume import MNIST, assert_same_run
from tests.train.test_long_runs import TINY

KILLS = 100
LENGTH = ["train.max_steps=40", "train.checkpoint_every_steps=5", "precision=half_sr"]
EPOCHS_OF_A_STEP = [*TINY, *LENGTH]
VALIDATED = [*MNIST, *LENGTH]


class Victim:
    """A run in its folder that is killed, and resumed, until it has ended."""

    def __init__(self, processes: Forking, words: list[str], name: str) -> None:
        self._processes, self._words = processes, words
        self.folder = Path.cwd() / name

    def run(self, moment: Callable[[], bool] | None = None, writing: str | None = None) -> bool:
        """Begin or resume the run, and kill it at a moment; whether it was killed.

        Args:
            moment: is asked all the time, and the process killed where it is true.
            writing: the files while one of which the process kills itself, see `Forking`.
        """
        begun = (self.folder / "config.yaml").exists()
        if not begun:
            shutil.rmtree(self.folder, ignore_errors=True)  # nothing was recorded
        words = [f"run.resume={self.folder}"] if begun else [*self._words, f"run.dir={self.folder}"]
        environment = {"KILL_WRITING": writing} if writing else {"SLOW_DISK": "yes"}
        pid = self._processes.start(words, Path.cwd(), environment)
        while moment is not None and not _has_ended(pid):
            if moment():
                os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.001)
        status = self._processes.wait()
        assert status in (0, -signal.SIGKILL), Path("log.txt").read_text(encoding="utf-8")
        return status != 0

    def is_saving(self) -> bool:
        return any(self.folder.glob("checkpoints/.last.pt.*"))

    def is_replacing(self) -> bool:
        return checkpoint.path_in(self.folder).exists() and self.is_saving()

    def is_recording(self) -> bool:
        return any(self.folder.glob(".summary.json.*"))

    def check_whole(self, other: Victim) -> None:
        """It is the other run, bit for bit, and nothing else is left in its folder."""
        assert_same_run(self.folder, other.folder)
        assert not [*self.folder.rglob(".*.tmp")]

    def check_readable(self) -> None:
        """Each file that is there is whole."""
        if (self.folder / "config.yaml").exists():
            assert yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
            read_lines(self.folder)
        if (self.folder / "summary.json").exists():
            read_summary(self.folder)
        checkpoint.load(self.folder)


def _has_ended(pid: int) -> bool:
    """Whether a process has ended; its parent may not have asked for its status yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] == "Z"


def after(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


def kill_often(processes: Forking, words: list[str], kills: int) -> None:
    """Kill runs so many times; each is killed a few times, then ends like one nobody killed."""
    chance, left = random.Random(kills), kills
    whole = Victim(processes, words, "whole")
    whole.run()
    longest_s = read_summary(whole.folder).wall_time_s
    while left:
        victim = Victim(processes, words, f"run-{left}")
        for _ in range(min(left, chance.randint(1, 4))):
            seconds = chance.uniform(0, longest_s)
            moments = [victim.is_replacing, victim.is_recording]
            moment = chance.choice([*moments, *[after(seconds)] * len(moments)])
            if not victim.run(moment):
                break
            left -= 1
            victim.check_readable()
        victim.run()
        victim.check_whole(whole)
        shutil.rmtree(victim.folder)
    assert "Traceback" not in Path("log.txt").read_text(encoding="utf-8")


def test_a_run_killed_while_it_writes_resumes_bit_for_bit(forking: Forking) -> None:
    whole = Victim(forking, EPOCHS_OF_A_STEP, "whole")
    victim = Victim(forking, EPOCHS_OF_A_STEP, "run")
    # The first checkpoint, one that replaces another, a summary at the start and one at the end.
    for writing in (".last.pt. 1", ".last.pt. 2", ".summary.json. 1", ".summary.json. 2"):
        assert victim.run(writing=writing)
        victim.check_readable()
    victim.run()
    whole.run()
    victim.check_whole(whole)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("words", [EPOCHS_OF_A_STEP, VALIDATED], ids=["unvalidated", "validated"])
def test_a_hundred_kills_lose_nothing(forking: Forking, words: list[str]) -> None:
    kill_often(forking, words, KILLS // 2)
