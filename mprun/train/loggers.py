"""Further sinks for a run's scalars, beside the record, which is always written.

A logger is told between steps, when losses are read anyway, and has written everything when its
call returns: a thread that still wrote while the next step ran would be timed with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mprun.errors import UsageError, hint
from mprun.records.run_record import Epoch, Scores, number
from mprun.train.callbacks import StepLine

LOGGERS = ("none", "tensorboard")
"""What logger.name may be."""


class Logger(Protocol):
    """Is told a run's scalars, in order; `step` counts optimizer steps from the run's start."""

    def steps(self, lines: list[StepLine]) -> None:
        """Steps that were taken since the last call."""

    def epoch(self, epoch: Epoch, step: int) -> None:
        """An epoch ended with this step, and was validated."""

    def test(self, scores: Scores, step: int) -> None:
        """The run was tested after this step."""

    def close(self) -> None:
        """Nothing more comes."""


class NoLogger:
    """Keeps nothing."""

    def steps(self, lines: list[StepLine]) -> None:
        pass

    def epoch(self, epoch: Epoch, step: int) -> None:
        pass

    def test(self, scores: Scores, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoardLogger:
    """Event files for TensorBoard: `tensorboard --logdir outputs`.

    The horizontal axis of every curve is the optimizer step. A loss that is NaN or infinite is
    written as it is; TensorBoard marks it. The scalars of a step go into one event, since
    `add_scalar`, which makes one for each, takes several times as long.

    Args:
        folder: where the event files go; it may hold those of the run's part before a resume.
        first_step: for a resumed run the first step that follows: TensorBoard drops what older
            files hold from there on, which the run does again. None for a new run.
    """

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary: Any = Summary
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def steps(self, lines: list[StepLine]) -> None:
        for line in lines:
            self._add(
                {
                    "train/loss": line.loss,
                    "train/lr": line.lr,
                    "train/loss_scale": line.loss_scale,
                    "time/step_ms": line.step_time_ms,
                    "time/data_ms": line.data_time_ms,
                },
                line.step,
            )
        self._writer.flush()

    def epoch(self, epoch: Epoch, step: int) -> None:
        train = _named("train/epoch_", epoch.train)
        self._add({**train, **_named("validation/", epoch.validation)}, step)
        self._writer.flush()

    def test(self, scores: Scores, step: int) -> None:
        self._add(_named("test/", scores), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, scalars: Mapping[str, float], step: int) -> None:
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in scalars.items()]
        self._writer.file_writer.add_summary(self._summary(value=values), step)


def _named(prefix: str, scores: Scores) -> dict[str, float]:
    """The scores that apply, by their tags: `validation/loss`, `train/epoch_accuracy`, ..."""
    known = {"loss": scores.loss, "accuracy": scores.accuracy}
    return {prefix + name: number(value) for name, value in known.items() if value is not None}


def check_logger(name: str) -> None:
    """Raise `UsageError` unless `build_logger` can make this one here."""
    if name not in LOGGERS:
        legal = ", ".join(LOGGERS)
        raise UsageError(f"logger.name={name}: legal: {legal}{hint(name, LOGGERS)}")
    if name == "tensorboard":
        try:
            import torch.utils.tensorboard  # noqa: F401
        except Exception as error:  # not installed, or at odds with what else is installed
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(
                f"logger=tensorboard needs TensorBoard, which cannot be imported ({reason}); "
                "pip install 'mprun[tensorboard]'"
            ) from None


def build_logger(name: str, folder: Path, first_step: int | None = None) -> Logger:
    """The logger of this name for the run in `folder`; `first_step` where the run is resumed."""
    check_logger(name)
    if name == "tensorboard":
        return TensorBoardLogger(folder / "tensorboard", first_step)
    return NoLogger()
