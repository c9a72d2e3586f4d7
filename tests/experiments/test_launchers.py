"""`launcher=joblib` and `launcher=submitit`: processes that help with a study, with real runs."""

from __future__ import annotations

import importlib
import os
import signal
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mprun.cli.main import main
from mprun.config.settings import Executor, Launcher, LauncherSettings
from mprun.experiments import launchers
from mprun.experiments.launchers import is_on_this_machine, is_side_by_side, threads_each
from mprun.records.run_record import read_summary
from tests.experiments.crowd import Crowd, running_trial, starts
from tests.waiting import wait_for

LINEAR = ["recipe=linear", "precision=fp32,bf16_mixed", "run.dir=s"]
SHORT = ["sweep", *LINEAR, "train.max_steps=20", "seeds=3", "compare.report=false"]
LONG = [
    *("sweep", *LINEAR, "train.max_steps=400", "train.checkpoint_every_steps=20", "seeds=2"),
    "compare.report=false",
]


def statuses() -> Counter[tuple[str, int]]:
    runs = [read_summary(path.parent) for path in Path("s").glob("*/summary.json")]
    return Counter((run.status, run.steps) for run in runs)


@pytest.mark.parametrize(
    "words",
    [
        ["launcher=joblib"],
        ["launcher=submitit", "launcher.executor=local"],
        ["launcher=submitit", "launcher.executor=debug"],
    ],
    ids=lambda words: words[-1].partition("=")[2],
)
def test_a_launcher_carries_out_a_study_once(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launchers, "usable_cores", lambda: 2)
    assert main([*SHORT, *words, "launcher.processes=2"]) == 0
    output = capsys.readouterr().out
    assert statuses() == {("completed", 20): 6}
    begun = starts("s")
    assert [len(pids) for pids in begun.values()] == [1] * 6
    here = os.getpid() in {pid for pids in begun.values() for pid in pids}
    assert here == (words[-1] == "launcher.executor=debug")
    assert "2 processes" in output
    assert "6 of 6 runs" in output
    assert output.count("linear: 2 variants") == 1  # one comparison
    if not here:
        assert "2 processes, 1 thread each" in output
        threads = {read_summary(p.parent).backend.threads for p in Path("s").glob("*/summary.json")}
        assert threads == {1}


def test_a_worker_that_is_killed_ends_no_other_and_its_trial_is_taken_over() -> None:
    crowd = Crowd()
    parent = crowd.start([*LONG, "launcher=joblib", "launcher.processes=2"], "log.txt")
    wait_for(lambda: len(starts("s")) > 0 if Path("s/.claims").exists() else False)
    killed = next(iter(starts("s").values()))[0]
    trial = running_trial("s", killed)
    os.kill(killed, signal.SIGKILL)
    assert crowd.statuses() == {parent: 0}
    assert len(starts("s")[trial]) == 2
    assert statuses() == {("completed", 400): 4}
    assert "warning: a process ended: TerminatedWorkerError" in Path("log.txt").read_text()


def test_processes_of_a_command_that_was_killed_end_the_study_and_then_themselves() -> None:
    crowd = Crowd()
    parent = crowd.start([*LONG, "launcher=joblib", "launcher.processes=2"], "log.txt")
    wait_for(lambda: len(starts("s")) > 1 if Path("s/.claims").exists() else False)
    os.kill(parent, signal.SIGKILL)
    assert crowd.statuses() == {parent: -signal.SIGKILL}
    wait_for(lambda: statuses() == {("completed", 400): 4})
    workers = {pid for pids in starts("s").values() for pid in pids}
    wait_for(lambda: not any(map(is_alive, workers)))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended, and nobody asked about, has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def test_a_job_whose_time_is_almost_over_leaves_its_run_to_others_with_a_checkpoint() -> None:
    """Submitit then sends SIGUSR2."""
    crowd = Crowd()
    parent = crowd.start([*LONG, "launcher=joblib", "launcher.processes=2"], "log.txt")
    wait_for(lambda: len(starts("s")) > 0 if Path("s/.claims").exists() else False)
    ended = next(iter(starts("s").values()))[0]
    trial = running_trial("s", ended)
    os.kill(ended, signal.SIGUSR2)
    assert crowd.statuses() == {parent: 0}
    assert len(starts("s")[trial]) == 2
    assert statuses() == {("completed", 400): 4}
    assert not list(Path("s").glob("*.abandoned-*"))
    assert "warning" not in Path("log.txt").read_text()


@pytest.mark.parametrize("words", [["joblib"], ["submitit", "launcher.executor=local"]])
def test_ctrl_c_on_the_command_stops_all_processes_with_checkpoints(words: list[str]) -> None:
    crowd = Crowd()
    first, *rest = words
    parent = crowd.start([*LONG, f"launcher={first}", *rest, "launcher.processes=2"], "log.txt")
    wait_for(lambda: len(starts("s")) > 1 if Path("s/.claims").exists() else False)
    for pids in list(starts("s").values()):
        running_trial("s", pids[0])
    os.kill(parent, signal.SIGINT)
    assert crowd.statuses() == {parent: 130}
    ended = statuses()
    assert {status for status, _ in ended} <= {"interrupted", "completed"}
    assert any(status == "interrupted" for status, _ in ended)
    assert "stopped by Ctrl-C; resume with: mprun sweep run.resume=s" in Path("log.txt").read_text()
    assert not any(is_alive(pid) for pids in starts("s").values() for pid in pids)
    assert main(["sweep", "run.resume=s", "compare.report=false"]) == 0
    assert statuses() == {("completed", 400): 4}


def test_advice_by_memory_screens_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", *LINEAR, "train.max_steps=20", "seeds=4", "advise.objective=memory"]
    assert main([*words, "launcher=joblib", "launcher.processes=2", "advise.screen=1"]) == 0
    output = capsys.readouterr().out
    assert "take fp32" in output
    assert "bf16_mixed: screened out after" in output


# ---- a job array ---------------------------------------------------------------------------------

SBATCH = """#!{python}
import os, re, subprocess, sys
text = open(sys.argv[-1]).read()
array = re.search(r"--array=(\\d+)-(\\d+)", text)
first, last = map(int, array.groups())
with open(os.environ["SLURM_LOG"], "a") as log:
    log.write(text)
for task in range(first, last + 1):
    own = dict(os.environ, SLURM_JOB_ID=str(500 + task), SLURM_ARRAY_JOB_ID="499",
               SLURM_ARRAY_TASK_ID=str(task), SLURM_JOB_NUM_NODES="1", SLURM_NTASKS="1",
               SLURM_NODEID="0", SLURM_PROCID="0", SLURM_LOCALID="0",
               SLURM_JOB_NODELIST="here", SLURM_NODELIST="here")
    subprocess.Popen(["bash", sys.argv[-1]], env=own, start_new_session=True,
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("Submitted batch job 499")
"""
SRUN = """#!{python}
import os, shlex, sys
words = sys.argv[1:]
start = next(i for i, word in enumerate(words) if not word.startswith("-"))
while words[start - 1] in ("--output", "--error"):
    start = next(i for i in range(start + 1, len(words)) if not words[i].startswith("-"))
os.execvp(words[start], words[start:])
"""
SACCT = """#!{python}
print("JobID|State|NodeList")
for task in range(2):
    print(f"499_{{task}}|RUNNING|here")
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for Slurm's commands, which run the tasks of an array here; what sbatch got."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT}.items():
        (tools / name).write_text(text.format(python=sys.executable), encoding="utf-8")
        (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_LOG", str(tmp_path / "sbatch.txt"))
    return tmp_path / "sbatch.txt"


def test_on_slurm_the_processes_are_a_job_array(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "launcher.options={slurm_partition: gpu, timeout_min: 30}"
    assert main([*SHORT, "launcher=submitit", "launcher.processes=2", options]) == 0
    text = slurm.read_text(encoding="utf-8")
    assert "#SBATCH --array=0-1" in text
    assert "#SBATCH --partition=gpu" in text
    assert "#SBATCH --time=30" in text
    assert statuses() == {("completed", 20): 6}
    assert [len(pids) for pids in starts("s").values()] == [1] * 6
    assert "6 of 6 runs" in capsys.readouterr().out


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launcher=jobli"], "did you mean 'joblib'?"),
        (["launcher=joblib", "launcher.processes=0"], "launcher.processes=0: legal is 1 or more"),
        (["launcher.processes=4"], "has no effect with launcher=local; add launcher=joblib or"),
        (["launcher=joblib", "launcher.executor=slurm"], "add launcher=submitit"),
        (["launcher=joblib", "launcher.options={a: 1}"], "launcher.options={'a': 1} has no effect"),
        (["launcher=joblib", "launcher.proceses=1"], "did you mean 'launcher.processes'?"),
        (["launcher=submitit", "launcher.options={speed: 1}"], "Parameter 'speed' need"),
        (["launcher=submitit", "launcher.options.timeout_min=a"], "submitit refuses"),
        (["launcher=submitit", "launcher.executor=slurm"], 'Could not detect "srun"'),
    ],
)
def test_a_mistake_is_one_line_before_there_is_a_folder(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert main([*SHORT, *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
    assert not Path("s").exists()


@pytest.mark.parametrize(
    ("launcher", "extra", "module"),
    [("joblib", "joblib", "joblib.externals.loky"), ("submitit", "slurm", "submitit")],
)
def test_a_missing_package_is_named_with_its_extra(
    launcher: str,
    extra: str,
    module: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = importlib.import_module

    def without(name: str) -> Any:
        if name == module:
            raise ImportError(name)
        return load(name)

    monkeypatch.setattr(importlib, "import_module", without)
    assert main([*SHORT, f"launcher={launcher}"]) == 2
    assert f"pip install 'mprun[{extra}]'" in capsys.readouterr().err
    assert not Path("s").exists()


def test_advice_on_time_is_refused_where_trials_would_slow_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["advise", *LINEAR, "launcher=joblib"]) == 2
    error = capsys.readouterr().err
    assert "advise.objective=time compares times, and 4 processes on one machine" in error
    assert "advise.objective=memory" in error


@pytest.mark.parametrize(
    ("name", "executor", "count", "here", "beside"),
    [
        ("local", "auto", None, True, False),
        ("joblib", "auto", 1, True, False),
        ("joblib", "auto", 2, True, True),
        ("submitit", "auto", 2, True, True),  # there is no Slurm
        ("submitit", "debug", 2, True, False),
        ("submitit", "slurm", 2, False, False),
    ],
)
def test_where_processes_are(
    name: str,
    executor: str,
    count: int | None,
    here: bool,
    beside: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    settings = LauncherSettings(Launcher[name], count, Executor[executor])
    assert (is_on_this_machine(settings), is_side_by_side(settings)) == (here, beside)


def test_threads_share_the_cores_unless_the_environment_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launchers, "usable_cores", lambda: 8)
    monkeypatch.setattr(launchers.torch, "get_num_threads", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    counts = {n: threads_each(LauncherSettings(Launcher.joblib, n)) for n in (1, 2, 3, 8, 100)}
    assert counts == {1: None, 2: 4, 3: 2, 8: 1, 100: 1}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_each(LauncherSettings(Launcher.joblib, 2)) is None
