"""Loggers: further outputs for a run's scalars. The record is always written.

A logger writes between steps, when losses are read anyway, and has written everything when its
method returns. A thread that writes during the next step would add to that step's time.

To add one, write a callback with a class method `check`, add it to `LOGGERS`, and add
conf/logger/NAME.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mprun.errors import UsageError, first_line, hint
from mprun.records.run_record import Epoch, Scores, Status, number
from mprun.train.callbacks import Callback, StepLine


class TensorBoardLogger(Callback):
    """Event files for TensorBoard: `tensorboard --logdir outputs`.

    The horizontal axis of every curve is the optimizer step. TensorBoard marks losses that are NaN
    or infinite. The scalars of a step are one event: `add_scalar`, which makes an event for each
    scalar, takes several times as long.

    Args:
        run: the run's folder; the event files are in its folder `tensorboard`.
        first_step: of a resumed run: TensorBoard drops this and later steps from older files, since
            they are taken again. None for a new run.
    """

    def __init__(self, run: Path, first_step: int | None = None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary: Any = Summary
        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=first_step)

    @classmethod
    def check(cls) -> None:
        """Raise `UsageError` unless TensorBoard can be imported."""
        try:
            import torch.utils.tensorboard  # noqa: F401
        except Exception as error:  # not installed, or in conflict with another package
            raise UsageError(
                "logger=tensorboard needs TensorBoard, which cannot be imported "
                f"({first_line(error)}); pip install 'mprun[tensorboard]'"
            ) from None

    def on_steps(self, lines: list[StepLine]) -> None:
        for line in lines:
            self._add(
                {
                    "train/loss": line.loss,
                    **{f"train/loss.{name}": part for name, part in line.parts.items()},
                    "train/lr": line.lr,
                    "train/loss_scale": line.loss_scale,
                    "time/step_ms": line.step_time_ms,
                    "time/data_ms": line.data_time_ms,
                },
                line.step,
            )
        self._writer.flush()

    def on_epoch_end(self, epoch: Epoch, step: int) -> None:
        train = _named("train/epoch_", epoch.train)
        self._add({**train, **_named("validation/", epoch.validation)}, step)
        self._writer.flush()

    def on_test(self, scores: Scores, step: int) -> None:
        self._add(_named("test/", scores), step)
        self._writer.flush()

    def on_end(self, status: Status) -> None:
        self._writer.close()

    def _add(self, scalars: Mapping[str, float], step: int) -> None:
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in scalars.items()]
        self._writer.file_writer.add_summary(self._summary(value=values), step)


def _named(prefix: str, scores: Scores) -> dict[str, float]:
    """The scores that apply, by their tags: `validation/loss`, `train/epoch_accuracy`, ..."""
    return {prefix + name: number(value) for name, value in scores.named.items()}


LOGGERS: dict[str, type[TensorBoardLogger] | None] = {
    "none": None,
    "tensorboard": TensorBoardLogger,
}
"""The values of logger.name; each class takes a run's folder and a resumed run's first step."""


def check_logger(name: str) -> None:
    """Raise `UsageError` unless `build_loggers` can make this logger here."""
    if name not in LOGGERS:
        legal = ", ".join(LOGGERS)
        raise UsageError(f"logger.name={name}: legal: {legal}{hint(name, LOGGERS)}")
    if (logger := LOGGERS[name]) is not None:
        logger.check()


def build_loggers(name: str, run: Path, first_step: int | None = None) -> list[Callback]:
    """The callbacks for `logger.name`.

    Args:
        name: a key of `LOGGERS`.
        run: the run's folder.
        first_step: of a resumed run; None for a new one.
    """
    check_logger(name)
    logger = LOGGERS[name]
    return [] if logger is None else [logger(run, first_step)]
