"""The summary of an observed training: what is known of it without a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mprun import __version__
from mprun._torch import is_compiled, original_module
from mprun.doctor import environment
from mprun.doctor.heap import allocator
from mprun.integrations.observed_precision import device_of
from mprun.records.run_config import variant_hash
from mprun.records.run_record import (
    SCHEMA_VERSION,
    BackendRow,
    BatchRow,
    DataRow,
    DataTimes,
    LossScaleRow,
    Memory,
    Metric,
    PrecisionRow,
    Scores,
    StepTimes,
    Summary,
    TrainScore,
)

SOURCE = "observed"
"""The data source of a loop that mprun does not own."""


def memory_row(totals: Mapping[str, int]) -> Memory:
    """Bytes by category; None for those not in `totals`."""
    parts = ("peak", "parameters", "buffers", "gradients", "optimizer_state", "activations")
    row: dict[str, int | None] = {part: totals.get(part) for part in (*parts, "temporary")}
    return Memory(data=0, allocator_peak=None, **row)


def first_summary(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    row: PrecisionRow,
    mode: str,
    name: str | None,
    seed: int,
    metric: Metric,
) -> Summary:
    """The summary before the first step; see `mprun.observe`."""
    return Summary(
        schema_version=SCHEMA_VERSION,
        status="running",
        error=None,
        started_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        mprun_version=__version__,
        git_commit=environment.git_commit(),
        versions=environment.versions(),
        hardware=environment.hardware(device_of(model), []),
        recipe=class_name(model),
        seed=seed,
        precision=mode,
        variant=name or mode,
        variant_hash="",
        requested=row,
        effective=row,
        execution="native",
        substitutions=[],
        backend=BackendRow(
            memory_format=_memory_format(model),
            optimizer_impl=_implementation(optimizers[0]),
            compile=any(map(is_compiled, model.modules())),
            threads=torch.get_num_threads(),
            allocator=allocator(),
        ),
        data=DataRow(
            name=SOURCE,
            source=SOURCE,
            train_samples=None,
            validation_samples=None,
            test_samples=None,
        ),
        batch=BatchRow(micro=0, accumulate=1, effective=0, base=0, lr_rule="none"),
        batch_size=0,
        epochs=0,
        steps=0,
        skipped_steps=0,
        step_time_ms=StepTimes(median=None, p10=None, p90=None, n=0, warmup=0),
        data_time_ms=DataTimes(median=None, p90=None),
        samples_per_second=None,
        wall_time_s=0.0,
        memory_bytes=memory_row({}),
        loss_scale=LossScaleRow(kind="none", initial=1.0, final=1.0),
        metric=metric,
        history=[],
        train=TrainScore(loss=None),
        test=Scores(loss=None, accuracy=None),
        observed=True,
    )


def configuration(
    model: nn.Module, optimizers: Sequence[Optimizer], summary: Summary
) -> dict[str, Any]:
    """What tells one variant of a loop from another, as config.yaml has it."""
    options = [_options(optimizer) for optimizer in optimizers]
    several = {str(n): row for n, row in enumerate(options)}
    return {
        "observed": {
            "name": summary.variant,
            "model": class_name(model),
            "parameters": sum(p.numel() for p in model.parameters()),
        },
        "precision": {"name": summary.precision, **asdict(summary.effective)},
        "optimizer": options[0] if len(options) == 1 else several,
        "batch": asdict(summary.batch),
        "compile": summary.backend.compile,
        "seed": summary.seed,
    }


def set_variant(summary: Summary, config: Mapping[str, Any]) -> None:
    """Set the hash of the variant."""
    summary.variant_hash = variant_hash(config)


def _options(optimizer: Optimizer) -> dict[str, Any]:
    """Class and plain options; the learning rate is the first one's, before any schedule."""
    group = optimizer.param_groups[0]
    plain = {
        key: value
        for key, value in group.items()
        if isinstance(value, int | float | str) and key not in ("lr", "attempts", "seed")
    }
    return {"name": class_name(optimizer), "lr": _first_lr(group), **plain}


def _first_lr(group: Mapping[str, Any]) -> float:
    return float(group.get("initial_lr", group.get("lr", 0.0)))


def class_name(x: object) -> str:
    """The class, without wrappers that `torch.compile` makes."""
    return type(original_module(x) if isinstance(x, nn.Module) else x).__name__


def _memory_format(model: nn.Module) -> str:
    images = [p for p in model.parameters() if p.dim() == 4]
    last = torch.channels_last
    wide = [p for p in images if not p.is_contiguous() and p.is_contiguous(memory_format=last)]
    return "channels_last" if wide else "contiguous"


def _implementation(optimizer: Optimizer) -> str:
    group = optimizer.param_groups[0]
    if type(optimizer).__module__.startswith("mprun."):
        return "mprun"
    return "fused" if group.get("fused") else "foreach" if group.get("foreach") else "default"
