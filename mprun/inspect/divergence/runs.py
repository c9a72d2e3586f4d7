"""Runs as sides of a comparison: their checkpoints, each in its mode, on the same batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mprun.config import compose
from mprun.config.reference import quoted
from mprun.errors import MprunError, RunFailedError, UsageError
from mprun.inspect.divergence.boundaries import relative_rms
from mprun.inspect.divergence.difference import SCHEMA_VERSION, CaptureRecord, Difference
from mprun.inspect.divergence.side_by_side import SharedStep, Side, capture, compare
from mprun.precision import Precision
from mprun.precision.nested import all_tensors, map_tensors
from mprun.precision.policy import torch_dtype
from mprun.precision.products import LOW
from mprun.records.reader import read_json
from mprun.study.planned_run import plan_or_resume
from mprun.train import checkpoint
from mprun.train.assemble import Plan
from mprun.train.assemble.parts import build_model, build_precision, first_samples
from mprun.train.loss_terms import LossTerms
from mprun.train.machine import machine
from mprun.train.user_code import described

MAX_SAMPLES = 64  # Of the batch: each module runs four times, in float64 too


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


def load_run(path: Path) -> LoadedRun:
    """The model of a run.

    Raises:
        UsageError: it is no run of mprun, has no checkpoint, or its recipe cannot be loaded.
    """
    # the run's own configuration, as if it went on
    composed = compose([f"run.resume={quoted(str(path))}"])
    plan, saved = plan_or_resume(composed)
    if saved is None:
        raise UsageError(f"{path} has no checkpoint: train it with train.checkpoint_every_steps")
    precision = build_precision(plan)
    model, _ = build_model(plan, precision)
    state = saved["trainer"]
    try:
        model.load_state_dict(checkpoint.weights(saved, checkpoint.path_in(path)))
    except (RuntimeError, KeyError, TypeError) as error:
        reason = described(error)
        raise UsageError(f"{path}: its checkpoint does not fit its recipe: {reason}") from None
    return LoadedRun(path, plan, model, precision, int(state["step"]))


def capture_run(run: LoadedRun) -> CaptureRecord:
    """Each module's own errors in a run's model, in its mode, on the first training samples.

    Raises:
        RunFailedError: its step raises an error.
    """
    plan = run.plan
    try:
        with plan.backend_flags():  # TF32, deterministic kernels: as in the run
            batch, step = _step_of(plan)
            side = capture(step, run.side)
    except MprunError:
        raise
    except Exception as error:
        raise RunFailedError(f"{run.path}: the step fails: {described(error)}") from error
    return CaptureRecord(
        schema_version=SCHEMA_VERSION,
        recipe=plan.config.recipe.name,
        data=plan.splits.name,
        data_source=plan.splits.source,
        precision=plan.policy.name,
        step=run.step,
        loss=side.loss,
        device=plan.device.type,
        hardware=machine.hardware(plan.device, []).name,
        versions=machine.versions(),
        weights_sha256=_sha256(run.model.state_dict().values()),
        batch_sha256=_sha256(all_tensors(batch)),
        compiled=side.compiled,
        calls=side.calls,
        ops=side.ops,
    )


def read_capture(path: Path) -> CaptureRecord:
    """A capture from its file.

    Raises:
        UsageError: it cannot be read, or is damaged.
    """
    try:
        return read_json(path, CaptureRecord, SCHEMA_VERSION)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def diff_captures(a: CaptureRecord, b: CaptureRecord) -> Difference:
    """Where two sides part.

    Raises:
        UsageError: they are of other recipes, data or batches.
    """
    for what, x, y in (
        ("recipe", a.recipe, b.recipe),
        ("data", a.data, b.data),
        ("data source", a.data_source, b.data_source),
        ("batch (SHA-256)", a.batch_sha256[:12], b.batch_sha256[:12]),
    ):
        if x != y:
            raise UsageError(f"the sides differ in their {what}: {x} and {y}; name two of one kind")
    return compare(a, b, tuple(_circumstances(a, b)))


def _circumstances(a: CaptureRecord, b: CaptureRecord) -> Iterator[str]:
    if a.weights_sha256 != b.weights_sha256:
        yield "the weights differ: losses and inherited errors are those of two models"
    if a.hardware != b.hardware:
        yield f"hardware: {a.hardware} and {b.hardware}"
    for name in sorted({*a.versions, *b.versions}):
        if a.versions.get(name) != b.versions.get(name):
            yield f"{name}: {a.versions.get(name)} and {b.versions.get(name)}"


def weight_differences(a: nn.Module, b: nn.Module) -> list[tuple[str, float]]:
    """The parameters that both have, by the rms of their difference over that of the first."""
    others = dict(b.named_parameters())
    rows = [
        (name, relative_rms(others[name].detach().cpu(), p.detach().cpu()))
        for name, p in a.named_parameters()
        if name in others and others[name].shape == p.shape
    ]
    return sorted(rows, key=lambda row: -row[1])


def _step_of(plan: Plan) -> tuple[Any, SharedStep]:
    """The first samples of the training data, in the stored order, and the step on them."""
    part = first_samples(plan, MAX_SAMPLES)
    loss = LossTerms(plan.recipe)

    def loss_of(output: object) -> Tensor:
        # As a mixed mode hands it on; mse_loss of PyTorch 2.11 has no gradient for two dtypes.
        wide = map_tensors(lambda x: x.float() if x.dtype in LOW else x, output)
        return loss(wide, part.content)

    return part.content, SharedStep(plan.recipe.forward, part.inputs, loss_of)


def _sha256(tensors: Iterable[Tensor]) -> str:
    """Of the tensors' float64 values, so that a float16 and a float32 of the same value agree."""
    digest = hashlib.sha256()
    for x in tensors:
        wide = x.detach().cpu().double() if x.is_floating_point() else x.detach().cpu()
        digest.update(wide.contiguous().numpy().tobytes())
    return digest.hexdigest()
