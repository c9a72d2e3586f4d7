"""Sweeps: one run for every combination of the values listed in the overrides, by Hydra's multirun.

Every combination is composed and checked before the first run starts. Hydra's launchers decide
where runs execute (`hydra/launcher=joblib` runs several at once), `run.dir` where their folders
are. After a failed run the others continue.

The jobs of a study (`launch`) are started in the same way. A launcher composes a configuration for
each job and calls a function with it, in a process that it starts, here or on another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks  # private, but a HydraContext has to have one
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from mprun.config.compose import (
    CONFIG_NAME,
    Composed,
    compose,
    for_hydra,
    hydra_here,
    one_line,
    parse,
    search_path,
    single,
    to_composed,
)
from mprun.config.reference import GROUPS, quoted
from mprun.errors import UsageError, first_line
from mprun.records.files import dated_folder_if_used, new_folder

Job = Callable[[Composed, Path], int]

# No log files and no folder .hydra: mprun's record of each run has all
QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null")
OF_LAUNCHER = ("hydra/launcher", "hydra.launcher.")


def sweep(overrides: Sequence[str], config_dir: Path | None, job: Job) -> Path:
    """Run `job` for every combination, in folders 0, 1, ... of a new folder; that folder.

    It is made after every combination was checked. `job` can be imported, since a launcher may call
    it in another process. Overrides of the launcher go to Hydra. Raises `UsageError` where a
    combination is wrong, or Hydra refuses the launcher.
    """
    parsed = [parse(text) for text in overrides]
    if any(o.key_or_group == "run.resume" for o in parsed):
        raise UsageError("run.resume with -m: a sweep has many runs; write run.resume without -m")
    ours = [o for o in parsed if not o.key_or_group.startswith(OF_LAUNCHER)]
    named = [single(o, "a sweep has one folder") for o in ours if o.key_or_group == "run.dir"]
    # all before the first run: a mistake in the last one must not cost the runs before it
    for combination in combinations(ours):
        compose(combination, config_dir)
    launchers = [str(o.input_line) for o in parsed if o not in ours]
    for_hydras = [*QUIET, *launchers, *search_path(config_dir)]
    with ExitStack() as stack:
        hydra = stack.enter_context(hydra_here())
        stack.enter_context(_refusals())
        texts = [_expanded(o) for o in ours if o not in named]
        # Hydra's own name, the time to the second, is not unique: sweeps start together
        wanted = next((o.value() for o in named), None)
        if wanted is None:
            folder = stack.enter_context(dated_folder_if_used())
        else:
            folder = new_folder(str(wanted))
        texts.append(f"hydra.sweep.dir={quoted(folder)}")
        task = _task(_run_of_sweep, job)
        hydra.multirun(CONFIG_NAME, task, [*texts, *for_hydras], with_log_configuration=False)
    return folder


@contextmanager
def _refusals() -> Iterator[None]:
    """Inside, what Hydra refuses of a sweep becomes a `UsageError`."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"Hydra refuses the sweep: {one_line(error)}") from None
    except OSError as error:  # Hydra writes multirun.yaml there
        reason = error.strerror or one_line(error)
        raise UsageError(f"the sweep's folder cannot be written ({reason})") from None


def combinations(parsed: Sequence[Override]) -> list[tuple[str, ...]]:
    """Every combination of the values that overrides list, as overrides with one value each."""
    with hydra_here():
        return list(product(*(_values(o) for o in parsed)))


def _values(override: Override) -> list[str]:
    """An override with a list as overrides with one value each."""
    text = str(override.input_line)
    if not override.is_sweep_override():
        return [text]
    if not override.is_discrete_sweep():
        raise UsageError(f"{text!r}: an interval has infinitely many values; list some: name=a,b")
    loader = GlobalHydra.instance().config_loader()  # knows the options that glob(*) matches
    with_options = OverridesParser.create(config_loader=loader).parse_overrides([text])[0]
    key = override.key_or_group
    texts = [f"{key}={value}" for value in with_options.sweep_string_iterator()]
    if key in GROUPS:  # two names of one mode are one value
        texts = list(dict.fromkeys(str(parse(text).input_line) for text in texts))
    return texts


def _expanded(override: Override) -> str:
    """The override as Hydra's multirun gets it: each option of a group once."""
    if override.key_or_group not in GROUPS or not override.is_sweep_override():
        return for_hydra(override)
    values = (for_hydra(parse(text)).partition("=")[2] for text in _values(override))
    return f"{override.key_or_group}={','.join(values)}"


def _task(function: Callable[..., Any], argument: Callable[..., Any]) -> Any:
    """`function` with its first argument, in the form that Hydra's launchers call."""
    task: Any = partial(function, argument)
    task.__name__ = "mprun"  # they ask for it
    return task


def _run_of_sweep(job: Job, raw: DictConfig) -> int:
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    raw.run.dir = str(folder)
    given = [parse(text) for text in settings.overrides.task]
    return job(to_composed(raw, given), folder)


EXTRAS = {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm"}
"""Launcher to the extra of mprun that installs its plugin."""


def _job_of_study(function: Callable[[], Any], _: DictConfig) -> Any:
    hydra = GlobalHydra.instance()
    of_launcher, hydra.hydra = hydra.hydra, None  # a job may compose configurations of its own
    try:
        return function()
    finally:
        hydra.hydra = of_launcher


def check_hydra_launcher(name: str, overrides: Sequence[str]) -> None:
    """Raise `UsageError` for a launcher that is not installed, or refuses one of the overrides."""
    with _composed(name, overrides, Path()) as (hydra, config):
        _made(hydra, config, list)  # any function will do: nothing is started


def launch(
    name: str, overrides: Sequence[str], logs: Path, function: Callable[[], Any], jobs: int
) -> list[Any]:
    """Start as many jobs, and wait; what each returned, or the exception that it raised.

    Each calls `function`, which can be pickled. `logs` is the folder of the launcher's files, which
    does not exist. Where jobs are lost, an exception of the launcher's package is raised.
    """
    with _composed(name, overrides, logs) as (hydra, config):
        made = _made(hydra, config, function)
        # a launcher wants overrides for each job; the function does not read what they compose
        each = [[f"seed={number}"] for number in range(jobs)]
        returns: Sequence[JobReturn] = made.launch(each, initial_job_idx=0)
    return [_returned(job) for job in returns]


def _returned(job: JobReturn) -> Any:
    """What a job returned, or the exception that it raised."""
    try:
        with redirect_stderr(StringIO()):  # Hydra prints the exception before it raises it
            return job.return_value
    except Exception as error:
        return error


@contextmanager
def _composed(name: str, overrides: Sequence[str], logs: Path) -> Iterator[tuple[Any, DictConfig]]:
    """Hydra, and its configuration with this launcher; raises `UsageError` where it has none."""
    texts = [*QUIET, f"hydra.sweep.dir={quoted(logs)}", *overrides]
    with hydra_here() as hydra:
        try:
            config = hydra.compose_config(
                CONFIG_NAME, texts, RunMode.MULTIRUN, with_log_configuration=False
            )
        except (HydraException, OmegaConfBaseException) as error:
            reason = f"Hydra refuses its fields: {one_line(error)}"
            if "hydra/launcher" in str(error) and "Could not" in str(error):  # it has no class
                extra = EXTRAS.get(name)
                how = f"pip install 'mprun[{extra}]'" if extra else "install its plugin"
                reason = f"Hydra has no such launcher; {how}, or launcher=local"
            raise UsageError(f"launcher={name}: {reason}") from None
        yield hydra, config


def _made(hydra: Any, config: DictConfig, function: Callable[[], Any]) -> Any:
    """Hydra's launcher, ready to start jobs; raises `UsageError` where Hydra cannot make it."""
    try:
        context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
        return Plugins.instance().instantiate_launcher(
            hydra_context=context,
            task_function=_task(_job_of_study, function),
            config=config,
        )
    except Exception as error:  # whatever its class raises
        reason = f"{type(error).__name__}: {first_line(error)}".rstrip(".")
        raise UsageError(f"Hydra refuses the launcher: {reason}") from None
