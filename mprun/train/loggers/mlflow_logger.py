"""MLflow, through its client, which has no thread of its own.

The store is one SQLite file beside the runs, unless `logger.uri` or MLFLOW_TRACKING_URI names
another or a server. Copies of the record's files lie beside the SQLite file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from mprun.records.run_folder import TRACKERS
from mprun.records.run_record import Status
from mprun.train.loggers.logger import LoggedRow, Logger

STATUSES = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
# MLflow's limits: of one call, and of one value
MAX_METRICS, MAX_PARAMETERS, MAX_PARAMETER, MAX_TAG = 1000, 100, 6000, 5000


class MlflowLogger(Logger):
    """Writes a run into an experiment of MLflow."""

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
        if earlier is not None and self._continues(earlier):
            self._id = earlier
        else:
            run = self._client.create_run(self._experiment(), run_name=self.run.name)
            self._id = str(run.info.run_id)
            values = {k: str(x)[:MAX_PARAMETER] for k, x in self.run.parameters.items()}
            self._log("params", self._named("Param", values), MAX_PARAMETERS)
        tags = {name: value[:MAX_TAG] for name, value in self.run.tags.items()}
        self._log("tags", self._named("RunTag", tags | {"status": "running"}), MAX_PARAMETERS)
        return self._id

    def _continues(self, earlier: str) -> bool:
        try:
            self._client.update_run(earlier, status="RUNNING")
        except self._mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False  # the store was changed or removed: a new run
        return True

    def _experiment(self) -> str:
        """The id of the experiment, which is made if there is none."""
        name = self.run.project
        if self._client.get_experiment_by_name(name) is None:
            try:
                return str(self._client.create_experiment(name, self._artifacts()))
            except self._mlflow.MlflowException:  # another run was quicker, or nothing works
                if self._client.get_experiment_by_name(name) is None:
                    raise
        return str(self._client.get_experiment_by_name(name).experiment_id)

    def _artifacts(self) -> str | None:
        """The folder of files; None: a server decides. MLflow's own default is ./mlruns."""
        if not re.match(r"(sqlite|postgresql|mysql|mssql)\b", self.uri):
            return None
        _, is_file, path = self.uri.partition("sqlite:///")
        folder = Path(path).absolute().parent if is_file else self.run.store_folder
        return (folder / TRACKERS / "mlflow").as_uri()

    def write(self, rows: Sequence[LoggedRow]) -> None:
        metrics = [
            self._mlflow.entities.Metric(_legal(name), value, int(row.time_s * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        self._log("metrics", metrics, MAX_METRICS)

    def _named(self, kind: str, values: dict[str, str]) -> list[Any]:
        return [getattr(self._mlflow.entities, kind)(_legal(k), x) for k, x in values.items()]

    def _log(self, kind: str, items: Sequence[Any], most: int) -> None:
        for first in range(0, len(items), most):
            batch = {kind: items[first : first + most]}
            # asynchronous, MLflow would write in a thread of its own, during steps
            self._client.log_batch(self._id, **batch, synchronous=True)

    def upload(self, files: Sequence[Path]) -> None:
        for file in files:
            self._client.log_artifact(self._id, str(file))

    def end(self, status: Status) -> None:
        self._client.set_tag(self._id, "status", status)
        self._client.set_terminated(self._id, STATUSES[status])


def _legal(name: str) -> str:
    """A name with the characters that MLflow takes."""
    return re.sub(r"[^\w./: -]", "_", name)
