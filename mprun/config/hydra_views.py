"""Hydra's views of a configuration: `--cfg`, `--info`, `--package`, `--resolve`, `hydra.run.dir`.

Hydra prints them itself. mprun composes configurations without Hydra's program, so here its parts
are called as that program calls them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from mprun.config.compose import (
    CONF,
    CONFIG_NAME,
    HYDRA_VERSION,
    RAISED,
    check_override,
    for_hydra,
    is_of_hydra,
    one_line,
    parse,
    register_schema,
    search_path,
)
from mprun.config.plain_text import quoted
from mprun.errors import UsageError


def show_config(
    kind: str,
    overrides: Sequence[str],
    config_dir: Path | None,
    package: str | None,
    resolve: bool,
) -> None:
    """Print the composed configuration, as Hydra's `--cfg` does.

    Args:
        kind: job (mprun's), hydra (Hydra's own) or all.
        overrides: Hydra overrides.
        config_dir: a further folder of configs, or None.
        package: print this part alone; None: all.
        resolve: whether interpolations are replaced by their values.

    Raises:
        UsageError: an override is wrong, or there is no such package.
    """
    with _composing(overrides, config_dir) as (hydra, texts):
        whole = hydra.compose_config(CONFIG_NAME, texts, RunMode.RUN, with_log_configuration=False)
        shown = hydra.get_sanitized_cfg(whole, kind)
        if package not in (None, "_global_") and OmegaConf.select(shown, str(package)) is None:
            legal = ", ".join(map(str, shown))
            raise UsageError(f"--package {package}: there is no such part of it; legal: {legal}")
        hydra.show_cfg(CONFIG_NAME, texts, kind, package, resolve)


def show_info(what: str, overrides: Sequence[str], config_dir: Path | None, multirun: bool) -> None:
    """Print what Hydra knows of its plugins, search path and defaults, as its `--info` does.

    Raises:
        UsageError: an override is wrong.
    """
    mode = RunMode.MULTIRUN if multirun else RunMode.RUN
    with _composing(overrides, config_dir) as (hydra, texts):
        root = logging.getLogger()
        before = root.level, root.handlers[:]
        try:
            hydra.show_info(what, CONFIG_NAME, texts, mode)
        finally:  # it logs to standard output
            root.level, root.handlers[:] = before


def with_run_dir(overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    """The overrides with `run.dir` in place of `hydra.run.dir`, whose patterns Hydra fills in.

    Raises:
        UsageError: an override is wrong, or the folder's name cannot be resolved.
    """
    named = [text for text in overrides if text.lstrip("+").startswith("hydra.run.dir=")]
    if not named:
        return list(overrides)
    others = [text for text in overrides if text not in named]
    with _composing(overrides, config_dir) as (hydra, texts):
        whole = hydra.compose_config(CONFIG_NAME, texts, RunMode.RUN, with_log_configuration=False)
        HydraConfig.instance().set_config(whole)
        folder = str(whole.hydra.run.dir)
    return [*others, f"run.dir={quoted(folder)}"]


@contextmanager
def _composing(
    overrides: Sequence[str], config_dir: Path | None
) -> Iterator[tuple[Any, list[str]]]:
    """Hydra, and the overrides as it takes them, checked.

    Raises:
        UsageError: an override is wrong, or Hydra refuses it.
    """
    register_schema()
    extra = search_path(config_dir)
    parsed = [parse(text) for text in overrides]
    with initialize_config_module(CONF, version_base=HYDRA_VERSION):
        for override in parsed:
            if not is_of_hydra(override):
                check_override(override, config_dir)
        texts = [str(o.input_line) if is_of_hydra(o) else for_hydra(o) for o in parsed]
        try:
            yield GlobalHydra.instance().hydra, [*texts, *extra]
        except RAISED as error:
            raise UsageError(f"Hydra refuses it: {one_line(error)}") from None
