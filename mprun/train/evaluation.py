"""Evaluation: mean loss, accuracy and metrics over a set, in its stored order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from mprun.precision import Precision
from mprun.recipe import Recipe
from mprun.records.run_record import Scores
from mprun.train.data import Batch, Batches
from mprun.train.loss_terms import LossTerms
from mprun.train.parallel.ranks import Ranks
from mprun.train.recipe_metrics import MetricPass, RecipeMetric
from mprun.train.sums import (
    NO_SCORES,
    MetricReadback,
    Scalars,
    Sums,
    count_correct,
    readback_for,
    with_metrics,
)


class PartEnds:
    """The steps that end one of `parts` equal parts of the `planned` steps; none if None."""

    def __init__(self, planned: int | None, parts: int) -> None:
        self._planned, self._parts = planned or 0, parts if planned else 0

    def __contains__(self, step: int) -> bool:
        if not self._parts or not 0 < step <= self._planned:
            return False
        part = round(step * self._parts / self._planned)  # the one whose end is nearest
        return round(part * self._planned / self._parts) == step


@dataclass
class Evaluator:
    """Evaluates a model, with the processes of `ranks` each a part of every batch."""

    recipe: Recipe
    model: nn.Module
    precision: Precision
    check: Callable[[], None]  # Is called after each batch, and may raise to end the evaluation
    metrics: Mapping[str, RecipeMetric]  # Of the recipe
    ranks: Ranks

    def __post_init__(self) -> None:
        self._forward = partial(self.recipe.forward, self.model)
        self._loss = LossTerms(self.recipe)

    def scores(self, batches: Batches) -> Scores:
        """Means over a set; None for an empty set."""
        if batches.is_empty:
            return NO_SCORES
        sums, readback = Sums(), readback_for(batches.device)
        metrics, sizes = MetricPass(self.metrics, batches.device, self.ranks), []
        self.model.eval()
        with torch.no_grad(), closing(iter(batches)) as stream:
            for batch in stream:
                own = self._score(batch, readback, metrics)
                sizes += [(part.size, part.weight) for part in own.parts]
                if readback.full:  # bounds the scalars that wait on the device
                    sums.add_all(readback.take(), sizes)
                self.check()
        sums.add_all(readback.take(), sizes)
        sums.add_up(self.ranks)
        return with_metrics(sums.scores(), metrics.compute())

    def _score(self, batch: Batch, readback: MetricReadback, metrics: MetricPass) -> Batch:
        """Score this process's part of a batch, and return it; it is empty if there is none."""
        (part,) = batch.parts
        # also for a part that only fills up: a forward pass of shards needs all processes
        output = self.precision.forward(self._forward, part.inputs)
        own = batch.without_idle
        if own.parts:
            loss = self.precision.loss(self._loss, output, part.content)
            correct = count_correct(self.recipe, [output], own)
            readback.put(Scalars(loss, correct, parts=self._loss.take_parts()))
            metrics.add([output], own)
        return own
