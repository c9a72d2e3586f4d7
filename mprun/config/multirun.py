"""Sweeps: one run for every combination of the values listed in the overrides, by Hydra's multirun.

Every combination is composed and checked before the first run starts. Hydra's launchers decide
where runs execute (`hydra/launcher=joblib` runs several at once). After a failed run the others
continue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path

from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from mprun.config.compose import (
    CONF,
    CONFIG_NAME,
    HYDRA_VERSION,
    Composed,
    compose,
    for_hydra,
    one_line,
    parse,
    search_path,
    to_composed,
)
from mprun.config.plain_text import quoted
from mprun.config.reference import GROUPS
from mprun.errors import UsageError

Job = Callable[[Composed, Path], int]
NewFolder = Callable[[], AbstractContextManager[Path]]

QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null")
NAMED_BY_SWEEP = ("run.dir", "run.resume", "hydra.sweep.dir", "hydra.sweep.subdir")


def sweep(
    overrides: Sequence[str], config_dir: Path | None, new_folder: NewFolder, job: Job
) -> Path:
    """Run `job` for every combination, in folders 0, 1, ... of a new folder; that folder.

    Args:
        overrides: Hydra overrides; `name=a,b` lists values. `hydra.*` ones go to Hydra.
        config_dir: a further folder of configs, or None.
        new_folder: makes the sweep's folder, which no other process uses; called after every
            combination was checked.
        job: takes a checked configuration and the run's folder; importable, since a launcher may
            call it in another process.

    Raises:
        UsageError: a combination is wrong, or Hydra refuses its own settings.
    """
    parsed = [parse(text) for text in overrides]
    for override in parsed:
        if override.key_or_group in NAMED_BY_SWEEP:
            raise UsageError(
                f"{override.key_or_group} with -m: a sweep sets the folders of its runs itself"
            )
    ours = [o for o in parsed if not o.key_or_group.startswith(("hydra.", "hydra/"))]
    for_launcher = [str(o.input_line) for o in parsed if o not in ours]
    for combination in combinations(ours):
        compose(combination, config_dir)
    extra = search_path(config_dir)
    with new_folder() as folder, initialize_config_module(CONF, version_base=HYDRA_VERSION):
        # Hydra's own name, the time to the second, is not unique: sweeps may start together.
        own = [*QUIET, f"hydra.sweep.dir={quoted(folder)}"]
        for_sweep = [*map(_expanded, ours), *own, *for_launcher, *extra]
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            hydra.multirun(CONFIG_NAME, _Task(job), for_sweep, with_log_configuration=False)
        except (HydraException, OmegaConfBaseException) as error:
            raise UsageError(f"Hydra refuses the sweep: {one_line(error)}") from None
        except OSError as error:  # Hydra writes multirun.yaml there
            raise UsageError(f"{folder} cannot be written ({error.strerror})") from None
    return folder


def combinations(parsed: Sequence[Override]) -> list[tuple[str, ...]]:
    """Every combination of the values that overrides list, as overrides with one value each."""
    with initialize_config_module(CONF, version_base=HYDRA_VERSION):
        return list(product(*(_values(o) for o in parsed)))


def _values(override: Override) -> list[str]:
    """An override with a list as overrides with one value each."""
    text = str(override.input_line)
    if not override.is_sweep_override():
        return [text]
    if not override.is_discrete_sweep():
        raise UsageError(f"'{text}': an interval has infinitely many values; list some: name=a,b")
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


class _Task:
    """A job in the form that Hydra calls."""

    __name__ = "mprun"

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, raw: DictConfig) -> int:
        settings = HydraConfig.get()
        folder = Path(settings.runtime.output_dir)
        raw.run.dir = str(folder)
        given = [parse(text) for text in settings.overrides.task]
        return self._job(to_composed(raw, given), folder)
