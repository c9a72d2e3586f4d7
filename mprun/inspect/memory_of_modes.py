"""Counts the memory of a step in several modes, for `mprun memory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mprun.config import Composed, compose
from mprun.config.compose import parse
from mprun.config.multirun import combinations
from mprun.config.settings import parse_size, with_every_mode
from mprun.errors import MprunError, RunFailedError, UsageError
from mprun.inspect.memory import (
    SCHEMA_VERSION,
    LargestBatch,
    MemoryRecord,
    MemorySettings,
    ModeMemory,
    OptimizerChoice,
    PublishedMemory,
    memory_parts,
)
from mprun.inspect.question import Given, Prepared
from mprun.records.console import ReportPart, report_nothing
from mprun.records.files import json_text
from mprun.records.published_figures import MEMORY_OF_HALF_SR, RATIO_OF_HALF_SR
from mprun.records.result import Result
from mprun.records.run_record import BatchRow
from mprun.study.double import largest_size
from mprun.study.planned_run import unused_fields
from mprun.train.assemble import (
    Plan,
    load_shapes,
    make_plan,
    same_step,
    step_memory,
    with_batch_size,
)
from mprun.train.assemble.optimizer import optimizer_name
from mprun.train.assemble.parts import variant_label
from mprun.train.machine.machine import versions
from mprun.train.user_code import described
from mprun.watch.memory_recorder import DtypeMismatchError, StepMemory

AGAINST = "fp32"  # The mode to compare a single one with; the published figure is relative to it

# First parts of keys that change the published step
CHANGED = ("recipe.model", "train.optimizer", "train.accumulate", "batch", "precision.", "preset")


def _record(planned: PlannedModes, settings: MemorySettings, report: ReportPart) -> MemoryRecord:
    """Count a step of each mode and compare it with the first.

    Where modes may be left out, one whose step cannot be counted is one of them.
    """
    limit = settings.fits
    limit_bytes = None if limit is None else parse_size(limit, "memory.fits")
    counted: list[tuple[PlannedMode, ModeMemory]] = []
    missing = dict(planned.left_out or {})
    for done, mode in enumerate(planned.modes):
        report(f"memory of {mode.label}", done, len(planned.modes))
        try:
            counted.append((mode, _mode(mode, counted, limit_bytes)))
        except RunFailedError as error:
            # modes that the user named must all be counted; of `precision=all`, at least one
            if planned.left_out is None or (done + 1 == len(planned.modes) and not counted):
                raise
            missing[mode.label] = str(error)
    modes = [_compared(memory, counted[0][1]) for _, memory in counted]
    first = planned.modes[0].plan
    all_counted = len(modes) == len(planned.modes)  # they are zipped below
    return MemoryRecord(
        schema_version=SCHEMA_VERSION,
        recipe=first.config.recipe.name,
        device=first.device.type,
        versions=versions(),
        against=modes[0].label,
        limit=limit,
        limit_bytes=limit_bytes,
        published=_published(planned.modes, modes) if all_counted else None,
        modes=modes,
        left_out=missing,
    )


def _mode(
    mode: PlannedMode,
    before: Sequence[tuple[PlannedMode, ModeMemory]],
    limit_bytes: int | None,
) -> ModeMemory:
    """A mode's part, without the ratios to the first mode; equal steps are counted once."""
    plan, label = mode.plan, mode.label
    config, lists = plan.config, {"op_lists": plan.config.op_lists.name, "layers": plan.layers}
    own: dict[str, Any] = {
        "label": label,
        "precision": plan.policy.name,
        "policy": {**plan.policy.columns(), **lists},
        "batch": BatchRow(**vars(plan.batch)),
        "optimizer": OptimizerChoice(
            optimizer_name(config.train.optimizer, plan.recipe), plan.speed.optimizer_impl
        ),
        "memory_format": plan.speed.memory_format,
    }
    for other, memory in before:
        if same_step(other.plan, plan):
            return replace(memory, **own, same_as=memory.same_as or memory.label)
    counted = _counted(label, plan)
    return ModeMemory(
        **own,
        bytes=counted.totals,
        peak_at=counted.peak,
        phase_peaks=counted.phase_peaks,
        modules=counted.module_rows(),
        largest=counted.largest(),
        timeline=counted.timeline_rows(),
        why_real=counted.why_real,
        fits=None if limit_bytes is None else _fit(mode, counted, limit_bytes),
    )


def _fit(mode: PlannedMode, counted: StepMemory, limit_bytes: int) -> LargestBatch:
    """The largest batch whose step fits in `limit_bytes`."""
    plan = mode.plan

    def peak(size: int) -> int:
        resized = with_batch_size(plan, size)
        if resized.batch == plan.batch and counted.why_real is None:
            return counted.peak_bytes  # the step that was counted already
        return _counted(mode.label, resized, real=False).peak_bytes

    # a sample takes a byte or more: no more than limit_bytes of them fit
    fit = largest_size(peak, limit_bytes, plan.batch.base, most=limit_bytes)
    return LargestBatch(
        batch_size=fit.size,
        peak_bytes=fit.tried.get(fit.size),
        next_peak_bytes=fit.tried.get(fit.size + 1),
        tried={str(n): peak for n, peak in sorted(fit.tried.items())},
        grows=fit.grows,
    )


def _counted(label: str, plan: Plan, real: bool = True) -> StepMemory:
    try:
        # real: a model that reads values takes a step on real tensors, for which large batches of a
        # search have no memory
        return step_memory(plan, real)
    except DtypeMismatchError as error:
        raise RunFailedError(f"a step of {label} cannot run: {error}") from error
    except MprunError:
        raise
    except Exception as error:  # a user's model may read values, or refuse a batch
        raise RunFailedError(
            f"a step of {label} with {plan.batch.micro} samples cannot be "
            f"{'taken' if real else 'planned on fake tensors, which have no values'}: "
            f"{described(error, plan.policy.name)}"
        ) from error


def _compared(mode: ModeMemory, first: ModeMemory) -> ModeMemory:
    """The mode with its ratios to the first."""
    fits = mode.fits
    if fits is not None and first.fits is not None:
        base = first.fits.batch_size
        fits = replace(fits, ratio=fits.batch_size / base if base else None)
    peak, base = mode.bytes["peak"], first.bytes["peak"]
    return replace(mode, fits=fits, ratio=peak / base if base else None)


def _published(
    planned: Sequence[PlannedMode], modes: Sequence[ModeMemory]
) -> PublishedMemory | None:
    """The published figure and ours, if the published step is among the modes."""
    figure = MEMORY_OF_HALF_SR
    given = [key for mode in planned for key in mode.composed.given]
    if modes[0].precision != AGAINST or any(key.startswith(CHANGED) for key in given):
        return None
    step = (figure.recipe, figure.precisions[0], figure.batch_size)
    for plan, mode in zip(planned, modes, strict=True):
        recipe = plan.plan.config.recipe.name
        have = (recipe, mode.precision, mode.batch.effective)
        if have == step and mode.ratio is not None:
            return PublishedMemory(
                recipe=recipe,
                precision=mode.precision,
                against=AGAINST,
                batch_size=mode.batch.effective,
                ratio=RATIO_OF_HALF_SR,
                source=f"{figure.source}, on an {figure.hardware}",
                ratio_here=mode.ratio,
            )
    return None


# ---- the modes that are planned ------------------------------------------------------------------

# First parts of keys that belong to one mode; the mode to compare with does not get them
OF_A_MODE = ("precision", "op_lists", "loss_scale", "execution")


@dataclass(frozen=True)
class PlannedMode:
    """A mode, with a plan on fake tensors."""

    composed: Composed
    plan: Plan
    label: str


@dataclass(frozen=True)
class PlannedModes:
    """Modes side by side."""

    modes: list[PlannedMode]  # The first is the one to compare with
    left_out: dict[str, str] | None
    """Modes that cannot be, with the reason; None where the user named the modes."""


def plan_modes(
    overrides: Sequence[str], config_dir: Path | None, against: str | None
) -> PlannedModes:
    """A mode for each combination of the listed values; the first is the one to compare with.

    Args:
        overrides: of a run; a list of values gives several modes, and `precision=all` every one.
        config_dir: a further folder of configs, or None.
        against: the mode to compare with; None: the first of several, else fp32.

    Raises:
        UsageError: an override is not legal, or a mode cannot be planned; with `precision=all`
            where none can.
    """
    listed_modes = with_every_mode(overrides, config_dir)  # precision=all becomes a list
    parsed = [parse(text) for text in listed_modes]
    listed = [
        n for n, o in enumerate(parsed) if o.is_sweep_override() and o.key_or_group != "precision"
    ]
    combined = combinations(parsed)
    extras = [" ".join(texts[n] for n in listed) for texts in combined]
    left_out: dict[str, str] | None = {} if listed_modes != [*overrides] else None
    modes: list[PlannedMode] = []
    errors: list[UsageError] = []
    for texts, extra in zip(combined, extras, strict=True):
        try:
            modes.append(_planned(compose(texts, config_dir), extra))
        except UsageError as error:
            if left_out is None:
                raise
            errors.append(error)
            left_out[_name(texts, extra)] = str(error)
    if not modes:
        raise errors[0]
    is_alone = len(combined) == 1 and modes[0].composed.config.precision.name != AGAINST
    if against is not None or is_alone:
        pairs = zip(combined[0], parsed, strict=True)
        shared = [text for text, o in pairs if o.key_or_group.partition(".")[0] not in OF_A_MODE]
        own = f"precision={against or AGAINST}"
        try:
            first = _planned(compose([*shared, own], config_dir), extras[0])
        except UsageError as error:
            raise error if against is None else UsageError(f"memory.against: {error}") from None
        # the mode to compare with may be among the listed ones: it is shown once
        resolved = first.composed.resolved
        modes = [first, *(mode for mode in modes if mode.composed.resolved != resolved)]
    return PlannedModes(modes, left_out)


def _name(overrides: Sequence[str], extra: str) -> str:
    """How a combination is named before it has a label."""
    mode = [text.partition("=")[2] for text in overrides if text.startswith("precision=")]
    return " ".join(filter(None, [*mode[-1:], extra]))


def _planned(composed: Composed, extra: str) -> PlannedMode:
    config = composed.config
    if config.run.resume is not None:
        raise UsageError("mprun memory plans a new run: leave out run.resume")
    # weights are not read: memory depends on shapes (`warnings_of` says so)
    config = replace(config, train=replace(config.train, init_from=None))
    planned = make_plan(config, composed.given, load=load_shapes)
    return PlannedMode(composed, planned, f"{variant_label(planned)} {extra}".rstrip())


def warnings_of(modes: Sequence[PlannedMode]) -> list[str]:
    """The warnings of all modes, each once."""
    warnings: list[str] = []
    for mode in modes:
        warnings += [*mode.plan.warnings, *unused_fields(mode.composed, "memory")]
        if mode.composed.config.train.init_from is not None:
            warnings.append(
                "train.init_from has no effect: memory depends on shapes, not on values"
            )
    return list(dict.fromkeys(warnings))


def prepare(given: Given) -> Prepared:
    """Plan the modes."""
    settings = given.settings(MemorySettings)
    if settings.fits is not None:
        parse_size(settings.fits, "memory.fits")  # raises before a folder is made
    planned = plan_modes(given.overrides, given.config_dir, settings.against)
    return Prepared(
        lambda m: memory_of_modes(planned, settings, m.report),
        composed=planned.modes[0].composed,
        warnings=warnings_of(planned.modes),
    )


def memory_of_modes(
    planned: PlannedModes, settings: MemorySettings, report: ReportPart = report_nothing
) -> Result:
    """Count a step of each mode.

    Raises:
        RunFailedError: a model's code does not run on fake tensors.
    """
    record = _record(planned, settings, report)
    files: dict[str, str | bytes] = {"memory.json": json_text(record)}
    if settings.picture:
        from mprun.inspect.measurement_plots import memory_plot  # imports matplotlib

        files |= memory_plot(record)
    return Result(record, list(memory_parts(record)), files)
