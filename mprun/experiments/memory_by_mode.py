"""The memory of a step in several modes, side by side: what `memory.json` holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mprun.assemble import Plan, step_memory, with_batch_size
from mprun.config.sizes import parse_size
from mprun.doctor.environment import versions
from mprun.errors import RunFailedError, first_line
from mprun.numerics.fault import DtypeMismatchError
from mprun.numerics.fit import largest
from mprun.numerics.step_memory import StepMemory
from mprun.records.published_figures import MEMORY_OF_HALF_SR

SCHEMA_VERSION = 1

PUBLISHED = {
    "recipe": MEMORY_OF_HALF_SR.recipe,
    "precision": MEMORY_OF_HALF_SR.precisions[0],
    "against": "fp32",
    "batch_size": MEMORY_OF_HALF_SR.batch_size,
    "ratio": MEMORY_OF_HALF_SR.value,
    "source": f"{MEMORY_OF_HALF_SR.source}, on an {MEMORY_OF_HALF_SR.hardware}",
}
"""What others measured for a step of a recipe."""

CHANGED = ("recipe.model", "train.optimizer", "train.accumulate", "batch", "precision.", "preset")
"""How keys begin that make a step another than the published one."""

T = TypeVar("T")


def side_by_side(
    plans: Sequence[tuple[str, Plan]], given: Sequence[str] = (), limit: str | None = None
) -> dict[str, Any]:
    """Count a step of each plan and compare it with the first.

    Args:
        plans: label and plan, made with `load_shapes`; the others are set against the first.
        given: keys the user set.
        limit: what the largest batch is to fit in, as `parse_size` takes it, or None.

    Raises:
        UsageError: `limit` is no amount of memory.
        RunFailedError: a model's code does not run on fake tensors.
    """
    limit_bytes = None if limit is None else parse_size(limit, "memory.fits")
    modes = [_mode(label, chosen, limit_bytes) for label, chosen in plans]
    for mode in modes:
        mode["ratio"] = _ratio(mode, modes[0], lambda m: m["bytes"]["peak"])
        if limit is not None:
            mode["fits"]["ratio"] = _ratio(mode, modes[0], lambda m: m["fits"]["batch_size"])
    first = plans[0][1]
    return {
        "schema_version": SCHEMA_VERSION,
        "recipe": first.config.recipe.name,
        "device": first.device.type,
        "versions": versions(),
        "against": modes[0]["label"],
        "limit": limit,
        "limit_bytes": limit_bytes,
        "published": _published(plans, modes, given),
        "modes": modes,
    }


def _mode(label: str, chosen: Plan, limit: int | None) -> dict[str, Any]:
    """A mode's part, but for what compares it with the first."""
    return {
        "label": label,
        "precision": chosen.policy.name,
        "policy": {
            **chosen.policy.columns(),
            "op_lists": chosen.config.op_lists.name,
            "layers": chosen.layers,
        },
        "batch": chosen.batch,
        "optimizer": {
            "name": chosen.config.train.optimizer.name.name,
            "impl": chosen.speed.optimizer_impl,
        },
        "memory_format": chosen.speed.memory_format,
        **_counted(label, chosen).as_dict(),
        "fits": None if limit is None else _fit(label, chosen, limit),
    }


def _counted(label: str, chosen: Plan) -> StepMemory:
    try:
        return step_memory(chosen)
    except DtypeMismatchError as error:
        raise RunFailedError(f"a step of {label} cannot run: {error}") from error
    except Exception as error:  # the model is the user's: it may look at values, or refuse a batch
        raise RunFailedError(
            f"a step of {label} with {chosen.batch.micro} samples cannot be planned on fake "
            f"tensors, which have no values: {type(error).__name__}: {first_line(error)}"
        ) from error


def _fit(label: str, chosen: Plan, limit: int) -> dict[str, Any]:
    def peak(size: int) -> int:
        return _counted(label, with_batch_size(chosen, size)).peak_bytes

    fit = largest(peak, limit, chosen.batch.base)
    return {
        "batch_size": fit.size,
        "peak_bytes": fit.tried.get(fit.size),
        "next_peak_bytes": fit.tried.get(fit.size + 1),
        "tried": {str(size): fit.tried[size] for size in sorted(fit.tried)},
        "grows": fit.grows,
    }


def _ratio(mode: T, first: T, figure: Callable[[T], int]) -> float | None:
    return figure(mode) / figure(first) if figure(first) else None


def _published(
    plans: Sequence[tuple[str, Plan]], modes: Sequence[dict[str, Any]], given: Sequence[str]
) -> dict[str, Any] | None:
    """The published figure beside ours, where the published step is among them."""
    if modes[0]["precision"] != PUBLISHED["against"] or any(k.startswith(CHANGED) for k in given):
        return None
    for (_, chosen), mode in zip(plans, modes, strict=True):
        have = (chosen.config.recipe.name, mode["precision"], mode["batch"]["effective"])
        if have == (PUBLISHED["recipe"], PUBLISHED["precision"], PUBLISHED["batch_size"]):
            return {**PUBLISHED, "ratio_here": mode["ratio"]}
    return None
