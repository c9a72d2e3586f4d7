"""The loggers of a run, from its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mprun.assemble.plan import Plan
from mprun.records.run_record import Summary
from mprun.train.callbacks import Messages
from mprun.train.loggers import LoggedRun, Logger, build_loggers
from mprun.train.loggers.logged_run import run_tags


def run_loggers(
    plan: Plan,
    resolved: dict[str, Any],
    summary: Summary,
    folder: Path,
    first_step: int | None,
    messages: Messages,
) -> list[Logger]:
    """The run's loggers; nothing is written before the first step.

    Args:
        plan: the run's plan.
        resolved: its configuration.
        summary: its first summary.
        folder: its folder.
        first_step: of a resumed run; None for a new one.
        messages: shows the loggers' notes and warnings.
    """
    config = plan.config.logger
    logged = LoggedRun(
        folder=folder,
        project=config.project or summary.recipe,
        name=config.run_name or f"{summary.variant} seed {summary.seed}",
        configuration=resolved,
        tags={**config.tags, **run_tags(summary)},
        uri=config.uri,
        online=config.mode.name == "online",
        first_step=first_step,
        log_every=plan.config.train.log_every,
    )
    return build_loggers(config.name, logged, messages.warn, messages.report)
