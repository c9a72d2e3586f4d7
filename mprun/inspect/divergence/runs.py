"""`mprun diff`: the checkpoints of two runs as sides, each in its mode, on the same batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    compare_sides,
)
from mprun.inspect.rounding_oracle import relative_rms
from mprun.precision import Precision
from mprun.precision.nested import all_tensors, copied_model, map_tensors
from mprun.precision.policy import torch_dtype
from mprun.precision.products import LOW
from mprun.records.files import json_text
from mprun.records.reader import read_json
from mprun.records.result import Result
from mprun.study.planned_run import plan_or_resume
from mprun.train.assemble import Plan
from mprun.train.assemble.parts import (
    build_model,
    build_precision,
    compiled_model,
    first_samples,
)
from mprun.train.data import MicroBatch
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


def captured(path: Path) -> tuple[CaptureRecord, nn.Module | None]:
    """A side: that of a run's last checkpoint, with its model, or one that was saved in a file.

    Raises:
        UsageError: it is neither, or its recipe cannot be loaded.
        RunFailedError: its step raises an error.
    """
    if path.is_dir():
        return _captured_run(path)
    try:
        return read_json(path, CaptureRecord, SCHEMA_VERSION), None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _loaded(path: Path) -> tuple[Plan, nn.Module, Precision, int]:
    """A run's model with the weights of its last checkpoint, and the step of that."""
    # the run's own configuration, as if it went on
    plan, saved = plan_or_resume(compose([f"run.resume={quoted(str(path))}"]))
    if saved is None:
        raise UsageError(f"{path} has no checkpoint: train it with train.checkpoint_every_steps")
    precision = build_precision(plan)
    model, _ = build_model(plan, precision)
    try:
        model.load_state_dict(saved["trainer"]["model"])
    except (RuntimeError, KeyError, TypeError) as error:
        reason = described(error)
        raise UsageError(f"{path}: its checkpoint does not fit its recipe: {reason}") from None
    return plan, model, precision, int(saved["trainer"]["step"])


def _captured_run(path: Path) -> tuple[CaptureRecord, nn.Module]:
    """A run's errors in its mode, on the first training samples."""
    plan, model, precision, step = _loaded(path)
    with _as_in_the_run(path, plan):
        part = first_samples(plan, MAX_SAMPLES)
        side = capture_in_mode(plan, model, precision, part, _widened)
    record = CaptureRecord(
        schema_version=SCHEMA_VERSION,
        recipe=plan.config.recipe.name,
        data=plan.splits.name,
        data_source=plan.splits.source,
        precision=plan.policy.name,
        step=step,
        device=plan.device.type,
        hardware=machine.hardware(plan.device, []).name,
        versions=machine.versions(),
        weights_sha256=_sha256(model.state_dict().values()),
        batch_sha256=_sha256(all_tensors(part.content)),
        **vars(side),
    )
    return record, model


@contextmanager
def _as_in_the_run(path: Path, plan: Plan) -> Iterator[None]:
    """Inside a step is taken: with TF32 or deterministic kernels, as in the run."""
    try:
        with plan.backend_flags():
            yield
    except MprunError:
        raise
    except Exception as error:
        raise RunFailedError(f"{path}: the step fails: {described(error)}") from error


def capture_in_mode(
    plan: Plan,
    model: nn.Module,
    precision: Precision,
    part: MicroBatch,
    handed_on: Callable[[object], object],
    scale: float = 1.0,
    passes: int = 1,
) -> Captured:
    """Each module's own errors in a plan's mode; `handed_on`: the output as the loss gets it."""
    side, step = _in_mode(plan, model, precision), _step(plan, part, handed_on, scale)
    return capture(step, side, passes=passes)


def _in_mode(plan: Plan, model: nn.Module, precision: Precision) -> Side:
    low = torch_dtype(plan.policy.compute_dtype) if plan.policy.casts else None
    return Side(model, region=precision.region, low=low)


def _step(
    plan: Plan, part: MicroBatch, handed_on: Callable[[object], object], scale: float = 1.0
) -> SharedStep:
    loss = LossTerms(plan.recipe)
    return SharedStep(
        plan.recipe.forward, part.inputs, lambda x: loss(handed_on(x), part.content) * scale
    )


def _widened(output: object) -> object:
    """As a mixed mode hands it on; mse_loss of PyTorch 2.11 has no gradient for two dtypes."""
    return map_tensors(lambda x: x.float() if x.dtype in LOW else x, output)


def _sha256(tensors: Iterable[Tensor]) -> str:
    """Of the tensors' float64 values, so that a float16 and a float32 of the same value agree."""
    digest = hashlib.sha256()
    for x in tensors:
        wide = x.detach().cpu().double() if x.is_floating_point() else x.detach().cpu()
        digest.update(wide.contiguous().numpy().tobytes())
    return digest.hexdigest()


def saved_side(path: Path, name: str) -> Result:
    """One side of a comparison, as a file of this name; errors are those of `captured`."""
    record = _bounded(msgspec.to_builtins(captured(path)[0]))
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
    notes = []
    if a.weights_sha256 != b.weights_sha256:
        notes.append("the weights differ: losses and inherited errors are those of two models")
    here, there = ({"hardware": x.hardware, **x.versions} for x in (a, b))
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            notes.append(f"{name}: {here.get(name)} and {there.get(name)}")
    return compare(a, b, notes)


def diff_paths(a: Path, b: Path) -> Result:
    """Where two runs, or saved sides, part; `diff.json` has all rows.

    Raises:
        UsageError: one is neither, or they are of other recipes, data or batches.
        RunFailedError: a step raises an error.
    """
    (first, model), (second, other) = captured(a), captured(b)
    difference = diff_captures(first, second)
    weights = [] if model is None or other is None else _weight_differences(model, other)
    heads = [
        f"{name}: {path} ({side.precision}, step {side.step})"
        for name, path, side in (("a", a, first), ("b", b, second))
    ]
    if weights:
        heads.append("weights furthest apart (rms of the difference over rms of a):")
    heads += [f"  {name}  {relative:.1e}" for name, relative in weights[:SHOWN]]
    return _result(difference, [str(a), str(b)], heads, weights)


def diff_compiled(path: Path) -> Result:
    """Where the compiled step of a run's last checkpoint leaves the eager one.

    Raises:
        UsageError: its mode is not compiled here, or it is no run with a checkpoint.
        RunFailedError: the step raises an error.
    """
    plan, model, precision, step = _loaded(path)
    if plan.why_not_compiled is not None:
        mode, reason = plan.policy.name, plan.why_not_compiled
        raise UsageError(f"{path} cannot be compiled in {mode}: {reason}; legal: a run without it")
    with _as_in_the_run(path, plan):
        part = first_samples(plan, MAX_SAMPLES)
        eager = _in_mode(plan, model, precision)
        compiled = replace(eager, model=compiled_model(model))
        twin = copied_model(model).double()
        difference = compare_sides(_step(plan, part, _widened), (eager, compiled), twin)
    heads = [f"{x}: {path} ({plan.policy.name}, step {step})" for x in ("a, eager", "b, compiled")]
    return _result(difference, [str(path), f"{path} compiled"], heads)


def _result(
    difference: Difference,
    sides: list[str],
    heads: list[str],
    weights: Sequence[tuple[str, float]] = (),
) -> Result:
    """The result of a comparison, with `diff.json`; `heads`: the first lines."""
    rows = [
        {**vars(row), "a": vars(row.a), "b": vars(row.b), "explained": row.is_explained}
        for row in difference.rows
    ]
    content = {
        "sides": sides,
        "weights": [{"name": name, "relative": relative} for name, relative in weights],
        "schema_version": SCHEMA_VERSION,
        "losses": difference.losses,
        "rows": rows,
        "first": None if difference.first is None else difference.first.module,
        "notes": difference.notes,
        "accuracy": difference.accuracy,
    }
    record = _bounded(content)
    return Result(record, [*heads, *difference.parts()], {"diff.json": json_text(record)})


def _weight_differences(a: nn.Module, b: nn.Module) -> list[tuple[str, float]]:
    """The parameters that both have, by the rms of their difference over that of the first."""
    others = dict(b.named_parameters())
    rows = [
        (name, relative_rms(others[name].detach().cpu(), p.detach().cpu()))
        for name, p in a.named_parameters()
        if name in others and others[name].shape == p.shape
    ]
    return sorted(rows, key=lambda row: -row[1])
