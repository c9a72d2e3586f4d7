"""Studies in several processes that Hydra's launchers start: joblib, submitit, with real runs."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

from mprun.cli.main import main
from mprun.config.settings import LauncherSettings, study_request
from mprun.records.run_record import Summary, read_summary
from mprun.study import hydra_launch
from mprun.study.hydra_launch import StudyJob, StudyLauncher
from mprun.study.study import new_study
from mprun.study.trials import StudyProgress
from tests.study.crowd import Crowd, a_crowd, is_alive, running_trials, starts, write_recipe
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
HYDRA = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
LOCAL = ["hydra/launcher=submitit_local", "launcher.processes=2"]
DEBUG = ["hydra/launcher=basic"]


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    write_recipe(together=2)
    with a_crowd() as crowd:
        yield crowd


def summaries() -> list[Summary]:
    return [read_summary(path.parent) for path in Path("s").glob("*/summary.json")]


def statuses() -> Counter[tuple[str, int]]:
    return Counter((run.status, run.steps) for run in summaries())


def test_a_killed_job_and_a_stopped_command_lose_nothing(
    crowd: Crowd, capsys: pytest.CaptureFixture[str]
) -> None:
    """joblib ends all of its processes with one; this process then carries on by itself."""
    parent = crowd.start([*LONG, *JOBLIB], "log.txt")
    under_way = running_trials("s", 2)
    killed, other = under_way
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: not is_alive(other))
    wait_for(lambda: any(parent in pids for pids in starts("s").values()))
    os.kill(parent, signal.SIGINT)
    assert crowd.statuses() == {parent: 130}
    log = Path("log.txt").read_text(encoding="utf-8")
    assert "launcher=joblib: 2 jobs, 1 thread each" in log
    assert "warning: a job ended: TerminatedWorkerError" in log
    assert "stopped by Ctrl-C; resume with: mprun sweep run.resume=s" in log
    assert {run.backend.threads for run in summaries()} == {1}

    Path("go").touch()
    assert main(RESUME) == 0
    assert "4 of 4 runs" in capsys.readouterr().out
    assert statuses() == {("completed", 100): 4}


def check_once(output: str) -> None:
    """What a study of six runs has left and printed."""
    assert statuses() == {("completed", 20): 6}
    assert [len(pids) for pids in starts("s").values()] == [1] * 6
    assert "6 of 6 runs" in output
    assert output.count("linear: 2 variants") == 1  # one comparison


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(JOBLIB, marks=pytest.mark.exhaustive),
        HYDRA,
        pytest.param(LOCAL, marks=pytest.mark.exhaustive),
    ],
    ids=["joblib", "hydra", "local"],
)
def test_a_launcher_carries_out_a_study_once(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, *words]) == 0
    output = capsys.readouterr().out
    check_once(output)
    assert ": 2 jobs" in output
    assert os.getpid() not in {pid for pids in starts("s").values() for pid in pids}


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [HYDRA, LOCAL], ids=["joblib", "local"])
def test_forty_runs_killed_and_resumed_are_whole(
    words: list[str], crowd: Crowd, capsys: pytest.CaptureFixture[str]
) -> None:
    study = ["sweep", *LINEAR, "train.max_steps=20", "seeds=20", "compare.report=false"]
    parent = crowd.start([*study, *words], "log.txt")
    wait_for(lambda: sum(len(pids) for pids in starts("s").values()) > 8)
    os.kill(parent, signal.SIGKILL)
    assert crowd.statuses() == {parent: -signal.SIGKILL}
    assert main([*RESUME, *words]) == 0
    assert "40 of 40 runs" in capsys.readouterr().out
    assert statuses() == {("completed", 20): 40}
    assert len(list(Path("s").glob("*-seed*"))) == 40


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
    # a process may have begun a second pair before the first one's record was there
    assert re.search(r"not taken: bf16_mixed \(screened out after (1 pair|2 pairs)\)", output)
    assert len(starts("s")) < 8


# ---- a job, without the others -------------------------------------------------------------------


def test_a_job_whose_time_is_almost_over_leaves_its_run_to_others_with_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Submitit then sends SIGUSR2."""
    request = study_request("sweep", ["run.dir=s", "seeds=1"], None)
    steps = ("train.max_steps=40", "train.checkpoint_every_steps=5")
    study = new_study(request, {"fp32": ("recipe=linear", *steps)})
    job = pickle.loads(pickle.dumps(StudyJob(study, "joblib", None, "", None, None)))
    with monkeypatch.context() as patch:
        patch.setattr(StudyProgress, "update", lambda *args: signal.raise_signal(signal.SIGUSR2))
        before = signal.getsignal(signal.SIGUSR2)
        assert job() == []
        assert signal.getsignal(signal.SIGUSR2) == before
    ((status, taken),) = statuses()
    assert status == "interrupted"
    assert 0 < taken < 40
    assert job() == []
    assert statuses() == {("completed", 40): 1}
    assert starts("s") == {"fp32-seed0": [os.getpid()] * 2}
    assert not list(Path("s").glob("*.abandoned-*"))


# ---- a job array ---------------------------------------------------------------------------------

SBATCH = """#!{python}
import os, pickle, re, subprocess, sys
from hydra.core.utils import JobReturn, JobStatus
result = JobReturn(status=JobStatus.COMPLETED, _return_value=["a job told this"])
text = open(sys.argv[-1]).read()
array = re.search(r"--array=(\\d+)-(\\d+)", text)
first, last = map(int, array.groups())
with open(os.environ["SLURM_LOG"], "a") as log:
    log.write(text)
for task in range(first, last + 1):
    if "SLURM_IS_IDLE" in os.environ:  # a job that does nothing has these results
        logs = os.path.dirname(re.search(r"--output=(.*)", text).group(1))
        logs = logs.replace("%A_%a", f"499_{{task}}").replace("%j", f"499_{{task}}")
        os.makedirs(logs, exist_ok=True)
        with open(f"{{logs}}/499_{{task}}_0_result.pkl", "wb") as file:
            pickle.dump(("success", result), file)
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
    *("hydra.launcher.partition=gpu", "hydra.launcher.timeout_min=30"),
    "+hydra.launcher.additional_parameters.exclusive=true",
]


def check_array(sbatch: str) -> None:
    assert "#SBATCH --array=0-1" in sbatch
    assert "#SBATCH --partition=gpu" in sbatch
    assert "#SBATCH --time=30" in sbatch
    assert "#SBATCH --exclusive" in sbatch


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
        (["launcher=submitit", "hydra.launcher.speed=1"], "'hydra.launcher.speed'"),
        (["launcher=submitit", "hydra.launcher.timeout_min=a"], "Hydra refuses its fields"),
        (["hydra/launcher=submitit_slurm"], "there is no srun"),
        (["hydra/launcher=nope"], "launcher=nope: Hydra has no such launcher"),
        (["hydra/launcher=joblib", "launcher=joblib"], "name a launcher twice"),
        (["hydra.job.name=x"], "those of a launcher are legal"),
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


@pytest.mark.parametrize(("launcher", "extra"), [("joblib", "joblib"), ("submitit", "slurm")])
def test_a_missing_plugin_is_named_with_its_extra(
    launcher: str,
    extra: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ConfigStore.instance()
    groups: Any = store.repo["hydra"]["launcher"]
    for name in [name for name in groups if launcher in name]:
        monkeypatch.delitem(groups, name)
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
    ("name", "count", "hydra", "here", "beside"),
    [
        ("local", None, "", True, False),
        ("joblib", 2, "", True, True),
        ("submitit", 2, "", True, True),
        ("local", None, "hydra/launcher=basic", True, False),
        ("local", None, "hydra/launcher=submitit_slurm", False, False),
        ("local", None, "hydra/launcher=ray", True, True),
    ],
)
def test_where_jobs_are(
    name: str,
    count: int | None,
    hydra: str,
    here: bool,
    beside: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    settings = LauncherSettings(name, count)
    launcher = StudyLauncher(settings, (hydra,) if hydra else ())
    assert (launcher.is_on_this_machine, launcher.is_side_by_side) == (here, beside)


def test_threads_share_the_cores_unless_the_environment_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hydra_launch, "usable_cores", lambda: 8)
    monkeypatch.setattr(hydra_launch.torch, "get_num_threads", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    counts = {
        n: StudyLauncher(LauncherSettings("joblib", n)).threads_each for n in (1, 2, 3, 8, 100)
    }
    assert counts == {1: None, 2: 4, 3: 2, 8: 1, 100: 1}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert StudyLauncher(LauncherSettings("joblib", 2)).threads_each is None
