"""Names that mprun chooses itself: processes that begin at once get folders of their own.

The processes are real. Each waits at the point where its folder is made until all are there, and
then for a common moment of the clock, so that they collide.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mprun.errors import UsageError
from mprun.records import files
from mprun.records.run_record import Summary, read_lines, read_summary
from tests.schema import conforms

TOGETHER = """
import json, math, multiprocessing, os, sys, time, traceback
import mprun.records.files as files

words = json.loads(sys.argv[1])
fork = multiprocessing.get_context("fork")
barrier, at = fork.Barrier(len(words)), fork.Value("d")

def together():
    "Until every process is here, and then for the start of a second: all names begin alike."
    if barrier.wait(300) == 0:
        at.value = math.ceil(time.time() + 0.3)
    barrier.wait(300)
    time.sleep(max(0, at.value - time.time() - 0.005))
    while time.time() < at.value:
        pass

def child(n):
    with open(f"out-{n}", "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        try:
            status = body(words[n])
        except BaseException:
            traceback.print_exc()
            status = 70
        sys.stdout.flush()
        os._exit(status)

def begin():
    processes = [fork.Process(target=child, args=(n,)) for n in range(len(words))]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
"""

TAKES_NAMES = """
from mprun.records.files import dated_folder, new_folder
from mprun.records.run_folder import RunFolder
from mprun.config.study_request import study_request
from mprun.experiments.study import new_study

def run_folder():
    folder = RunFolder(dated_folder())
    folder.close()
    return folder.path

WAYS = {
    "run": run_folder,
    "new_folder": lambda: new_folder(None),
    "new_study": lambda: new_study(study_request("sweep", [], None), {"a": ("x=1",)}).folder,
}

def body(ways):
    together()
    print(json.dumps([str(WAYS[way]()) for way in ways]))
    return 0

begin()
"""

RUNS = """
import mprun.run
from mprun.cli.main import main

taken = files.dated_folder

def held():
    together()
    return taken()

files.dated_folder = mprun.run.dated_folder = held
body = main
begin()
"""

SMALL = ["recipe=linear", "recipe.model.out_features=8", "train.max_steps=2"]


def begun_together(code: str, words: Sequence[Sequence[str]]) -> list[str]:
    """What processes print that run `code`, one with each of these words, held until all are there.

    They are forked from one that has imported everything, so that 64 fit into the memory.
    """
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER + code, json.dumps(words)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=1500,
    )
    out = [Path(f"out-{n}").read_text(encoding="utf-8") for n in range(len(words))]
    assert done.returncode == 0, done.stderr + "".join(out)
    return out


def check_names(processes: int, ways: Sequence[str]) -> None:
    out = begun_together(TAKES_NAMES, [list(ways)] * processes)
    found = [path for text in out for path in json.loads(text)]
    assert len(found) == len(set(found)) == processes * len(ways)
    assert all(Path(path).is_dir() for path in found)


def test_names_taken_at_once_are_distinct() -> None:
    check_names(4, ["run", "new_folder", "new_study"] * 2)


@pytest.mark.exhaustive
def test_names_taken_by_64_processes_are_distinct() -> None:
    check_names(64, ["run", "new_folder", "new_study"] * 2)


@pytest.mark.exhaustive
def test_names_taken_by_16_processes_five_times_are_distinct() -> None:
    for way in ("run", "new_folder", "new_study"):
        check_names(16, [way] * 5)


def check_sweeps(processes: int) -> int:
    """Sweeps begun at once, with two seeds each: whole records, each with its own seed."""
    before = set(Path("outputs").glob("*/*"))
    begun_together(RUNS, [["-m", *SMALL, f"seed={n},{10 + n}"] for n in range(processes)])
    sweeps = set(Path("outputs").glob("*/*")) - before
    assert len(sweeps) == processes
    seeds = []
    for sweep in sweeps:
        runs = [read_summary(sweep / name) for name in ("0", "1")]
        for n, run in enumerate(runs):
            conforms(run, Summary)
            assert (run.status, run.steps) == ("completed", 2)
            kept = (sweep / str(n) / "config.yaml").read_text(encoding="utf-8")
            assert f"\nseed: {run.seed}\n" in f"\n{kept}"
            lines = read_lines(sweep / str(n))
            assert [x["step"] for x in lines if x["kind"] == "step"] == [1, 2]
        first, second = (run.seed for run in runs)
        assert second == first + 10  # both are of the same process
        seeds += [first, second]
    assert sorted(seeds) == sorted([*range(processes), *(10 + n for n in range(processes))])
    return len(seeds)


@pytest.mark.exhaustive
def test_sweeps_begun_at_once_leave_every_record() -> None:
    assert check_sweeps(2) == 4


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_four_sweeps_begun_at_once_twenty_times_leave_160_records() -> None:
    assert sum(check_sweeps(4) for _ in range(20)) == 160


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_64_runs_begun_at_once_leave_64_records() -> None:
    begun_together(RUNS, [[*SMALL, f"seed={n}"] for n in range(64)])
    found = [read_summary(path.parent) for path in Path("outputs").glob("*/*/summary.json")]
    assert sorted(run.seed for run in found) == list(range(64))
    for run in found:
        conforms(run, Summary)
        assert (run.status, run.steps) == ("completed", 2)


def test_a_folder_that_was_not_used_is_removed() -> None:
    with files.dated_folder_if_used() as folder:
        assert folder.is_dir()
    assert not Path("outputs").exists()
    with files.dated_folder_if_used() as folder:
        (folder / "x").touch()
    assert (folder / "x").exists()


def test_where_no_folder_can_be_made_one_line_says_so() -> None:
    Path("outputs").touch()
    with pytest.raises(
        UsageError, match=r"outputs/.* cannot be made \(.*; start mprun in a writable folder"
    ):
        files.dated_folder()
