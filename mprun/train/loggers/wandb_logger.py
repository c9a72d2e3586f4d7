"""Weights & Biases. By default offline: `wandb sync` sends the runs to its server later.

W&B writes in a process of its own (wandb-core), which is idle while nothing is logged. Measurements
of the machine, captured output and copies of code are switched off: the record has what matters of
them, and they would run beside the steps.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mprun.errors import UsageError
from mprun.records.run_record import Status
from mprun.train.loggers.logger import LoggedRow, Logger, environment, quiet

MAX_TAG = 64
SETTINGS = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}
"""What is switched off; a version of W&B may lack some of these settings."""


class WandbLogger(Logger):
    """Writes a run of W&B into `trackers/wandb` beside the runs, or also to its server."""

    NAME = "wandb"
    TITLE = "Weights & Biases"
    MODULE = "wandb"
    FIELDS = (*Logger.FIELDS, "mode")

    @classmethod
    def check(cls, online: bool = False) -> None:
        """Raise `UsageError` unless W&B can be imported and, if online, has a key.

        Without a key it would ask for one, and wait.
        """
        super().check()
        if online:
            with quiet():
                has_key = cls.load().login(prompt=False)
            if not has_key:
                raise UsageError(
                    "logger.mode=online: W&B has no key here; run wandb login, set WANDB_API_KEY, "
                    "or keep logger.mode=offline"
                )

    @classmethod
    def load(cls) -> Any:
        with environment(WANDB_ERROR_REPORTING="false"), quiet():
            return super().load()

    def address(self) -> str | None:
        if self.run.online:
            return None
        return f"to send the run to W&B: wandb sync {self._run.settings.sync_dir}"

    def begin(self, earlier: str | None) -> str:
        wandb, run = self.load(), self.run
        run.tracker_folder.mkdir(parents=True, exist_ok=True)
        known = wandb.Settings.model_fields
        settings = wandb.Settings(
            mode="online" if run.online else "offline",
            root_dir=str(run.tracker_folder),
            **{name: value for name, value in SETTINGS.items() if name in known},
        )
        tags = [f"{name}={value}"[:MAX_TAG] for name, value in run.tags.items()]
        with self._environment():
            self._run: Any = wandb.init(
                project=run.project,
                name=run.name,
                id=earlier or secrets.token_hex(4),
                resume="allow",
                reinit="create_new",
                config={**run.parameters, **{f"tags.{k}": v for k, v in run.tags.items()}},
                tags=tags,
                allow_val_change=True,
                settings=settings,
            )
        # W&B's own step only grows, and an epoch's scores may come after the next step's
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def write(self, rows: Sequence[LoggedRow]) -> None:
        for row in rows:
            self._run.log({**row.values, "step": row.step})

    def upload(self, files: Sequence[Path]) -> None:
        with self._environment():
            artifact = self.load().Artifact(f"record-{self._run.id}", type="record")
            for file in files:
                artifact.add_file(str(file))
            self._run.log_artifact(artifact)

    def end(self, status: Status) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "completed" else 1)

    def _environment(self) -> contextlib.AbstractContextManager[None]:
        """Folders for what W&B keeps in the home folder otherwise."""
        folder = self.run.tracker_folder / self.NAME
        return environment(
            WANDB_DATA_DIR=str(folder / "data"),
            WANDB_CACHE_DIR=str(folder / "cache"),
            WANDB_ERROR_REPORTING="false",
        )
