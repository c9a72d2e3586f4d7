"""Evaluation: mean loss, accuracy and metrics over a set, in its stored order.

Gradients are off, which saves memory. Forces, or the terms of a differential equation, are
themselves derivatives: where PyTorch says that a graph is missing, the batch is computed again with
gradients on, and so are all batches after it. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mprun.precision import Precision
from mprun.precision.nested import map_tensors
from mprun.recipe import Recipe
from mprun.records.run_record import Scores
from mprun.train.data import Batch, Batches, MicroBatch
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

NO_GRAPH = "does not require grad"  # In PyTorch's error of a derivative without a graph


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
        self._with_graph = False

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
        own = batch.without_idle
        try:
            output, loss = self._pass(part, own)
        except RuntimeError as error:
            if self._with_graph or NO_GRAPH not in str(error):
                raise
            self._with_graph = True
            output, loss = self._pass(part, own)
        if own.parts:
            correct = count_correct(self.recipe, [output], own)
            readback.put(Scalars(loss, correct, parts=self._loss.take_parts()))
            metrics.add([output], own)
        return own

    def _pass(self, part: MicroBatch, own: Batch) -> tuple[Any, Any]:
        """The output, and the loss where this process has samples."""
        with torch.set_grad_enabled(self._with_graph):
            # also for a part that only fills up: a forward pass of shards needs all processes
            output = self.precision.forward(self._forward, part.inputs)
            loss = self.precision.loss(self._loss, output, part.content) if own.parts else None
        # what metrics keep must not keep the graph
        return map_tensors(Tensor.detach, (output, loss)) if self._with_graph else (output, loss)
