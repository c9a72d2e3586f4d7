"""trackio: an SQLite file for each project, in `trackers/trackio` beside the runs.

trackio writes in a thread: it gets its rows at most every two seconds, and takes a few milliseconds
for them. The folder is decided when trackio is imported, so it is that of the process's first run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import secrets
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mprun.records.run_record import Status
from mprun.train.loggers.logger import LoggedRow, Logger, Scalar, environment

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Variables by which a user asks trackio to send its data away."""


class TrackioLogger(Logger):
    """Writes a run of trackio. A run is known by its name there, so the name gets a random end."""

    NAME = "trackio"
    TITLE = "trackio"
    MODULE = "trackio"

    @classmethod
    def load(cls) -> Any:
        if importlib.util.find_spec(cls.MODULE) is None:
            raise ModuleNotFoundError(f"No module named '{cls.MODULE}'")
        return None  # imported when the run's folder is known

    def address(self) -> str | None:
        folder = shlex.quote(str(self._trackio.utils.TRACKIO_DIR))
        project = shlex.quote(self.run.project)
        return f"to see the run: TRACKIO_DIR={folder} trackio show --project {project}"

    def begin(self, earlier: str | None) -> str:
        with environment(TRACKIO_DIR=str(self.run.tracker_folder / self.NAME)):
            self._trackio: Any = importlib.import_module(self.MODULE)
        self._step = 0
        self._config: dict[str, Scalar] = {
            **self.run.parameters,
            **{f"tags.{name}": value for name, value in self.run.tags.items()},
        }
        name = earlier or f"{self.run.name} {secrets.token_hex(3)}"
        self._run: Any = self._init(name, "allow")
        return str(self._run.name)

    def write(self, rows: Sequence[LoggedRow]) -> None:
        for row in rows:
            self._run.log(dict(row.values), step=row.step)
        self._step = max(self._step, rows[-1].step)

    def upload(self, files: Sequence[Path]) -> None:
        artifact = self._trackio.Artifact(f"record-{self._run.id}", type="record")
        for file in files:
            artifact.add_file(str(file))
        self._run.log_artifact(artifact)

    def end(self, status: Status) -> None:
        """trackio has no status, and takes a configuration at the start alone: start once more."""
        self._trackio.finish()
        self._config["tags.status"] = status
        run = self._init(self._run.name, "must")
        run.log({"summary/completed": float(status == "completed")}, step=self._step)
        self._trackio.finish()

    def _init(self, name: str, resume: str) -> Any:
        with _without_account():
            return self._trackio.init(
                self.run.project,
                name=name,
                config=self._config,
                resume=resume,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )


@contextlib.contextmanager
def _without_account() -> Iterator[None]:
    """Inside, Hugging Face is not asked who the user is, unless the data are to be sent away."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not any(os.environ.get(name) for name in REMOTE)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
