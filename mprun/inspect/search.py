"""A search for what must stay in a higher precision.

1  train a few steps in float32, so that weights and gradients are those of a training
2  take a few batches of validation data
3  measure each op, and search the smallest list to keep in float32 (`inspect/op_search.py`)
4  do the same with modules: the answer if that leaves less in float32

In a mode with formats of 8 bits or fewer, the matrix products (GEMMs) of linear layers take the
place of ops, and bfloat16 that of float32 (`inspect/format_search.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mprun.config import Composed, compose
from mprun.errors import NotMeasurableError, UsageError
from mprun.inspect.cast_probe import CastProbe
from mprun.inspect.format_search import (
    BFLOAT16_BITS,
    SLACK_DB,
    EffectiveBits,
    GemmGroups,
    gemm_sizes,
)
from mprun.inspect.numerics import unjudged
from mprun.inspect.op_candidates import op_candidates
from mprun.inspect.op_search import CandidateSearch, Sensitivity
from mprun.inspect.passes import FLOAT32, CastPlan, Passes
from mprun.inspect.search_result import (
    FILE,
    LAYERS,
    OPS,
    CastResult,
    OpSearch,
    Samples,
    SearchOpsSettings,
    Selection,
    SensitivityRow,
    answer_files,
    search_parts,
)
from mprun.inspect.tolerance import Tolerance
from mprun.precision.gemms import model_gemms
from mprun.precision.policy import dtype_name, torch_dtype
from mprun.records.console.formatting import counted
from mprun.records.policy_columns import FORMAT_MODES
from mprun.records.result import Result
from mprun.study.budget import EndedEarlyError, LimitedParts
from mprun.study.planned_run import PlannedRun, plan_run
from mprun.train.assemble import (
    Plan,
    build_arithmetic,
    build_caster,
    build_loss_scale,
    build_parts,
    make_plan,
)
from mprun.train.assemble.planned_memory import as_native
from mprun.train.loop import Limits, Trainer, TrainingComponents
from mprun.train.loss_terms import LossTerms

# 1 and 2 had times, trainings that proved the answer, and a record of its own for GEMMs
SCHEMA_VERSION = 3
HELD_OUT = "data.validation_fraction"  # Set to `SHARE` for a recipe without validation data
SHARE = 0.1
# Parts of a configuration that a mixed mode and fp32 do not share
OF_THE_MODE = ("precision", "op_lists", "loss_scale", "execution")
SCALE_STEP = 16.0  # Loss scales that are tried are this factor apart


# ---- the plan ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedSearch:
    """A search, before its first measurement."""

    low: PlannedRun
    float32: Composed
    held_out: tuple[str, ...]  # The override that makes validation data, if one was added
    settings: SearchOpsSettings

    def notes(self) -> Iterator[str]:
        """Notes for the user about the data."""
        name = self.low.composed.config.recipe.name
        for override in self.held_out:
            yield f"note: recipe={name} has no validation data of its own; {override} is set"
        if self.low.plan.splits.validation.is_empty:
            yield f"note: recipe={name} has no validation data: measured on training data"

    def measure(self, parts: LimitedParts) -> Result:
        """Measure and search, as far as it gets.

        Raises:
            EndedEarlyError: `parts` ended it before its first result.
            UsageError: the model cannot be measured, or no choice keeps to the budget of bits.
            RunFailedError: the model's step cannot run.
        """
        low = self.low.plan
        with self.low.executing():
            search = _of_ops if low.policy.gemms == "none" else _of_gemms
            record = search(low, make_plan(self.float32.config, ()), self.settings, parts)
        names = ("recipe", "precision", "seed", "execution")
        described = self.low.described(*names, "hardware", "versions", "backend", "data")
        content = {
            "schema_version": SCHEMA_VERSION,
            **described,
            "settings": asdict(self.settings),
            **asdict(record),
        }
        config = low.config
        about = f"recipe {config.recipe.name}, precision {config.precision.name}"
        files = {FILE: Result(content).json, **answer_files(record, about)}
        return Result(content, [*search_parts(record), *_closing_lines(record)], files)

    def overrides(self, given: Sequence[str], files: Sequence[str], folder: Path) -> list[str]:
        """Those of a run that uses the files of a result."""
        replaced, added = ["run"], []
        if OPS in files:
            replaced.append("op_lists")
            added = ["op_lists=hmp"]  # for its third list: ops that join several tensors
            added += [f"op_lists.{kind}_file={folder / OPS}" for kind in ("lower", "fp32")]
        if LAYERS in files:
            added.append(f"precision.layers_file={folder / LAYERS}")
        return [*(text for text in given if key_of(text) not in replaced), *added]


def _closing_lines(search: OpSearch) -> Iterator[str]:
    """Which gradients do not count, and what was left open."""
    yield from unjudged(search.unjudged_parameters, search.zero_gradients, search.reference)
    for sentence in search.unsettled:
        yield f"not settled, ended by {search.ended_by}: {sentence}"


def plan_search(
    overrides: list[str], config_dir: Path | None, settings: SearchOpsSettings
) -> PlannedSearch:
    """Plan the mixed mode and the same run in float32.

    Raises:
        UsageError: an override is not legal, or the mode casts no op.
    """
    low, held_out = _with_validation_data(overrides, config_dir)
    _check_settings(low.plan, settings)
    shared = [text for text in (*overrides, *held_out) if key_of(text) not in OF_THE_MODE]
    float32 = compose([*shared, "precision=fp32"], config_dir)
    return PlannedSearch(low, float32, held_out, settings)


def _check_settings(low: Plan, settings: SearchOpsSettings) -> None:
    """Refuse settings of formats in a mode that has none.

    Raises:
        UsageError: there is one.
    """
    if low.policy.gemms != "none":
        return
    default = SearchOpsSettings()
    for name in ("effective_bits", "per"):
        value = getattr(settings, name)
        if value != getattr(default, name):
            raise UsageError(
                f"search_ops.{name}={value} has no effect with precision={low.policy.name}, which "
                f"has no format of 8 bits or fewer; legal: one of {', '.join(FORMAT_MODES)} with "
                "it, or leave it out"
            )


def key_of(override: str) -> str:
    """The first part of an override's key."""
    return override.lstrip("+").partition("=")[0].partition(".")[0]


def _with_validation_data(
    overrides: list[str], config_dir: Path | None
) -> tuple[PlannedRun, tuple[str, ...]]:
    """The planned run, and the override that was added to split off validation data."""
    low = plan_run(_composed(overrides, config_dir), "search-ops")
    own = not low.plan.splits.validation.is_empty or HELD_OUT in low.composed.given
    if own or HELD_OUT in low.plan.recipe.ignores:
        return low, ()
    held_out = (f"{HELD_OUT}={SHARE}",)
    other = plan_run(_composed([*overrides, *held_out], config_dir), "search-ops")
    return (low, ()) if other.plan.splits.validation.is_empty else (other, held_out)


def _composed(overrides: list[str], config_dir: Path | None) -> Composed:
    composed = compose(overrides, config_dir)
    precision = composed.config.precision
    if precision.casting == "none":
        raise UsageError(
            f"precision={precision.name} casts no op: mprun search-ops chooses between float32 and "
            "a 16-bit dtype, or between bfloat16 and a format; legal: precision=bf16_mixed, "
            "precision=fp16_mixed, precision=mxfp8 and its like"
        )
    if precision.layers or precision.layers_file is not None:
        raise UsageError(
            "mprun search-ops searches the modules to keep in float32: leave out precision.layers "
            "and precision.layers_file"
        )
    return composed


# ---- the search ----------------------------------------------------------------------------------


def _of_ops(low: Plan, float32: Plan, settings: SearchOpsSettings, parts: LimitedParts) -> OpSearch:
    """Search the ops, and the modules, to keep in float32."""
    built = build_parts(low)
    samples, passes = _passes(low, built, settings)
    _load_trained(built, float32, settings.warmup_steps, parts)
    arithmetic = build_arithmetic(low)
    probe = CastProbe(passes, loss_scales(low))
    dtype = torch_dtype(low.policy.compute_dtype)
    model, inputs, forward = built.model, passes.batches[0][0], passes.forward
    candidates = op_candidates(model, inputs, dtype, settings.always, arithmetic, forward)
    measured = Sensitivity(probe, candidates, settings.modules, parts)
    parts("measuring the casts of the configuration")
    casts = low.config.op_lists.name if low.op_lists is not None else low.policy.casting
    given = probe.measure(CastPlan(build_caster(low), arithmetic=arithmetic))
    tolerance = _asked(settings).beside(measured.unavoidable)
    searches = (measured.of_ops, measured.of_modules)
    lists = _searched(searches, tolerance, None)
    search = _record(
        *(samples, tolerance, probe, searches, lists, parts),
        low=dtype_name(dtype),
        high="float32",
        unavoidable=measured.unavoidable,
        everything_lower=CastResult(measured.lower),
        given=CastResult(given, name=casts),
        always=list(candidates.always),
        lower=list(candidates.lower),
    )
    modules = lists["modules"].high if search.answer == "modules" else ()
    return replace(search, layers=dict.fromkeys(modules, "fp32"))


def _of_gemms(
    low: Plan, float32: Plan, settings: SearchOpsSettings, parts: LimitedParts
) -> OpSearch:
    """Search the GEMMs of linear layers to keep in bfloat16."""
    parts("counting the GEMMs")
    mode, budget = low.policy.gemms, settings.effective_bits
    # the plan itself would round in its layers; the formats are here put on by the search
    built = build_parts(as_native(low))
    samples, passes = _passes(low, built, settings)
    gemms = model_gemms(built.model, {}, mode, low.policy.hadamard)
    bits = EffectiveBits(gemm_sizes(built.model, lambda: passes.run(FLOAT32, 0)), gemms)
    _check_bits(bits, mode, budget)
    _load_trained(built, float32, settings.warmup_steps, parts)
    probe = CastProbe(passes)
    groups = GemmGroups(gemms, bits, settings.per)
    candidates = groups.candidates(low.device.type)
    measured = CandidateSearch(probe, candidates, parts)
    unavoidable = groups.moved_weights(probe)
    every = tuple(candidates.names)
    everything = CastResult(measured.kept(()), candidates.cost(()))
    bfloat16 = CastResult(measured.kept(every), candidates.cost(every), "bf16_mixed")
    tolerance = _asked(settings).beside(unavoidable, SLACK_DB)
    lists = _searched([measured], tolerance, budget)
    search = _record(
        *(samples, tolerance, probe, [measured], lists, parts),
        low=mode,
        high="bfloat16",
        unavoidable=unavoidable,
        everything_lower=everything,
        given=bfloat16,
        budget=budget,
    )
    if search.selection is None or not search.keeps_low:
        return search  # a run in the mode without any product in its format is refused
    return replace(search, layers=groups.layers(mode, search.selection.high))


def _passes(
    low: Plan, built: TrainingComponents, settings: SearchOpsSettings
) -> tuple[Samples, Passes]:
    """Passes on batches of validation data of the training's size, smaller if there is less."""
    held_out = not built.validation.is_empty
    source = built.validation if held_out else built.train
    batches = source.some(settings.batches, low.batch.micro)
    samples = Samples("validation" if held_out else "train", len(batches), batches[0].size)
    pairs = [(batch.inputs, batch.content) for batch in batches]
    return samples, Passes(built.model, LossTerms(low.recipe), pairs, forward=low.recipe.forward)


def _load_trained(
    built: TrainingComponents, float32: Plan, steps: int, parts: LimitedParts
) -> None:
    """Give the model the weights of a training: drawn weights are only its start."""
    parts(f"training {steps} steps in float32")
    # validation data are for the search alone, and would take time after each epoch
    without = replace(float32.splits, validation=float32.splits.validation.first(0))
    with float32.backend_flags():  # inside the flags of the mode: float32 is IEEE here
        trained = build_parts(replace(float32, splits=without))
        if steps:
            Trainer(trained, Limits(None, steps, None)).fit()
    parts("measuring float32")
    built.model.load_state_dict(trained.model.state_dict())


def loss_scales(plan: Plan) -> tuple[float, ...]:
    """The loss scales that a plan's may take, the largest first."""
    scale = build_loss_scale(plan.config, {}, torch.device("cpu"))
    if scale.tensor is None:
        return (1.0,)
    scales = [scale.tensor.item()]
    while scale.kind == "dynamic" and scales[-1] >= SCALE_STEP:
        scales.append(scales[-1] / SCALE_STEP)
    return tuple(scales)


def _asked(settings: SearchOpsSettings) -> Tolerance:
    return Tolerance(settings.tolerance, settings.gradient_db)


def _check_bits(bits: EffectiveBits, mode: str, budget: float | None) -> None:
    """Refuse a search without a GEMM, and a budget that no choice keeps to.

    Raises:
        NotMeasurableError: a step calls no layer that the mode converts.
        UsageError: every choice has more effective bits.
    """
    if not bits.formatted:
        raise NotMeasurableError(f"a step calls no linear layer that {mode} converts")
    lowest = bits.of(())
    if budget is not None and budget < lowest:
        raise UsageError(
            f"search_ops.effective_bits={budget:g}: with every GEMM that {mode} converts in its "
            f"format, the linear layers have {lowest:.4f} effective bits, because others stay in "
            f"bfloat16; legal: {_above(lowest):g} to {BFLOAT16_BITS:g}, or another mode"
        )


def _above(bits: float) -> float:
    """A short number that is not below."""
    rounded = round(bits, 2)
    return rounded if rounded >= bits else round(rounded + 0.01, 2)


def _searched(
    searches: Sequence[CandidateSearch], tolerance: Tolerance, budget: float | None
) -> dict[str, Selection]:
    """The smallest list of each kind, as far as it gets."""
    lists: dict[str, Selection] = {}
    with suppress(EndedEarlyError):
        for search in searches:
            search.measure()
            if _is_wanted(search, lists):
                lists[_plural(search)] = search.smallest(tolerance, budget)
    return lists


def _is_wanted(search: CandidateSearch, lists: dict[str, Selection]) -> bool:
    """Whether the list of a kind is searched: no other is, where no op has to stay high."""
    return not lists or (bool(search.candidates.names) and all(x.high for x in lists.values()))


def _plural(search: CandidateSearch) -> str:
    return f"{search.candidates.kind}s"


def _answer(lists: dict[str, Selection]) -> str:
    """The kind of the better list: the first, unless another is enough and costs less."""
    answer = "none"
    for kind, kept in lists.items():
        if answer == "none" or (kept.is_within and kept.cost < lists[answer].cost):
            answer = kind
    return answer


def _record(
    samples: Samples,
    tolerance: Tolerance,
    probe: CastProbe,
    searches: Sequence[CandidateSearch],
    lists: dict[str, Selection],
    parts: LimitedParts,
    **facts: Any,
) -> OpSearch:
    """The record of a search; `facts` are the fields that depend on what was searched."""
    return OpSearch(
        measured_on=samples,
        tolerance=tolerance,
        unjudged_parameters=list(probe.rounding.undetermined),
        zero_gradients=list(probe.rounding.zero),
        reference=probe.rounding.reference,
        rows={
            _plural(search): [
                SensitivityRow(
                    effect.name, effect.calls, tolerance.harm(effect.alone), effect.alone
                )
                for effect in search.effects
            ]
            for search in searches
        },
        search=lists,
        answer=_answer(lists),
        ended_by=parts.ended_by,
        unsettled=list(_unsettled(searches, lists)) if parts.ended_by else [],
        **facts,
    )


def _unsettled(searches: Sequence[CandidateSearch], lists: dict[str, Selection]) -> Iterator[str]:
    """What a search that ended early leaves open."""
    for search in searches:
        if _plural(search) not in lists and _is_wanted(search, lists):
            done, of = (
                len(search.effects),
                counted(len(search.candidates.names), search.candidates.kind),
            )
            yield f"{done} of {of} measured, and no list of {_plural(search)} chosen"
