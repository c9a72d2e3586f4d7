"""Loggers: further outputs for a run's scalars. The record is always written.

A logger writes between steps, when losses are read anyway. It never decides about a run: if it
fails, the user gets one warning, and the run goes on without it. By default all write files beside
the runs, and send nothing away.

To add one, write a subclass of `Logger`, name it in `LOGGERS`, and write conf/logger/NAME.yaml.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from mprun.errors import UsageError, hint
from mprun.records.run_record import Status
from mprun.train.logger import LoggedRow, LoggedRun, Logger, Tell, ignore, quiet

STATUSES = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
MAX_ITEMS = {"metrics": 1000, "params": 100, "tags": 100}  # MLflow's limits of one call


class MlflowLogger(Logger):
    """Writes a run into an experiment of MLflow, through its client, which has no thread.

    The store is one SQLite file beside the runs, unless `logger.uri` or MLFLOW_TRACKING_URI names
    another or a server.
    """

    NAME = "mlflow"
    TITLE = "MLflow"
    MODULE = "mlflow"
    FIELDS = (*Logger.FIELDS, "uri")
    VARIABLES: ClassVar = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        # a server that is gone: half a minute instead of many minutes
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    }

    @property
    def uri(self) -> str:
        """The store."""
        given = self.run.uri or os.environ.get("MLFLOW_TRACKING_URI")
        # not ./mlruns: MLflow is giving up its store of plain files
        return given or f"sqlite:///{self.run.store_folder / 'mlflow.db'}"

    def address(self) -> str | None:
        if not self.uri.startswith("sqlite:"):  # an address may contain a password
            return None
        return f"to see the run: mlflow ui --backend-store-uri {self.uri}"

    def begin(self, earlier: str | None) -> str:
        self._mlflow = self.load()
        self._client: Any = self._mlflow.MlflowClient(tracking_uri=self.uri)
        self._id = ""
        if earlier is not None:
            with suppress(self._mlflow.MlflowException):  # the store was changed: a new run
                self._client.update_run(earlier, status="RUNNING")
                self._id = earlier
        if not self._id:
            run = self._client.create_run(self._experiment(), run_name=self.run.name)
            self._id = str(run.info.run_id)
            values = {name: str(value) for name, value in self.run.parameters.items()}
            self._log("params", self._named("Param", values))
        tags = {**self.run.tags, "status": "running"}
        self._log("tags", self._named("RunTag", tags))
        return self._id

    def _experiment(self) -> str:
        """The id of the experiment, which is made if there is none."""
        name = self.run.project
        with suppress(self._mlflow.MlflowException):  # there is one, made by another run perhaps
            return str(self._client.create_experiment(name))
        return str(self._client.get_experiment_by_name(name).experiment_id)

    def write(self, rows: Sequence[LoggedRow]) -> None:
        metrics = [
            self._mlflow.entities.Metric(_legal(name), value, int(row.time_s * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        self._log("metrics", metrics)

    def _named(self, kind: str, values: dict[str, str]) -> list[Any]:
        return [getattr(self._mlflow.entities, kind)(_legal(k), x) for k, x in values.items()]

    def _log(self, kind: str, items: Sequence[Any]) -> None:
        most = MAX_ITEMS[kind]
        for first in range(0, len(items), most):
            batch = {kind: items[first : first + most]}
            # asynchronous, MLflow would write in a thread of its own, during steps
            self._client.log_batch(self._id, **batch, synchronous=True)

    def end(self, status: Status) -> None:
        self._client.set_tag(self._id, "status", status)
        self._client.set_terminated(self._id, STATUSES[status])


def _legal(name: str) -> str:
    """A name with the characters that MLflow takes."""
    return re.sub(r"[^\w./: -]", "_", name)


class TensorBoardLogger(Logger):
    """Event files in `tensorboard` of the run's folder: `tensorboard --logdir outputs`.

    All is written when a method returns, so no thread runs beside a step. Of a resumed run,
    TensorBoard drops the steps from older files that are taken again.
    """

    NAME = "tensorboard"
    TITLE = "TensorBoard"
    MODULE = "torch.utils.tensorboard"
    FIELDS = ("tags",)
    WRITE_EVERY_S = 0.0  # Appending to a file takes no time worth waiting for
    HAS_RUNS = False

    def begin(self, earlier: str | None) -> str:
        folder = self.run.folder / "tensorboard"
        self._writer: Any = self.load().SummaryWriter(str(folder), purge_step=self.run.first_step)
        for name, values in (("configuration", self.run.parameters), ("tags", self.run.tags)):
            if values:
                indented = json.dumps(dict(values), indent=1).replace("\n", "\n    ")
                self._writer.add_text(name, f"    {indented}")  # Markdown shows it as it is
        self._writer.flush()
        return ""  # event files have no run with an id

    def write(self, rows: Sequence[LoggedRow]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for row in rows:
            # one event per step: `add_scalar`, an event per scalar, takes several times as long
            values = [Summary.Value(tag=k, simple_value=v) for k, v in row.values.items()]
            event = Summary(value=values)
            self._writer.file_writer.add_summary(event, row.step, walltime=row.time_s)
        self._writer.flush()

    def end(self, status: Status) -> None:
        self._writer.close()


MAX_WANDB_TAG = 64  # Characters
# measurements of the machine, output, code: the record has what matters, and they cost step time
OFF = {
    **dict.fromkeys(("save_code", "x_save_requirements"), False),
    **dict.fromkeys(("silent", "disable_git", "disable_code", "x_disable_stats"), True),
    **dict.fromkeys(("x_disable_meta", "x_disable_machine_info"), True),
}


class WandbLogger(Logger):
    """Writes a run of W&B into `trackers/wandb`, for `wandb sync`, or also to its server.

    W&B writes in a process of its own (wandb-core), which is idle while nothing is logged.
    """

    NAME = "wandb"
    TITLE = "Weights & Biases"
    MODULE = "wandb"
    FIELDS = (*Logger.FIELDS, "mode")
    VARIABLES: ClassVar = {"WANDB_ERROR_REPORTING": "false"}
    # its own log lies in the home folder otherwise
    FOLDERS: ClassVar = {"WANDB_CACHE_DIR": "wandb/cache"}

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
            tags=[f"{name}={value}"[:MAX_WANDB_TAG] for name, value in run.tags.items()],
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

    def end(self, status: Status) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "completed" else 1)  # W&B's "finished", "failed"


# The values of logger.name
LOGGERS: dict[str, type[Logger] | None] = {
    "none": None,
    **{kind.NAME: kind for kind in (MlflowLogger, TensorBoardLogger, WandbLogger)},
}


def check_logger(name: str, online: bool = False) -> None:
    """Raise `UsageError` unless `build_loggers` can make this logger here, and go `online`."""
    if name not in LOGGERS:
        legal = ", ".join(LOGGERS)
        raise UsageError(f"logger.name={name}: legal: {legal}{hint(name, LOGGERS)}")
    if (logger := LOGGERS[name]) is not None:
        logger.check(online)


def unused_fields(name: str, given: Iterable[str]) -> dict[str, str]:
    """A sentence for each key of the configuration that the user set and a logger does not use."""
    logger = LOGGERS[name]
    used = ("name", *(() if logger is None else logger.FIELDS))
    # the second word: logger.tags.NAME belongs to the field `tags`
    keys = [k for k in given if k.startswith("logger.") and k.split(".")[1] not in used]
    return {key: f"{key} has no effect: logger={name} does not use it" for key in keys}


def build_loggers(
    name: str, run: LoggedRun, warn: Tell = ignore, report: Tell = ignore
) -> list[Logger]:
    """The callbacks for `logger.name`; nothing is written before the first step.

    `warn` is called with a sentence when the logger fails, `report` with a line for the user.
    """
    check_logger(name, run.online)
    logger = LOGGERS[name]
    return [] if logger is None else [logger(run, warn, report)]
