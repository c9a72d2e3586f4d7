"""`mprun diff`: the checkpoints of two runs as sides, each in its mode, on the same batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor, nn

from mprun.config import compose
from mprun.config.reference import quoted
from mprun.errors import MprunError, RunFailedError, UsageError
from mprun.inspect.divergence.side_by_side import (
    Captured,
    Difference,
    SharedStep,
    Side,
    capture,
    compare,
)
from mprun.inspect.rounding_oracle import relative_rms
from mprun.precision import Precision
from mprun.precision.nested import all_tensors, map_tensors
from mprun.precision.policy import torch_dtype
from mprun.precision.products import LOW
from mprun.records.console.fitted_table import FittedTable
from mprun.records.files import json_text
from mprun.records.reader import read_json
from mprun.records.result import Result
from mprun.study.planned_run import plan_or_resume
from mprun.train.assemble import Plan
from mprun.train.assemble.parts import build_model, build_precision, first_samples
from mprun.train.loss_terms import LossTerms
from mprun.train.machine import machine
from mprun.train.user_code import described

SCHEMA_VERSION = 1
MAX_ERROR = 1e99  # Written for an error without a finite size: JSON has no infinity
MAX_SAMPLES = 64  # Of the batch: each module runs four times, in float64 too
SHOWN = 5  # Weights furthest apart that are shown; diff.json has all


@dataclass(frozen=True, kw_only=True)
class CaptureRecord(Captured):
    """The content of a file of `--save`."""

    schema_version: int
    recipe: str
    data: str
    data_source: str
    precision: str
    step: int  # Of the checkpoint
    device: str
    hardware: str
    versions: dict[str, str | None]
    weights_sha256: str
    batch_sha256: str


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
        model.load_state_dict(state["model"])
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
        device=plan.device.type,
        hardware=machine.hardware(plan.device, []).name,
        versions=machine.versions(),
        weights_sha256=_sha256(run.model.state_dict().values()),
        batch_sha256=_sha256(all_tensors(batch)),
        **vars(side),
    )


def saved_side(path: Path, name: str) -> Result:
    """One side of a comparison, as a file of this name.

    Raises:
        UsageError: `path` is no run with a checkpoint.
        RunFailedError: its step raises an error.
    """
    record = _bounded(msgspec.to_builtins(capture_run(load_run(path))))
    return Result(record, files={name: json_text(record)})


def _bounded(value: Any) -> Any:
    """Plain values in which numbers that are not finite are the largest one."""
    if isinstance(value, dict):
        return {k: _bounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_bounded(v) for v in value]
    if isinstance(value, float) and not abs(value) < MAX_ERROR:
        return MAX_ERROR
    return value


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


def diff_paths(a: Path, b: Path) -> Result:
    """Where two runs, or saved sides, part; `diff.json` has all rows.

    Raises:
        UsageError: one is neither, or they are of other recipes, data or batches.
        RunFailedError: a step raises an error.
    """
    runs = [load_run(path) if path.is_dir() else None for path in (a, b)]
    sides = [
        read_capture(path) if run is None else capture_run(run)
        for path, run in zip((a, b), runs, strict=True)
    ]
    difference, weights = diff_captures(*sides), _weight_differences(*runs)
    parts: list[FittedTable | str] = [
        f"{name}: {path} ({side.precision}, step {side.step})"
        for name, path, side in zip("ab", (a, b), sides, strict=True)
    ]
    if weights:
        parts.append("weights furthest apart (rms of the difference over rms of a):")
    parts += [f"  {name}  {relative:.1e}" for name, relative in weights[:SHOWN]]
    rows = [
        {**vars(row), "a": vars(row.a), "b": vars(row.b), "explained": row.is_explained}
        for row in difference.rows
    ]
    content = {
        "sides": [str(a), str(b)],
        "weights": [{"name": name, "relative": relative} for name, relative in weights],
        "schema_version": SCHEMA_VERSION,
        "losses": difference.losses,
        "rows": rows,
        "first": None if difference.first is None else difference.first.module,
        "notes": difference.notes,
    }
    record = _bounded(content)
    return Result(record, [*parts, *difference.parts()], {"diff.json": json_text(record)})


def _weight_differences(a: LoadedRun | None, b: LoadedRun | None) -> list[tuple[str, float]]:
    """The parameters that both have, by the rms of their difference over that of the first."""
    if a is None or b is None:
        return []
    others = dict(b.model.named_parameters())
    rows = [
        (name, relative_rms(others[name].detach().cpu(), p.detach().cpu()))
        for name, p in a.model.named_parameters()
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
