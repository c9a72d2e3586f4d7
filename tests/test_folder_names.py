"""Names that mprun chooses itself: processes that begin at once get folders of their own.

The processes are real. Each waits at the point where its folder is made until all are there, and
then for a common moment of the clock, so that they collide.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mprun import record
from mprun.errors import UsageError
from mprun.record import Summary, read_summary
from tests.schema import conforms

TOGETHER = """
import sys, time
from pathlib import Path

def wait(name):
    "Until every process is here, and then for a common moment of the clock."
    Path(f"ready-{name}").touch()
    go = Path("go")
    while not go.exists() or not (at := go.read_text()):
        time.sleep(0.01)
    while time.time() < float(at):
        pass
"""

TAKES_NAMES = """
import json
from mprun.record import RunFolder, dated_folder, new_folder
def run_folder():
    folder = RunFolder(dated_folder())
    folder.close()
    return folder.path
WAYS = {"run": run_folder, "new_folder": lambda: new_folder(None)}
if "new_sweep" in sys.argv[2]:
    from mprun.study.sweep import new_sweep
    WAYS["new_sweep"] = lambda: new_sweep("sweep", {"a": ("x=1",)}, (0,)).folder
ways = sys.argv[2].split(",")
wait(sys.argv[1])
print(json.dumps([str(WAYS[way]()) for way in ways]))
"""

RUNS = """
import mprun.record as record
name, taken = sys.argv[1], record.dated_folder
def dated_folder():
    wait(name)
    return taken()
record.dated_folder = dated_folder
from mprun.cli import main
sys.exit(main(sys.argv[2:]))
"""

SMALL = ["recipe=linear", "recipe.model.out_features=8", "train.max_steps=2"]


def begun_together(code: str, words: Sequence[Sequence[str]]) -> list[str]:
    """What processes print that run `code` with these words, held until all can go on."""
    for file in (*Path().glob("ready-*"), Path("go")):
        file.unlink(missing_ok=True)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER + code, str(n), *own],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for n, own in enumerate(words)
    ]
    deadline = time.monotonic() + 300
    while len(list(Path().glob("ready-*"))) < len(words) and time.monotonic() < deadline:
        if any(p.poll() is not None for p in processes):  # it failed before it had a folder
            break
        time.sleep(0.02)
    # The start of a second: all names begin with the same one.
    Path("go.new").write_text(str(math.ceil(time.time() + 0.2)), encoding="utf-8")
    Path("go.new").rename("go")
    ended = [p.communicate(timeout=300) for p in processes]
    for process, (out, error) in zip(processes, ended, strict=True):
        assert process.returncode == 0, out + error
    return [out for out, _ in ended]


def check_names(processes: int, ways: Sequence[str]) -> None:
    out = begun_together(TAKES_NAMES, [[",".join(ways)]] * processes)
    found = [path for text in out for path in json.loads(text)]
    assert len(found) == len(set(found)) == processes * len(ways)
    assert all(Path(path).is_dir() for path in found)


def test_names_taken_at_once_are_distinct() -> None:
    check_names(8, ["run", "new_folder"] * 3)


@pytest.mark.exhaustive
def test_names_taken_by_64_processes_are_distinct() -> None:
    check_names(64, ["run", "new_folder"] * 3)


@pytest.mark.exhaustive
def test_names_taken_by_16_processes_five_times_are_distinct() -> None:
    for way in ("run", "new_folder", "new_sweep"):
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
            assert (run["status"], run["steps"]) == ("completed", 2)
            kept = (sweep / str(n) / "config.yaml").read_text(encoding="utf-8")
            assert f"\nseed: {run['seed']}\n" in f"\n{kept}"
            lines = record.read_lines(sweep / str(n))
            assert [x["step"] for x in lines if x["kind"] == "step"] == [1, 2]
        first, second = (run["seed"] for run in runs)
        assert second == first + 10  # both are of the same process
        seeds += [first, second]
    assert sorted(seeds) == sorted([*range(processes), *(10 + n for n in range(processes))])
    return len(seeds)


def test_sweeps_begun_at_once_leave_every_record() -> None:
    assert check_sweeps(3) == 6


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_four_sweeps_begun_at_once_twenty_times_leave_160_records() -> None:
    assert sum(check_sweeps(4) for _ in range(20)) == 160


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_64_runs_leave_64_records() -> None:
    """Sixteen at once, four times: each holds about 0.4 GB."""
    for wave in range(4):
        begun_together(RUNS, [[*SMALL, f"seed={16 * wave + n}"] for n in range(16)])
    found = [read_summary(path.parent) for path in Path("outputs").glob("*/*/summary.json")]
    assert sorted(run["seed"] for run in found) == list(range(64))
    for run in found:
        conforms(run, Summary)
        assert (run["status"], run["steps"]) == ("completed", 2)


def test_a_folder_that_was_not_used_is_removed() -> None:
    with record.dated_folder_if_used() as folder:
        assert folder.is_dir()
    assert not Path("outputs").exists()
    with record.dated_folder_if_used() as folder:
        (folder / "x").touch()
    assert (folder / "x").exists()


def test_where_no_folder_can_be_made_one_line_says_so() -> None:
    Path("outputs").touch()
    with pytest.raises(
        UsageError, match=r"outputs/.* cannot be made \(.*; start mprun in a folder"
    ):
        record.dated_folder()
