"""Starting further processes that help with a study: on this machine (joblib), as jobs (submitit).

A process that is killed ends no other one: each joblib process has an executor of its own, each job
of submitit is a job of its own. Ctrl-C reaches this process alone, which passes it on as SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import shutil
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from mprun.config.settings import Executor, Launcher, LauncherSettings
from mprun.doctor.environment import usable_cores
from mprun.errors import UsageError, first_line
from mprun.experiments.study_worker import StudyWork, help_with_study
from mprun.records.files import refuse_links

LOGS = ".submitit"
"""The folder of submitit's files in a study's."""
SLURM_MIN = 60
"""`timeout_min` of Slurm jobs, by default."""
LONGEST_MIN = 7 * 24 * 60
"""`timeout_min` of jobs on this machine, where nothing else limits them."""


class Workers(Protocol):
    """Processes that a launcher has started."""

    def running(self) -> int:
        """How many have not ended."""

    def stop(self) -> None:
        """Ask all to end their trials with a checkpoint."""

    def errors(self) -> list[str]:
        """After they have ended: what went wrong in them."""

    def close(self) -> None:
        """After they have ended: release what they used."""


def is_on_this_machine(settings: LauncherSettings) -> bool:
    """Whether the processes of a launcher are on this machine."""
    if settings.name is not Launcher.submitit or settings.executor is Executor.slurm:
        return settings.name is not Launcher.submitit
    return settings.executor is not Executor.auto or shutil.which("srun") is None


def is_side_by_side(settings: LauncherSettings) -> bool:
    """Whether trials run on this machine at the same time, so that their times mean nothing."""
    is_one = settings.count == 1 or settings.executor is Executor.debug
    return is_on_this_machine(settings) and not is_one


def threads_each(settings: LauncherSettings) -> int | None:
    """PyTorch's threads in each process; None where the environment or Slurm decides."""
    if not is_side_by_side(settings) or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, min(torch.get_num_threads(), usable_cores() // settings.count))


def check_start(settings: LauncherSettings) -> None:
    """Check what can be checked before processes are started.

    Raises:
        UsageError: the package is not installed, or it refuses an option.
    """
    if settings.name is Launcher.joblib:
        _package("joblib.externals.loky", settings)
    if settings.name is Launcher.submitit:
        with TemporaryDirectory() as folder:
            _executor(Path(folder), settings)


def start_workers(settings: LauncherSettings, work: StudyWork) -> Workers:
    """Start the processes of a launcher other than `local`.

    Raises:
        UsageError: as `check_start`, or the study's folder cannot be written.
    """
    if settings.name is Launcher.joblib:
        return JoblibWorkers(work, settings)
    return SubmititWorkers(work, settings)


def _package(module: str, settings: LauncherSettings) -> Any:
    name = settings.name.name
    extra = "slurm" if settings.name is Launcher.submitit else name
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(
            f"launcher={name}: the package {name} is not installed; "
            f"pip install 'mprun[{extra}]', or launcher=local"
        ) from None


def _help_and_leave(work: StudyWork) -> list[str]:
    """As `help_with_study`; without the command that began it, the process ends then."""
    command = os.getppid()
    errors = help_with_study(work)
    if os.getppid() != command:  # it was killed: nobody else would end this process
        os.kill(os.getpid(), signal.SIGKILL)
    return errors


class JoblibWorkers:
    """Processes on this machine, by loky, the process pool of joblib.

    Args:
        work: what each does.
        settings: how many.
    """

    def __init__(self, work: StudyWork, settings: LauncherSettings) -> None:
        loky = _package("joblib.externals.loky", settings)
        # One pool would end all of its processes when one is killed.
        self._pools = [loky.ProcessPoolExecutor(max_workers=1) for _ in range(settings.count)]
        self._pids = [pool.submit(os.getpid) for pool in self._pools]
        self._futures = [pool.submit(_help_and_leave, work) for pool in self._pools]

    def running(self) -> int:
        return sum(not future.done() for future in self._futures)

    def stop(self) -> None:
        for pool, pid, future in zip(self._pools, self._pids, self._futures, strict=True):
            if not pid.done() or future.cancel():  # it has not begun
                pool.shutdown(wait=False, kill_workers=True)
            elif pid.exception() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid.result(), signal.SIGTERM)

    def errors(self) -> list[str]:
        errors: list[str] = []
        for future in self._futures:
            error = future.exception()
            errors += future.result() if error is None else [f"a process ended: {_line(error)}"]
        return errors

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=True, kill_workers=True)


class SubmititWorkers:
    """Jobs by submitit: a job array on Slurm, or processes on this machine.

    Args:
        work: what each does.
        settings: how many, where, and with which parameters.
    """

    def __init__(self, work: StudyWork, settings: LauncherSettings) -> None:
        refuse_links(work.folder, [LOGS])
        # A new folder: submitit unpickles the results in it.
        logs = work.folder / LOGS / secrets.token_hex(8)
        executor = _executor(logs, settings)
        self._is_local = executor.cluster == "local"
        with executor.batch():
            self._jobs = [executor.submit(help_with_study, work) for _ in range(settings.count)]

    def running(self) -> int:
        return sum(not job.done() for job in self._jobs)

    def stop(self) -> None:
        for job in self._jobs:
            if self._is_local:  # its id is that of the process, which passes signals on
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(job.job_id), signal.SIGTERM)
            else:
                job.cancel(check=False)

    def errors(self) -> list[str]:
        errors: list[str] = []
        for job in self._jobs:
            error = job.exception()
            errors += job.result() if error is None else [f"job {job.job_id} ended: {_line(error)}"]
        return errors

    def close(self) -> None:
        pass


def _executor(logs: Path, settings: LauncherSettings) -> Any:
    """Submitit's executor, which writes its files into `logs`.

    Raises:
        UsageError: submitit refuses a parameter, or there is no Slurm.
    """
    submitit = _package("submitit", settings)
    cluster = None if settings.executor is Executor.auto else settings.executor.name
    try:
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        executor.update_parameters(**{**_defaults(executor.cluster), **settings.options})
    except (NameError, AssertionError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"launcher=submitit: submitit refuses launcher.executor={settings.executor.name} "
            f"launcher.options={settings.options} ({_line(error)}); its parameters: "
            "https://github.com/facebookincubator/submitit"
        ) from None
    except OSError as error:
        raise UsageError(f"{logs} cannot be written ({error.strerror})") from None
    return executor


def _defaults(cluster: str) -> dict[str, Any]:
    """Parameters of submitit that `launcher.options` may replace."""
    if cluster != "local":
        return {"name": "mprun", "timeout_min": SLURM_MIN}
    return {"timeout_min": LONGEST_MIN, "gpus_per_node": torch.cuda.device_count()}


def _line(error: BaseException) -> str:
    """An error of a package as one line, without a full stop."""
    return f"{type(error).__name__}: {first_line(error)}".rstrip(".")
