"""Evaluation: mean loss, accuracy and metrics over a set, in its stored order."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from mprun.precision import Precision, devices
from mprun.recipe import Recipe
from mprun.records.run_record import Scores
from mprun.train.data import Batch, Batches
from mprun.train.loss_terms import LossTerms
from mprun.train.parallel.ranks import Ranks
from mprun.train.recipe_metrics import MetricPass, RecipeMetric, metrics_of
from mprun.train.sums import (
    NO_SCORES,
    MetricReadback,
    Scalars,
    Sums,
    count_correct,
    readback_for,
    with_metrics,
)

TRIAL_BATCHES = 4  # Batches evaluated to learn their time: one to warm up, a median of three


class Evaluator:
    """Evaluates a model, with the processes of `ranks` each a part of every batch.

    `check` is called after each batch, and may raise to end the evaluation. `metrics` are those of
    the recipe; None asks it for them.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        precision: Precision,
        check: Callable[[], None],
        metrics: Mapping[str, RecipeMetric] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._recipe, self._model, self._precision = recipe, model, precision
        self._check = check
        self._forward = partial(recipe.forward, model)
        self._loss = LossTerms(recipe)
        self._metrics = metrics_of(recipe) if metrics is None else metrics
        self._ranks = ranks or Ranks()

    def scores(self, batches: Batches, until: float = math.inf) -> Scores:
        """Means over a set; None for an empty set.

        No batch begins after the `time.perf_counter` `until`; scores of a set that was not finished
        have the number of samples.
        """
        if batches.is_empty:
            return NO_SCORES
        sums, readback, samples, is_part = Sums(), readback_for(batches.device), 0, False
        metrics, sizes = MetricPass(self._metrics, batches.device, self._ranks), []
        self._model.eval()
        with torch.no_grad(), closing(iter(batches)) as stream:
            for batch in stream:
                if samples and self._is_late(until):  # one batch at least: no score has no samples
                    is_part = True
                    break
                own = self._score(batch, readback, metrics)
                sizes += [(part.size, part.weight) for part in own.parts]
                samples += batch.size
                if readback.full:  # bounds the scalars that wait on the device
                    sums.add_all(readback.take(), sizes)
                self._check()
        sums.add_all(readback.take(), sizes)
        sums.add_up(self._ranks)
        scores = with_metrics(sums.scores(), metrics.compute())
        return replace(scores, samples=samples if is_part else None)

    def seconds_per_sample(self, batches: Batches, at_most_s: float) -> float:
        """The time of a sample, from a few batches; 0 for an empty set.

        The first batch warms up; it counts if it alone takes longer than `at_most_s`. The weights,
        buffers and random numbers of the run stay as they are.
        """
        if batches.is_empty:
            return 0.0
        readback, times, began = readback_for(batches.device), [], time.perf_counter()
        metrics = MetricPass(self._metrics, batches.device)
        # a small set is read again: its few batches may all be the warm-up
        cycle = itertools.chain.from_iterable(itertools.repeat(batches))
        with _unchanged(self._model, batches.device), torch.no_grad():
            self._model.eval()
            since = began
            for batch in itertools.islice(cycle, TRIAL_BATCHES):
                self._score(batch, readback, metrics)
                readback.take()  # waits for the device
                now = time.perf_counter()
                times.append((now - since) / max(1, batch.size))
                since = now  # not the time before the next score: reading the batch counts
                self._check()
                if self._is_late(began + at_most_s):
                    break
        return statistics.median(times[1:] or times)  # without the warm-up, if there is more

    def _is_late(self, until: float) -> bool:
        """Whether any process has reached a reading of `time.perf_counter`."""
        if math.isinf(until):
            return False
        return self._ranks.any(time.perf_counter() >= until)

    def _score(self, batch: Batch, readback: MetricReadback, metrics: MetricPass) -> Batch:
        """Score this process's part of a batch, and return it; it is empty if there is none."""
        (part,) = batch.parts
        # also for a part that only fills up: a forward pass of shards needs all processes
        output = self._precision.forward(self._forward, part.inputs)
        own = batch.without_idle
        if own.parts:
            loss = self._precision.loss(self._loss, output, part.content)
            correct = count_correct(self._recipe, [output], own)
            readback.put(Scalars(loss, correct, parts=self._loss.take_parts()))
            metrics.add([output], own)
        return own


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """At the end, restore PyTorch's random numbers and the model's buffers.

    A forward pass in evaluation mode seldom changes them, but a model's own code may.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with devices.random_numbers_kept([device]):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
