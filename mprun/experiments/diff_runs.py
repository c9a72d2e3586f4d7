"""Two runs of one recipe side by side: their checkpoints, each in its mode, on the same batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mprun.assemble import Plan
from mprun.assemble.parts import build_batches, build_model
from mprun.assemble.precision_parts import build_precision
from mprun.config import compose
from mprun.config.plain_text import quoted
from mprun.errors import MprunError, RunFailedError, UsageError
from mprun.experiments.planned_run import plan_or_resume
from mprun.numerics.divergence import Difference, Side
from mprun.numerics.divergence.ops import relative_rms
from mprun.numerics.divergence.side_by_side import diff_sides
from mprun.numerics.divergence.sides import SharedStep
from mprun.precision import Precision
from mprun.precision.policy import torch_dtype
from mprun.train.loss_terms import LossTerms
from mprun.train.user_code import described

MOST_SAMPLES = 64


@dataclass(frozen=True)
class LoadedRun:
    """A run's model with the weights of its last checkpoint."""

    path: Path
    plan: Plan
    model: nn.Module
    precision: Precision
    step: int

    @property
    def side(self) -> Side:
        """The model in the run's mode."""
        policy = self.plan.policy
        low = torch_dtype(policy.compute_dtype) if policy.casts else None
        return Side(self.model, region=self.precision.region, low=low)


class WeightDifference(NamedTuple):
    """How far a parameter of one run is from the other's."""

    name: str
    relative: float
    """The rms of the difference, over the rms of the first run's values."""


@dataclass(frozen=True)
class RunDifference:
    """Two runs side by side."""

    weights: tuple[WeightDifference, ...]
    """The largest difference first."""
    difference: Difference


def load_run(path: Path) -> LoadedRun:
    """The model of a run.

    Raises:
        UsageError: it is no run of mprun, has no checkpoint, or its recipe cannot be loaded.
    """
    composed = compose([f"run.resume={quoted(str(path))}"])
    plan, saved = plan_or_resume(composed)
    if saved is None:
        raise UsageError(f"{path} has no checkpoint: train it with train.checkpoint_every_steps")
    precision = build_precision(plan)
    model, _ = build_model(plan, precision)
    state = saved["trainer"]
    try:
        model.load_state_dict(state["model"])
    except (RuntimeError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: its checkpoint does not fit its recipe: {described(error)}"
        ) from None
    return LoadedRun(path, plan, model, precision, int(state["step"]))


def diff_runs(first: Path, second: Path) -> RunDifference:
    """Where two runs of the same recipe part.

    Raises:
        UsageError: one of them cannot be loaded, or they differ in recipe or data.
        RunFailedError: a step raises an error.
    """
    a, b = load_run(first), load_run(second)
    for what, x, y in (
        ("recipe", a.plan.config.recipe.name, b.plan.config.recipe.name),
        ("data", a.plan.splits.name, b.plan.splits.name),
        ("data source", a.plan.splits.source, b.plan.splits.source),
    ):
        if x != y:
            raise UsageError(f"the runs differ in their {what}: {x} and {y}; name runs of one")
    try:
        with a.plan.backend_flags():
            return RunDifference(
                tuple(weight_differences(a.model, b.model)),
                diff_sides(_step_of(a.plan), a.side, b.side),
            )
    except MprunError:
        raise
    except Exception as error:
        raise RunFailedError(f"the models' step fails: {described(error)}") from error


def _step_of(plan: Plan) -> SharedStep:
    """The first samples of the training data, in the stored order."""
    size = min(plan.config.train.batch_size or MOST_SAMPLES, MOST_SAMPLES)
    batches, _ = build_batches(plan, plan.splits.train, size, size, shuffle=False)
    with closing(iter(batches)) as stream:
        (part, *_) = next(stream).parts
    loss = LossTerms(plan.recipe)

    def loss_of(output: object) -> Tensor:
        return loss(output, part.content)

    return SharedStep(partial(_forward, plan), part.inputs, loss_of)


def _forward(plan: Plan, model: nn.Module, inputs: object) -> object:
    return plan.recipe.forward(model, inputs)


def weight_differences(a: nn.Module, b: nn.Module) -> Iterator[WeightDifference]:
    """The parameters that both have, the furthest apart first."""
    others = dict(b.named_parameters())
    rows = [
        WeightDifference(name, relative_rms(others[name].detach().cpu(), p.detach().cpu()))
        for name, p in a.named_parameters()
        if name in others and others[name].shape == p.shape
    ]
    yield from sorted(rows, key=lambda row: -row.relative)


def content(result: RunDifference, first: Path, second: Path) -> dict[str, object]:
    """Plain values for JSON."""
    difference = result.difference
    return {
        "schema_version": 1,
        "runs": [str(first), str(second)],
        "torch": str(torch.__version__),
        "losses": list(difference.losses),
        "weights": [row._asdict() for row in result.weights],
        "rows": [
            {**vars(row), "a": vars(row.a), "b": vars(row.b), "explained": row.is_explained}
            for row in difference.rows
        ],
        "first": None if difference.first is None else difference.first.module,
        "notes": list(difference.notes),
    }
