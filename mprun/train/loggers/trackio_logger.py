"""trackio: an SQLite file for each project, in `trackers/trackio` beside the runs."""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from mprun.records.run_record import Status
from mprun.train.loggers.logger import LoggedRow, Logger

# Variables by which a user asks trackio to send its data away
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioLogger(Logger):
    """Writes a run of trackio.

    trackio writes in a thread: it gets its rows at most every two seconds, and takes a few
    milliseconds for them. Its folder is that of the process's first run.
    """

    NAME = "trackio"
    TITLE = "trackio"
    MODULE = "trackio"
    FOLDERS: ClassVar = {"TRACKIO_DIR": "trackio"}

    @classmethod
    def load(cls) -> Any:
        # trackio decides on its folder when it is imported: not before the run's is known
        if importlib.util.find_spec(cls.MODULE) is None:
            raise ModuleNotFoundError(f"No module named '{cls.MODULE}'")

    def address(self) -> str | None:
        folder = shlex.quote(str(self._trackio.utils.TRACKIO_DIR))
        project = shlex.quote(self.run.project)
        return f"to see the run: TRACKIO_DIR={folder} trackio show --project {project}"

    def begin(self, earlier: str | None) -> str:
        self._trackio: Any = importlib.import_module(self.MODULE)
        self._step, self._config = 0, self.run.described
        # a run is known by its name there: two of one name would be one run
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
        self._trackio.finish()
        # trackio has no status, and takes a configuration at the start alone: start once more
        self._config["tags.status"] = status
        run = self._init(self._run.name, "must")
        run.log({"summary/completed": float(status == "completed")}, step=self._step)
        self._trackio.finish()

    def _init(self, name: str, resume: str) -> Any:
        from huggingface_hub import constants

        options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        before = constants.HF_HUB_OFFLINE
        # trackio asks Hugging Face who the user is, which takes a network, also to write a file
        constants.HF_HUB_OFFLINE = before or not any(map(os.environ.get, REMOTE))
        try:
            return self._trackio.init(
                self.run.project, name=name, config=self._config, resume=resume, **options
            )
        finally:
            constants.HF_HUB_OFFLINE = before
