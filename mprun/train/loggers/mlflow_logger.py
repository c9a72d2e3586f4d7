"""MLflow, through its client, which has no thread of its own.

The store is one SQLite file beside the runs, unless `logger.uri` or MLFLOW_TRACKING_URI names
another or a server. (MLflow is giving up its store of plain files.) Copies of the record's files
lie beside the SQLite file; a server decides itself where it keeps them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mprun.records.run_folder import TRACKERS
from mprun.records.run_record import Status
from mprun.train.loggers.logger import LoggedRow, Logger, environment, quiet

STATUSES = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
MAX_METRICS, MAX_PARAMETERS = 1000, 100
MAX_PARAMETER, MAX_TAG = 6000, 5000
"""MLflow's limits: of one call, and of one value."""

SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    # a server that is gone: half a minute instead of many minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class MlflowLogger(Logger):
    """Writes a run into an experiment of MLflow."""

    NAME = "mlflow"
    TITLE = "MLflow"
    MODULE = "mlflow.tracking"
    FIELDS = (*Logger.FIELDS, "uri")

    @classmethod
    def load(cls) -> Any:
        with environment(**SETTINGS), quiet():
            return super().load()

    @property
    def uri(self) -> str:
        """The store."""
        given = self.run.uri or os.environ.get("MLFLOW_TRACKING_URI")
        return given or f"sqlite:///{self.run.store_folder / 'mlflow.db'}"

    def address(self) -> str | None:
        if not self.uri.startswith("sqlite:"):  # an address may contain a password
            return None
        return f"to see the run: mlflow ui --backend-store-uri {self.uri}"

    def begin(self, earlier: str | None) -> str:
        with environment(**SETTINGS):
            self._client: Any = self.load().MlflowClient(tracking_uri=self.uri)
            self._id = self._continued(earlier) if earlier is not None else None
            if self._id is None:
                run = self._client.create_run(self._experiment(), run_name=self.run.name)
                self._id = str(run.info.run_id)
            self._describe(self._id)
        return self._id

    def write(self, rows: Sequence[LoggedRow]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_legal(name), value, int(row.time_s * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for first in range(0, len(metrics), MAX_METRICS):
            self._log(metrics=metrics[first : first + MAX_METRICS])

    def upload(self, files: Sequence[Path]) -> None:
        with environment(**SETTINGS):
            for file in files:
                self._client.log_artifact(self._id, str(file))

    def end(self, status: Status) -> None:
        with environment(**SETTINGS):
            self._client.set_tag(self._id, "status", status)
            self._client.set_terminated(self._id, STATUSES[status])

    def _experiment(self) -> str:
        """The id of the experiment, which is made if there is none."""
        from mlflow.exceptions import MlflowException

        name = self.run.project
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, self._artifacts()))
            except MlflowException:  # another run was quicker
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _artifacts(self) -> str | None:
        """Where files are kept; None: a server decides. MLflow's own default is ./mlruns."""
        if not re.match(r"(sqlite|postgresql|mysql|mssql)\b", self.uri):
            return None
        _, is_file, path = self.uri.partition("sqlite:///")
        folder = Path(path).absolute().parent if is_file else self.run.store_folder
        return (folder / TRACKERS / "mlflow").as_uri()

    def _continued(self, earlier: str) -> str | None:
        """The run of this id, running again; None if the store does not have it."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(earlier, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return earlier

    def _describe(self, run_id: str) -> None:
        """Log tags, and those parameters that the run does not have: they cannot be changed."""
        known = self._client.get_run(run_id).data.params
        parameters = {
            _legal(name): str(value)[:MAX_PARAMETER] for name, value in self.run.parameters.items()
        }
        new = {name: value for name, value in parameters.items() if name not in known}
        tags = {_legal(k): v[:MAX_TAG] for k, v in self.run.tags.items()}
        self._log(tags=tags | {"status": "running"})
        entries = iter(new.items())
        while part := dict(islice(entries, MAX_PARAMETERS)):
            self._log(params=part)

    def _log(
        self,
        metrics: Sequence[Any] = (),
        params: Mapping[str, str] = {},
        tags: Mapping[str, str] = {},
    ) -> None:
        from mlflow.entities import Param, RunTag

        with environment(**SETTINGS):
            self._client.log_batch(
                self._id,
                metrics,
                [Param(*item) for item in params.items()],
                [RunTag(*item) for item in tags.items()],
                synchronous=True,
            )


def _legal(name: str) -> str:
    """A name with the characters that MLflow takes."""
    return re.sub(r"[^\w./: -]", "_", name)
