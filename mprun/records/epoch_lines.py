"""The lines of metrics.jsonl about an epoch: writing and reading them. No torch.

An epoch has a line `epoch` with its training scores and, before it, a line `validation` if it was
validated. `summary.json` shows a choice of a long run's epochs; these lines are all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from mprun.errors import UsageError
from mprun.records.reader import converted, read_json_lines
from mprun.records.run_record import METRICS, Epoch, Number, Scores, number

BEGINNINGS = ('{"kind":"epoch"', '{"kind":"validation"')
"""Of these lines: the others, which are most, need not be parsed."""


class _EpochLine(msgspec.Struct):
    kind: Literal["epoch", "validation"]
    epoch: int
    loss: Number | None
    accuracy: float | None
    samples: int | None = None
    metrics: dict[str, Number | None] | None = None


def epoch_lines(epoch: Epoch, step: int) -> list[dict[str, Any]]:
    """The lines of an epoch that ended with this step."""
    lines = []
    if epoch.validation.named:
        lines.append(_line("validation", epoch, step, epoch.validation))
    return [*lines, _line("epoch", epoch, step, epoch.train)]


def _line(kind: str, epoch: Epoch, step: int, scores: Scores) -> dict[str, Any]:
    known = {k: v for k, v in vars(scores).items() if k in ("loss", "accuracy") or v}
    return {"kind": kind, "step": step, "epoch": epoch.epoch, **known}


def read_epochs(run: Path) -> Iterator[Epoch]:
    """The epochs in a run's metrics.jsonl, one at a time, in their order.

    Raises:
        UsageError: a line about an epoch is damaged.
    """
    path = run / "metrics.jsonl"
    validations: dict[int, Scores] = {}
    with path.open(encoding="utf-8") as file:
        for text in file:
            if not text.startswith(BEGINNINGS):
                continue
            try:
                line = msgspec.json.decode(text, type=_EpochLine)
            except msgspec.MsgspecError as error:
                raise UsageError(f"{path} is damaged: {error}") from None
            scores = Scores(
                loss=line.loss,
                accuracy=line.accuracy,
                samples=line.samples,
                metrics=line.metrics,
            )
            if line.kind == "validation":
                validations[line.epoch] = scores
            else:
                none = Scores(loss=None, accuracy=None)
                validation = validations.pop(line.epoch, none)
                yield Epoch(epoch=line.epoch, train=scores, validation=validation)


class ValidationLoss(NamedTuple):
    """The mean loss over the whole validation set after `step` optimizer steps."""

    step: int
    loss: float


class _ValidationLine(msgspec.Struct):
    step: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    loss: Number | None
    samples: int | None = None


def read_validation_losses(run: Path) -> list[ValidationLoss]:
    """The validation losses in a run's metrics.jsonl, with rising steps.

    Validations of a part of the samples are left out: their losses are of other samples.

    Raises:
        FileNotFoundError: there is no file.
        UsageError: it cannot be read, or a line about a validation is damaged.
    """
    path, losses = run / METRICS, dict[int, float]()
    for line in read_json_lines(path, having=b'"validation"'):
        if line.get("kind") == "validation":
            row = converted(path, line, _ValidationLine)
            if row.loss is not None and row.samples is None:
                losses[row.step] = number(row.loss)
    return [ValidationLoss(step, losses[step]) for step in sorted(losses)]
