"""The smallest list of ops, modules or GEMMs that must stay in a higher precision.

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
from dataclasses import replace
from typing import Any

import torch

from mprun.errors import NotMeasurableError, UsageError
from mprun.inspect.cast_probe import CastProbe
from mprun.inspect.format_search import (
    BFLOAT16_BITS,
    SLACK_DB,
    EffectiveBits,
    GemmGroups,
    gemm_sizes,
)
from mprun.inspect.op_candidates import op_candidates
from mprun.inspect.op_search import CandidateSearch, Sensitivity
from mprun.inspect.passes import FLOAT32, CastPlan, Passes
from mprun.inspect.rounding_oracle import Tolerance
from mprun.inspect.search_result import (
    CastResult,
    OpSearch,
    Samples,
    SearchOpsSettings,
    Selection,
    SensitivityRow,
)
from mprun.precision.gemms import model_gemms
from mprun.precision.policy import dtype_name, torch_dtype
from mprun.records.console.formatting import counted
from mprun.study.budget import EndedEarlyError, LimitedParts
from mprun.train.assemble import (
    Plan,
    build_arithmetic,
    build_caster,
    build_loss_scale,
    build_parts,
)
from mprun.train.assemble.planned_memory import as_native
from mprun.train.loop import Limits, Trainer, TrainingComponents
from mprun.train.loss_terms import LossTerms

SCALE_STEP = 16.0  # Loss scales that are tried are this factor apart: five from 2^16 to 1


def search_ops(
    low: Plan, float32: Plan, settings: SearchOpsSettings, parts: LimitedParts
) -> OpSearch:
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


def search_gemms(
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
    for kind, one in lists.items():
        if answer == "none" or (one.is_within and one.cost < lists[answer].cost):
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
        unsettled=list(_left_open(searches, lists)) if parts.ended_by else [],
        **facts,
    )


def _left_open(searches: Sequence[CandidateSearch], lists: dict[str, Selection]) -> Iterator[str]:
    """What a search that ended early leaves open."""
    for search in searches:
        if _plural(search) not in lists and _is_wanted(search, lists):
            done, of = (
                len(search.effects),
                counted(len(search.candidates.names), search.candidates.kind),
            )
            yield f"{done} of {of} measured, and no list of {_plural(search)} chosen"
