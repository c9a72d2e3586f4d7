"""Event files for TensorBoard: `tensorboard --logdir outputs`.

They lie in the folder `tensorboard` of the run's folder. Each curve's horizontal axis is the
optimizer step. TensorBoard marks losses that are NaN or infinite. The configuration and the tags
are a text each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mprun.records.run_record import Status
from mprun.train.loggers.logger import LoggedRow, Logger


class TensorBoardLogger(Logger):
    """Writes event files; all is written when a method returns, so no thread runs beside a step.

    Of a resumed run, TensorBoard drops the steps from older files that are taken again.
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
