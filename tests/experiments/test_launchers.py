"""`launcher=joblib` and `launcher=submitit`: processes that help with a study, with real runs."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mprun.cli.main import main
from mprun.config.settings import Executor, Launcher, LauncherSettings
from mprun.config.study_request import study_request
from mprun.experiments import launchers
from mprun.experiments.launchers import (
    is_on_this_machine,
    is_side_by_side,
    start_workers,
    threads_each,
)
from mprun.experiments.study import new_study
from mprun.experiments.study_progress import StudyProgress
from mprun.experiments.study_worker import StudyWork, help_with_study
from mprun.records.run_record import Summary, read_summary
from tests.experiments.crowd import (
    Crowd,
    a_crowd,
    is_alive,
    running_trials,
    starts,
    write_recipe,
)
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("native_is_fast", "quick_runs")

LINEAR = ["recipe=linear", "precision=fp32,bf16_mixed", "run.dir=s"]
SHORT = ["sweep", *LINEAR, "train.max_steps=20", "seeds=3", "compare.report=false"]
LONG = [
    *("sweep", "recipe=waiting.py", "precision=fp32,bf16_mixed", "run.dir=s", "seeds=2"),
    *("train.max_steps=100", "train.checkpoint_every_steps=5", "compare.report=false"),
]
RESUME = ["sweep", "run.resume=s", "compare.report=false"]
JOBLIB = ["launcher=joblib", "launcher.processes=2"]
LOCAL = ["launcher=submitit", "launcher.executor=local", "launcher.processes=2"]
DEBUG = ["launcher=submitit", "launcher.executor=debug", "launcher.processes=2"]


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    write_recipe(together=2)
    with a_crowd() as crowd:
        yield crowd


def summaries() -> list[Summary]:
    return [read_summary(path.parent) for path in Path("s").glob("*/summary.json")]


def statuses() -> Counter[tuple[str, int]]:
    return Counter((run.status, run.steps) for run in summaries())


def test_a_killed_process_ends_no_other_and_ctrl_c_stops_all_with_checkpoints(
    crowd: Crowd, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = crowd.start([*LONG, *JOBLIB], "log.txt")
    under_way = running_trials("s", 2)
    killed, other = under_way
    checkpoint = Path("s", under_way[other], "checkpoints", "last.pt")
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: not is_alive(killed))
    before = checkpoint.stat().st_ino
    wait_for(lambda: checkpoint.stat().st_ino != before)  # it continues
    os.kill(parent, signal.SIGINT)
    assert crowd.statuses() == {parent: 130}
    assert not is_alive(other)
    log = Path("log.txt").read_text(encoding="utf-8")
    assert "2 processes, 1 thread each" in log
    assert "stopped by Ctrl-C; resume with: mprun sweep run.resume=s" in log
    stopped = summaries()
    assert {run.backend.threads for run in stopped} == {1}
    assert {run.status for run in stopped} - {"completed"} == {"running", "interrupted"}

    Path("go").touch()
    assert main(RESUME) == 0
    assert "4 of 4 runs" in capsys.readouterr().out
    assert statuses() == {("completed", 100): 4}
    begun = starts("s")
    assert begun[under_way[killed]] == [killed, os.getpid()]
    assert begun[under_way[other]][0] == other
    assert not list(Path("s").glob("*.abandoned-*"))  # all had checkpoints


def check_once(output: str) -> None:
    """What a study of six runs has left and printed."""
    assert statuses() == {("completed", 20): 6}
    assert [len(pids) for pids in starts("s").values()] == [1] * 6
    assert "2 processes" in output
    assert "6 of 6 runs" in output
    assert output.count("linear: 2 variants") == 1  # one comparison


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [JOBLIB, LOCAL], ids=["joblib", "local"])
def test_a_launcher_carries_out_a_study_once(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, *words]) == 0
    check_once(capsys.readouterr().out)
    assert os.getpid() not in {pid for pids in starts("s").values() for pid in pids}


@pytest.mark.parametrize(
    "words", [pytest.param(JOBLIB, marks=pytest.mark.exhaustive), DEBUG], ids=["joblib", "debug"]
)
def test_advice_by_memory_screens_in_every_process(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    study = ["advise", *LINEAR, "train.max_steps=20", "seeds=4"]
    assert main([*study, "advise.objective=memory", "advise.screen=1", *words]) == 0
    output = capsys.readouterr().out
    assert "take fp32" in output
    assert "bf16_mixed: screened out after" in output
    assert len(starts("s")) < 8


@pytest.mark.exhaustive
def test_processes_of_a_command_that_was_killed_end_the_study_and_then_themselves(
    crowd: Crowd,
) -> None:
    parent = crowd.start([*LONG, *JOBLIB], "log.txt")
    workers = list(running_trials("s", 2))
    os.kill(parent, signal.SIGKILL)
    assert crowd.statuses() == {parent: -signal.SIGKILL}
    Path("go").touch()
    wait_for(lambda: not any(map(is_alive, workers)))
    assert statuses() == {("completed", 100): 4}
    assert {pid for pids in starts("s").values() for pid in pids} == set(workers)


# ---- a process, without the others ---------------------------------------------------------------


def work_on(study: str) -> StudyWork:
    """What a process that submitit started is told."""
    return StudyWork(
        command="sweep",
        folder=Path(study).resolve(),
        trust=True,
        screening=None,
        budget="",
        budget_min=None,
        threads=None,
        is_shown=False,
        is_detached=False,
        is_own_process=True,
    )


def test_a_job_whose_time_is_almost_over_leaves_its_run_to_others_with_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Submitit then sends SIGUSR2."""
    request = study_request("sweep", ["run.dir=s", "seeds=1"], None)
    steps = ("train.max_steps=40", "train.checkpoint_every_steps=5")
    new_study(request, {"fp32": ("recipe=linear", *steps)})
    with monkeypatch.context() as patch:
        patch.setattr(StudyProgress, "update", lambda *args: signal.raise_signal(signal.SIGUSR2))
        before = signal.getsignal(signal.SIGUSR2)
        assert help_with_study(work_on("s")) == []
        assert signal.getsignal(signal.SIGUSR2) == before
    ((status, taken),) = statuses()
    assert status == "interrupted"
    assert 0 < taken < 40
    assert help_with_study(work_on("s")) == []
    assert statuses() == {("completed", 40): 1}
    assert starts("s") == {"fp32-seed0": [os.getpid()] * 2}
    assert not list(Path("s").glob("*.abandoned-*"))


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_process_ends_after_the_study_if_its_command_was_killed(
    is_alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = [7, 7 if is_alive else 1]
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    monkeypatch.setattr(launchers, "help_with_study", lambda work: ["an error"])
    assert launchers._help_and_leave(work_on("s")) == ["an error"]
    assert sent == ([] if is_alive else [(os.getpid(), signal.SIGKILL)])


@pytest.mark.parametrize(
    "settings",
    [
        LauncherSettings(Launcher.joblib, 2),
        LauncherSettings(Launcher.submitit, 2, Executor.local),
    ],
    ids=lambda settings: settings.name.name,
)
def test_workers_are_stopped_and_say_what_went_wrong(
    settings: LauncherSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of a study's work they wait until they are stopped, without importing torch."""
    folder = Path.cwd()

    def wait(work: object) -> list[str]:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        (folder / f"pid-{os.getpid()}").touch()
        signal.sigwait([signal.SIGTERM])
        return ["it was stopped"]

    monkeypatch.setattr(launchers, "_help_and_leave", wait)
    monkeypatch.setattr(launchers, "help_with_study", wait)
    work = SimpleNamespace(folder=Path("s"))
    workers = start_workers(settings, work)  # type: ignore[arg-type]
    expected = ["it was stopped"] * 2
    wait_for(lambda: len(list(Path().glob("pid-*"))) == 2)
    assert workers.running() == 2
    if settings.name is Launcher.joblib:
        pids = [int(path.name.removeprefix("pid-")) for path in Path().glob("pid-*")]
        os.kill(pids[0], signal.SIGKILL)
        wait_for(lambda: workers.running() == 1)
        expected[0] = "a process ended: TerminatedWorkerError"
    workers.stop()
    wait_for(lambda: workers.running() == 0)
    said = sorted(error.partition(": A worker")[0] for error in workers.errors())
    assert said == expected
    workers.close()


# ---- a job array ---------------------------------------------------------------------------------

SBATCH = """#!{python}
import os, pickle, re, subprocess, sys
text = open(sys.argv[-1]).read()
array = re.search(r"--array=(\\d+)-(\\d+)", text)
first, last = map(int, array.groups())
with open(os.environ["SLURM_LOG"], "a") as log:
    log.write(text)
for task in range(first, last + 1):
    if "SLURM_IS_IDLE" in os.environ:  # a job that does nothing has these results
        logs = os.path.dirname(re.search(r"--output=(.*)", text).group(1))
        with open(f"{{logs}}/499_{{task}}_0_result.pkl", "wb") as file:
            pickle.dump(("success", ["a job told this"]), file)
        continue
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


OF_SLURM = [
    *("launcher=submitit", "launcher.processes=2"),
    "launcher.options={slurm_partition: gpu, timeout_min: 30}",
]


def check_array(sbatch: str) -> None:
    assert "#SBATCH --array=0-1" in sbatch
    assert "#SBATCH --partition=gpu" in sbatch
    assert "#SBATCH --time=30" in sbatch


def test_a_study_is_carried_out_once_and_what_jobs_on_slurm_leave_open_is_named(
    slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*SHORT, *DEBUG]) == 0
    check_once(capsys.readouterr().out)
    assert {pid for pids in starts("s").values() for pid in pids} == {os.getpid()}
    shutil.rmtree("s/fp32-seed2")
    shutil.rmtree("s/.claims")
    monkeypatch.setenv("SLURM_IS_IDLE", "1")
    assert main([*RESUME, *OF_SLURM]) == 0
    check_array(slurm.read_text(encoding="utf-8"))
    output = " ".join(capsys.readouterr().out.split())
    assert "5 of 6 runs" in output
    assert output.count("warning: a job told this") == 1
    assert "jobs that ended early left out 1 of 6 trials: fp32 seed 2; continue with:" in output
    assert starts("s") == {}  # this machine is not the jobs'


@pytest.mark.exhaustive
def test_on_slurm_the_processes_are_a_job_array(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, *OF_SLURM]) == 0
    check_array(slurm.read_text(encoding="utf-8"))
    check_once(capsys.readouterr().out)


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
