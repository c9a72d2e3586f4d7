"""The memory of a step in several modes, side by side: what `memory.json` holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import msgspec

from mprun.assemble import Plan, step_memory, with_batch_size
from mprun.config.sizes import parse_size
from mprun.doctor.environment import versions
from mprun.errors import RunFailedError, first_line
from mprun.numerics.fault import DtypeMismatchError
from mprun.numerics.fit import largest
from mprun.numerics.step_memory import StepMemory
from mprun.records.memory_record import LargestBatch, MemoryRecord, ModeMemory, PublishedMemory
from mprun.records.published_figures import MEMORY_OF_HALF_SR

SCHEMA_VERSION = 1

AGAINST = "fp32"
"""The mode that the published figure is relative to."""

CHANGED = ("recipe.model", "train.optimizer", "train.accumulate", "batch", "precision.", "preset")
"""First parts of keys that change the published step."""


def side_by_side(
    plans: Sequence[tuple[str, Plan]], given: Sequence[str] = (), limit: str | None = None
) -> MemoryRecord:
    """Count a step of each plan and compare it with the first.

    Args:
        plans: label and plan, made with `load_shapes`; the others are compared with the first.
        given: keys the user set.
        limit: what the largest batch is to fit in, as `parse_size` takes it, or None.

    Raises:
        UsageError: `limit` is no amount of memory.
        RunFailedError: a model's code does not run on fake tensors.
    """
    limit_bytes = None if limit is None else parse_size(limit, "memory.fits")
    modes = [_mode(label, plan, limit_bytes) for label, plan in plans]
    modes = [_compared(mode, modes[0]) for mode in modes]
    first = plans[0][1]
    return MemoryRecord(
        schema_version=SCHEMA_VERSION,
        recipe=first.config.recipe.name,
        device=first.device.type,
        versions=versions(),
        against=modes[0].label,
        limit=limit,
        limit_bytes=limit_bytes,
        published=_published([plan.config.recipe.name for _, plan in plans], modes, given),
        modes=modes,
    )


def _mode(label: str, plan: Plan, limit: int | None) -> ModeMemory:
    """A mode's part, without the ratios to the first mode."""
    config = plan.config
    row = {
        "label": label,
        "precision": plan.policy.name,
        "policy": {
            **plan.policy.columns(),
            "op_lists": config.op_lists.name,
            "layers": plan.layers,
        },
        "batch": asdict(plan.batch),
        "optimizer": {
            "name": config.train.optimizer.name.name,
            "impl": plan.speed.optimizer_impl,
        },
        "memory_format": plan.speed.memory_format,
        **_counted(label, plan).as_dict(),
        "fits": None if limit is None else asdict(_fit(label, plan, limit)),
    }
    return msgspec.convert(row, ModeMemory)


def _counted(label: str, plan: Plan) -> StepMemory:
    try:
        return step_memory(plan)
    except DtypeMismatchError as error:
        raise RunFailedError(f"a step of {label} cannot run: {error}") from error
    except Exception as error:  # a user's model may read values, or refuse a batch
        raise RunFailedError(
            f"a step of {label} with {plan.batch.micro} samples cannot be planned on fake "
            f"tensors, which have no values: {type(error).__name__}: {first_line(error)}"
        ) from error


def _fit(label: str, plan: Plan, limit: int) -> LargestBatch:
    def peak(size: int) -> int:
        return _counted(label, with_batch_size(plan, size)).peak_bytes

    fit = largest(peak, limit, plan.batch.base)
    return LargestBatch(
        batch_size=fit.size,
        peak_bytes=fit.tried.get(fit.size),
        next_peak_bytes=fit.tried.get(fit.size + 1),
        tried={str(size): fit.tried[size] for size in sorted(fit.tried)},
        grows=fit.grows,
    )


def _compared(mode: ModeMemory, first: ModeMemory) -> ModeMemory:
    """The mode with its ratios to the first."""
    fits = mode.fits
    if fits is not None and first.fits is not None:
        fits = replace(fits, ratio=_ratio(fits.batch_size, first.fits.batch_size))
    return replace(mode, fits=fits, ratio=_ratio(mode.bytes["peak"], first.bytes["peak"]))


def _ratio(value: int, first: int) -> float | None:
    return value / first if first else None


def _published(
    recipes: Sequence[str], modes: Sequence[ModeMemory], given: Sequence[str]
) -> PublishedMemory | None:
    """The published figure beside ours, if the published step is among the modes."""
    figure = MEMORY_OF_HALF_SR
    if modes[0].precision != AGAINST or any(key.startswith(CHANGED) for key in given):
        return None
    for recipe, mode in zip(recipes, modes, strict=True):
        have = (recipe, mode.precision, mode.batch.effective)
        step = (figure.recipe, figure.precisions[0], figure.batch_size)
        if have == step and figure.value is not None and mode.ratio is not None:
            return PublishedMemory(
                recipe=recipe,
                precision=mode.precision,
                against=AGAINST,
                batch_size=mode.batch.effective,
                ratio=figure.value,
                source=f"{figure.source}, on an {figure.hardware}",
                ratio_here=mode.ratio,
            )
    return None
