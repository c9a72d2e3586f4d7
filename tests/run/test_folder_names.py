"""Names that mprun chooses itself: processes that begin at once get folders of their own.

The processes are real. Each waits at the point where its folder is made until all are there, and
then for a common moment of the clock, so that they collide.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mprun.errors import UsageError
from mprun.records import files

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

from mprun.records.files import dated_folder, new_folder
from mprun.records.run_folder import RunFolder
from mprun.config.settings import study_request
from mprun.study.study import new_study

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

processes = [fork.Process(target=child, args=(n,)) for n in range(len(words))]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(any(process.exitcode for process in processes))
"""


@pytest.mark.representative("4")
@pytest.mark.parametrize("processes", [4, 64])
def test_names_taken_at_once_are_distinct(processes: int) -> None:
    """The processes are forked from one that has imported everything: 64 fit into the memory."""
    words = [["run", "new_folder", "new_study"] * 2] * processes
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER, json.dumps(words)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=1500,
    )
    out = [Path(f"out-{n}").read_text(encoding="utf-8") for n in range(processes)]
    assert done.returncode == 0, done.stderr + "".join(out)
    found = [path for text in out for path in json.loads(text)]
    assert len(found) == len(set(found)) == processes * 6
    assert all(Path(path).is_dir() for path in found)


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
