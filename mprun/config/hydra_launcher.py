"""Hydra's launchers: jobs of mprun's own, started as Hydra's multirun starts a sweep's.

A launcher (`hydra/launcher=joblib`, `submitit_slurm`, ...) composes a configuration for each job
and calls a function with it, in a process that it starts, here or on another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from hydra import initialize_config_module
from hydra._internal.callbacks import Callbacks
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from mprun.config.compose import CONF, CONFIG_NAME, HYDRA_VERSION, one_line, register_schema
from mprun.config.multirun import QUIET
from mprun.config.plain_text import quoted
from mprun.errors import UsageError, first_line

EXTRAS = {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm"}
"""Launcher to the extra of mprun that installs its plugin."""


class _JobFunction:
    """A function without arguments in the form that Hydra calls."""

    __name__ = "mprun"

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __call__(self, config: DictConfig) -> Any:
        hydra = GlobalHydra.instance()
        of_launcher, hydra.hydra = hydra.hydra, None  # a job may compose configurations of its own
        try:
            return self._function()
        finally:
            hydra.hydra = of_launcher


def check_hydra_launcher(name: str, overrides: Sequence[str]) -> None:
    """Check that a launcher can be made.

    Args:
        name: of the launcher.
        overrides: Hydra's, `hydra/launcher=NAME` first.

    Raises:
        UsageError: it is not installed, or refuses a field.
    """
    with _composed(name, overrides, Path()) as (hydra, config):
        _made(hydra, config, _JobFunction(list))


def launch(
    name: str, overrides: Sequence[str], logs: Path, function: Callable[[], Any], jobs: int
) -> list[Any]:
    """Start jobs that call `function`, and wait for them.

    Args:
        name: of the launcher.
        overrides: Hydra's.
        logs: the folder of the launcher's files, which does not exist.
        function: what each job calls; can be pickled.
        jobs: how many.

    Returns:
        What each job returned, or the exception that it raised.

    Raises:
        Exception: of whatever kind the launcher's package has: jobs were lost.
    """
    with _composed(name, overrides, logs) as (hydra, config):
        made = _made(hydra, config, _JobFunction(function))
        each = [[f"seed={number}"] for number in range(jobs)]
        returns: Sequence[JobReturn] = made.launch(each, initial_job_idx=0)
    return [_returned(job) for job in returns]


def _returned(job: JobReturn) -> Any:
    """What a job returned, or the exception that it raised, which Hydra prints and raises."""
    try:
        with redirect_stderr(StringIO()):
            return job.return_value
    except Exception as error:
        return error


def launcher_fields(name: str) -> Collection[Any]:
    """The fields of a launcher; empty if it is not installed."""
    Plugins.instance()  # which reads what is installed
    try:
        fields: Collection[Any] = ConfigStore.instance().load(f"hydra/launcher/{name}.yaml").node
    except HydraException:
        return ()
    return [*fields]


def launcher_override(field: str, value: Any) -> str:
    """The override that sets a field of the launcher to a plain value."""
    return f"{'+' if '.' in field else ''}hydra.launcher.{field}={_text(value)}"


def _text(value: Any) -> str:
    """A plain value in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else str(value).lower()
    return quoted(value)


@contextmanager
def _composed(name: str, overrides: Sequence[str], logs: Path) -> Iterator[tuple[Any, DictConfig]]:
    """Hydra, and its configuration with this launcher.

    Raises:
        UsageError: Hydra has no such launcher, or refuses a field of it.
    """
    register_schema()
    texts = [*QUIET, f"hydra.sweep.dir={quoted(logs)}", *overrides]
    with initialize_config_module(CONF, version_base=HYDRA_VERSION):
        hydra: Any = GlobalHydra.instance().hydra
        try:
            config = hydra.compose_config(
                CONFIG_NAME, texts, RunMode.MULTIRUN, with_log_configuration=False
            )
        except (HydraException, OmegaConfBaseException) as error:
            raise UsageError(_refused(name, error)) from None
        yield hydra, config


def _made(hydra: Any, config: DictConfig, task: _JobFunction) -> Any:
    """Hydra's launcher, ready to start jobs.

    Raises:
        UsageError: Hydra cannot make it.
    """
    try:
        context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
        return Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=task, config=config
        )
    except Exception as error:  # whatever its class raises
        reason = f"{type(error).__name__}: {first_line(error)}".rstrip(".")
        raise UsageError(f"Hydra refuses the launcher: {reason}") from None


def _refused(name: str, error: Exception) -> str:
    extra = EXTRAS.get(name)
    if "hydra/launcher" in str(error) and "Could not" in str(error):
        how = f"pip install 'mprun[{extra}]', or" if extra else "install its plugin, or"
        return f"launcher={name}: Hydra has no such launcher; {how} launcher=local"
    return f"launcher={name}: Hydra refuses its fields: {one_line(error)}"
