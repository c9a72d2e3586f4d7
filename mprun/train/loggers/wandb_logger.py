"""Weights & Biases. By default offline: `wandb sync` sends the runs to its server later."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from mprun.errors import UsageError
from mprun.records.run_record import Status
from mprun.train.loggers.logger import LoggedRow, Logger, quiet

MAX_TAG = 64  # W&B's limit, in characters
# measurements of the machine, output, code: the record has what matters, and they cost step time
OFF = {
    **dict.fromkeys(("save_code", "x_save_requirements"), False),
    **dict.fromkeys(("silent", "disable_git", "disable_code", "x_disable_stats"), True),
    **dict.fromkeys(("x_disable_meta", "x_disable_machine_info"), True),
}


class WandbLogger(Logger):
    """Writes a run of W&B into `trackers/wandb` beside the runs, or also to its server.

    W&B writes in a process of its own (wandb-core), which is idle while nothing is logged.
    """

    NAME = "wandb"
    TITLE = "Weights & Biases"
    MODULE = "wandb"
    FIELDS = (*Logger.FIELDS, "mode")
    VARIABLES: ClassVar = {"WANDB_ERROR_REPORTING": "false"}
    # W&B keeps these in the home folder otherwise
    FOLDERS: ClassVar = {"WANDB_DATA_DIR": "wandb/data", "WANDB_CACHE_DIR": "wandb/cache"}

    @classmethod
    def check(cls, online: bool = False) -> None:
        super().check()
        if not online:
            return
        with quiet(cls.VARIABLES):
            has_key = cls.load().login(prompt=False)  # without a key it would ask, and wait
        if not has_key:
            raise UsageError(
                "logger.mode=online: W&B has no key here; run wandb login, set WANDB_API_KEY, "
                "or keep logger.mode=offline"
            )

    def address(self) -> str | None:
        sync = f"to send the run to W&B: wandb sync {self._run.settings.sync_dir}"
        return None if self.run.online else sync

    def begin(self, earlier: str | None) -> str:
        run, wandb = self.run, self.load()
        run.tracker_folder.mkdir(parents=True, exist_ok=True)
        known = wandb.Settings.model_fields  # a version of W&B may lack some of `OFF`
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=earlier or secrets.token_hex(4),
            resume="allow",
            reinit="create_new",  # an earlier run of this process stays open until its own end
            mode="online" if run.online else "offline",
            config=run.described,
            tags=[f"{name}={value}"[:MAX_TAG] for name, value in run.tags.items()],
            allow_val_change=True,  # a resumed run may have other limits
            settings={"root_dir": str(run.tracker_folder), "console": "off"}
            | {name: value for name, value in OFF.items() if name in known},
        )
        # W&B's own step only grows, and an epoch's scores may come after the next step's
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def write(self, rows: Sequence[LoggedRow]) -> None:
        for row in rows:
            self._run.log({**row.values, "step": row.step})

    def upload(self, files: Sequence[Path]) -> None:
        artifact = self.load().Artifact(f"record-{self._run.id}", type="record")
        for file in files:
            artifact.add_file(str(file))
        self._run.log_artifact(artifact)

    def end(self, status: Status) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "completed" else 1)  # W&B's "finished", "failed"
