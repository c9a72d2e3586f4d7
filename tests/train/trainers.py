"""Trainers of recipes that a test makes up, without a run's folder."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mprun.precision import Precision
from mprun.precision.loss_scale import LossScale
from mprun.recipe import Classification, Recipe
from mprun.records.run_record import AveragedScores, Epoch
from mprun.train.callbacks import Callback, StepLine
from mprun.train.clock import Clock
from mprun.train.data import (
    Batches,
    BatchForm,
    DataRequest,
    Splits,
    TensorBatches,
    TensorOrder,
    TensorSet,
)
from mprun.train.loop import Limits, Schedule, Trainer, TrainingComponents
from mprun.train.loss_terms import checked_count
from mprun.train.sums import MetricReadback

CPU = torch.device("cpu")
TOKENS = 6
IGNORED = -100


class Base(Recipe):
    """A linear model of 4 numbers and 3 classes; the test gives the data."""

    METRIC = ("loss", "min")

    def model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def data(self, request: DataRequest) -> Splits:
        raise NotImplementedError

    def loss(self, output: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(output, batch[1])


class Tiny(Base):
    """The same, which counts the samples that are right."""

    correct = Classification.correct
    METRIC = Classification.METRIC


class Language(Base):
    """Three classes for each of six positions, some of which are ignored."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    def count(self, batch: Any) -> int:
        return int(batch[1].ne(IGNORED).sum())


def samples(n: int, seed: int = 1) -> TensorSet:
    """`n` pairs of 4 numbers and a class."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(n, 4, generator=generator)
    return TensorSet(numbers, torch.randint(3, (n,), generator=generator))


def sequences(lengths: list[int]) -> TensorSet:
    """A sequence for each number of positions that are not ignored."""
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randn(len(lengths), TOKENS, 4, generator=generator)
    targets = torch.randint(3, (len(lengths), TOKENS), generator=generator)
    for row, length in zip(targets, lengths, strict=True):
        row[length:] = IGNORED
    return TensorSet(numbers, targets)


def trainer_of(
    recipe: Recipe,
    train: TensorSet,
    *,
    batch: int = 8,
    micro: int | None = None,
    validation: TensorSet | None = None,
    test: TensorSet | None = None,
    limits: Limits | None = None,
    lr: float = 0.1,
    stop: Callable[[], bool] = lambda: False,
    loss_scale: LossScale | None = None,
    checkpoint_every_steps: int | None = None,
    dtype: torch.dtype = torch.float32,
    shuffle: bool = False,
    average_weights: int = 0,
) -> tuple[Trainer, SavingLog]:
    """A trainer in fp32 on the CPU with SGD, and what its callbacks got."""
    torch.manual_seed(0)
    model = recipe.model().to(dtype)
    form = BatchForm(count=checked_count(recipe))

    def batches(part: TensorSet, size: int, micro: int | None = None) -> Batches:
        return TensorBatches(part, size, form, CPU, micro)

    held_out = train.first(0) if validation is None else validation
    precision = Precision("fp32", device=CPU, loss_scale=loss_scale or "none")
    precision._output_dtype = dtype
    parts = TrainingComponents(
        recipe=recipe,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        scheduler=Schedule(),
        precision=precision,
        train=batches(train, batch, micro),
        order=TensorOrder(len(train), 0, shuffle=shuffle),
        validation=batches(held_out, 3),
        test=batches(train.first(0) if test is None else test, 3),
        clock=Clock(),
        readback=MetricReadback(),
    )
    log = SavingLog()
    limits = limits or Limits(2, None, None)
    made = Trainer(
        parts, limits, [log], stop, checkpoint_every_steps, average_weights=average_weights
    )
    return made, log


def trainer(
    n: int = 20, batch: int = 8, stop_at: int | None = None, **options: Any
) -> tuple[Trainer, SavingLog]:
    """A trainer of `Tiny` on `n` samples, validated and tested on ten.

    Args:
        n: samples.
        batch: samples of a step.
        stop_at: it is asked to stop at this look, from 1.
        options: of `trainer_of`.
    """
    looks = itertools.count(1)
    return trainer_of(
        Tiny(),
        samples(n),
        batch=batch,
        validation=samples(10),
        test=samples(10),
        stop=lambda: stop_at is not None and next(looks) >= stop_at,
        shuffle=True,
        **options,
    )


class SavingLog(Callback):
    """Keeps the events and the checkpoints."""

    def __init__(self) -> None:
        self.lines: list[StepLine] = []
        self.epochs: list[Epoch] = []
        self.states: list[dict[str, Any]] = []
        self.events: list[tuple[dict[str, Any], str | None]] = []
        self.averaged: AveragedScores | None = None

    def on_steps(self, lines: list[StepLine]) -> None:
        self.lines += lines

    def on_epoch_end(self, epoch: Epoch, step: int) -> None:
        self.epochs.append(epoch)

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        file = io.BytesIO()  # the state's tensors and sums are those that train on
        torch.save(state, file)
        file.seek(0)
        self.states.append(torch.load(file, weights_only=True))

    def on_averaged(self, scores: AveragedScores, step: int) -> None:
        self.averaged = scores

    def on_event(self, row: dict[str, Any], warning: str | None = None) -> None:
        self.events.append((row, warning))
