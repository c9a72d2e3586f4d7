"""The report of a study, as files of a run of the tracker that has the study's runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mprun.config import compose
from mprun.experiments.study import Study
from mprun.train.loggers import LoggedRun, build_loggers


def log_report(study: Study, files: Sequence[Path], tell: Callable[[str], None]) -> None:
    """Add a run `comparison of FOLDER` with these files beside the runs of the study's trials.

    Nothing happens with a logger that keeps no files. A study that is resumed replaces the files.

    Args:
        study: whose trials have a logger.
        files: of the report.
        tell: shows notes and warnings.
    """
    trial = study.trials[0]
    config = compose(trial.overrides, study.config_dir).config
    logged = LoggedRun(
        folder=study.folder,
        store=LoggedRun(folder=study.folder / trial.name).store_folder,
        project=config.logger.project or config.recipe.name,
        name=f"comparison of {study.folder.name}",
        tags={**config.logger.tags, "recipe": config.recipe.name, "kind": study.plan.command},
        uri=config.logger.uri,
        online=config.logger.mode.name == "online",
    )
    for logger in build_loggers(config.logger.name, logged, tell):
        if logger.HAS_RUNS and files:
            logger.open()
            logger.artifacts(files)
            logger.finish("completed")
