"""A search for the ops of a recipe that must stay in float32.

1  train a few steps in float32, so that weights and gradients are those of a training
2  take a few batches of validation data
3  measure each op and module, search the smallest list (`mprun.numerics.sensitivity`)
4  keep modules apart instead of ops, if that leaves less in float32
5  train with the result and in float32, in pairs (`proof.py`)

A search for the GEMMs of linear layers that do not tolerate a format of 8 bits or fewer.

As `search_ops.py` does for ops: train a few steps in float32, measure each GEMM on batches of
validation data, search the set to keep in bfloat16, and train with it in pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mprun.assemble import (
    Plan,
    build_arithmetic,
    build_caster,
    build_loss_scale,
    build_parts,
    make_plan,
)
from mprun.assemble.planned_memory import as_native
from mprun.config import Composed, compose
from mprun.config.settings import SEEDS, SearchOpsSettings, Settings
from mprun.console.formatting import counted
from mprun.errors import UsageError
from mprun.experiments.budget import EndedEarlyError, LimitedParts
from mprun.experiments.planned_run import PlannedRun, plan_run
from mprun.experiments.proof import SelectedCasts, prove, weights_after
from mprun.numerics.cast_probe import CastProbe
from mprun.numerics.effective_bits import BFLOAT16_BITS, EffectiveBits, GemmName, gemm_sizes
from mprun.numerics.format_search import SLACK_DB, FormatSensitivity, HighGemms
from mprun.numerics.op_search import Fp32List, OpEffect, Sensitivity, unmeasured
from mprun.numerics.op_watcher import dtype_name
from mprun.numerics.passes import FLOAT32, Batch, CastPlan, NotMeasurableError, Passes
from mprun.numerics.tolerance import Tolerance
from mprun.precision import backend_flags
from mprun.precision.gemms import LinearGemms, model_gemms
from mprun.precision.policy import torch_dtype
from mprun.records.mode_names import FORMAT_MODES, PRODUCTS, with_high_products
from mprun.results.search_result import (
    BitsOfChoices,
    CastResult,
    Float32Time,
    FormatRow,
    FormatSearch,
    Fp32Selection,
    GivenCasts,
    OpSearch,
    Proof,
    RoundedWeights,
    Samples,
    Selections,
    SensitivityRow,
)
from mprun.train.loop import Parts
from mprun.train.loss_terms import LossTerms

SCHEMA_VERSION = 1
HELD_OUT = "data.validation_fraction"
"""Set to `SHARE` for a recipe without validation data."""
SHARE = 0.1
OF_THE_MODE = ("precision", "op_lists", "loss_scale", "execution")
"""Parts of a configuration that a mixed mode and fp32 do not share."""
SCALE_STEP = 16.0
"""Loss scales that are tried are this factor apart."""
NAMED = 5
"""Up to this many ops that were not measured are named."""


@dataclass(frozen=True)
class PlannedSearch:
    """A search, before its first measurement."""

    low: PlannedRun
    float32: Composed
    held_out: tuple[str, ...]
    """The override that makes validation data, if one was added."""
    settings: Settings

    @property
    def seeds(self) -> int:
        """Pairs of trainings of the proof."""
        return self.settings.seeds or SEEDS["search-ops"]

    def notes(self) -> Iterator[str]:
        """Notes for the user about the data and the times."""
        name, low = self.low.composed.config.recipe.name, self.low.plan
        for override in self.held_out:
            yield f"note: recipe={name} has no validation data of its own; {override} is set"
        if low.splits.validation.is_empty:
            yield f"note: recipe={name} has no validation data: measured on training data"
        if low.execution == "emulated":
            yield "note: no times are measured: emulated arithmetic does not show the hardware's"

    def measure(self, parts: LimitedParts) -> tuple[OpSearch, SelectedCasts | None]:
        """Search; the result, and the casts to prove, if it got as far as a list.

        Raises:
            EndedEarlyError: `parts` ended it before its first result.
            UsageError: the model cannot be measured.
            RunFailedError: the model's step cannot run.
        """
        reference = make_plan(self.float32.config, ())
        with self.low.executing():
            return _search(self.low.plan, reference, self.settings.search_ops, parts)

    def with_open_proof(
        self, search: OpSearch, proof: Proof | None, ended_by: str | None
    ) -> OpSearch:
        """The search with what its proof left open when it ended early."""
        if ended_by is None:
            return search
        pairs = 0 if proof is None else len(proof.values)
        text = f"{pairs} of {counted(self.seeds, 'pair')} of trainings of the proof were made"
        return replace(search, ended_by=ended_by, unsettled=[*search.unsettled, text])

    def content(self, search: OpSearch, proof: Proof | None) -> dict[str, Any]:
        """The content of search_ops.json."""
        return {
            "schema_version": SCHEMA_VERSION,
            **self.described(),
            "proof": None if proof is None else asdict(proof),
            **asdict(search),
        }

    def described(self) -> dict[str, Any]:
        """What was searched, and with which settings."""
        settings = self.settings.search_ops
        own = {**asdict(settings), "per": settings.per.name}
        return {
            **self.low.described(
                *("recipe", "precision", "seed", "execution"),
                *("hardware", "versions", "backend", "data"),
            ),
            "settings": {**own, "seeds": self.seeds},
        }

    def prove(self, casts: SelectedCasts, parts: LimitedParts) -> Proof | None:
        """Train with the casts and in float32; None if `parts` ended it before the first pair.

        Raises:
            RunFailedError: a training in float32 failed.
        """
        configs = self.low.composed.config, self.float32.config
        return prove(*configs, casts, self.settings.search_ops, self.seeds, parts)


def plan_search(overrides: list[str], config_dir: Path | None, settings: Settings) -> PlannedSearch:
    """Plan the mixed mode and the same run in float32.

    Raises:
        UsageError: an override is not legal, or the mode casts no op.
    """
    low, held_out = _with_validation_data(overrides, config_dir)
    _check_settings(low.plan, settings.search_ops)
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
            text = getattr(value, "name", value)
            raise UsageError(
                f"search_ops.{name}={text} has no effect with precision={low.policy.name}, which "
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
    if precision.casting.name == "none":
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


def _search(
    low: Plan, reference: Plan, settings: SearchOpsSettings, parts: LimitedParts
) -> tuple[OpSearch, SelectedCasts | None]:
    """Measure and search; the result, and its answer as trainings take it.

    Args:
        low: the plan of a mixed mode, without `precision.layers`.
        reference: the same in fp32.
        settings: of the search.
        parts: is called before each measurement.

    Raises:
        EndedEarlyError: before the first op was measured.
    """
    parts(f"training {settings.warmup_steps} steps in float32")
    weights = weights_after(reference, settings.warmup_steps)
    with backend_flags(low.policy, low.native_tf32):
        parts("measuring float32")
        built = build_parts(low)
        built.model.load_state_dict(weights)
        samples, batches = batches_of(built, settings.batches, low.batch.micro)
        arithmetic = build_arithmetic(low)
        native = low.execution == "native"  # times of emulation are not the hardware's
        measured = unmeasured(
            built.model,
            LossTerms(low.recipe),
            batches,
            torch_dtype(low.policy.compute_dtype),
            modules=settings.modules,
            always=settings.always,
            timed_steps=settings.timed_steps if native else 0,
            arithmetic=arithmetic,
            loss_scales=loss_scales(low),
            report=parts,
            forward=low.recipe.forward,
        )
        parts("measuring the casts of the configuration")
        given = CastPlan(build_caster(low), arithmetic=arithmetic)
        given_casts = GivenCasts(
            low.config.op_lists.name if low.op_lists is not None else low.policy.casting,
            measured.probe.measure(given),
            measured.time_ratio(given),
        )
        float32 = Float32Time(measured.time_ratio(FLOAT32))
        asked = Tolerance(settings.tolerance, settings.gradient_db)
        lists = _search_lists(measured, asked, settings.modules)
        answer = lists.answer
        tolerance = asked.beside(measured.unavoidable)
        result = OpSearch(
            dtype=dtype_name(measured.candidates.dtype),
            measured_on=samples,
            tolerance=tolerance,
            unjudged_parameters=list(measured.probe.unjudged),
            zero_gradients=list(measured.probe.zero),
            reference=measured.probe.reference,
            unavoidable=RoundedWeights(measured.unavoidable),
            everything_lower=CastResult(measured.lower, time_ratio=1.0),
            given=given_casts,
            float32=float32,
            ops=[_row(effect, tolerance) for effect in measured.ops],
            modules=[_row(effect, tolerance) for effect in measured.modules],
            search=lists.selections(measured),
            always=list(measured.candidates.always),
            lower=list(measured.candidates.lower),
            answer="none" if answer is None else lists.answer_name,
            ended_by=parts.ended_by,
            unsettled=list(_unsettled(measured, lists)),
        )
    if answer is None:
        return result, None
    layers = dict.fromkeys(answer.fp32, "fp32") if lists.by_modules else {}
    return result, SelectedCasts(answer.lists, layers, answer.measure.loss_scale)


@dataclass
class _Lists:
    """The smallest lists; None for those that were not needed, or not reached."""

    ops: Fp32List | None = None
    modules: Fp32List | None = None
    is_complete: bool = False

    @property
    def by_modules(self) -> bool:
        """Whether the modules are the better answer."""
        ops, modules = self.ops, self.modules
        return (
            ops is not None
            and modules is not None
            and modules.search.is_within
            and modules.float32_share < ops.float32_share
        )

    @property
    def answer(self) -> Fp32List | None:
        return self.modules if self.by_modules else self.ops

    @property
    def answer_name(self) -> str:
        return "modules" if self.by_modules else "ops"

    def selections(self, measured: Sensitivity) -> Selections | None:
        """The lists as the record has them, timed."""
        if self.ops is None:
            return None
        plan = measured.candidates.plan
        ops, modules = self.ops, self.modules
        return Selections(
            _selection(ops, measured.time_ratio(plan(ops.fp32))),
            _selection(modules, measured.time_ratio(plan(modules=modules.fp32)))
            if modules
            else None,
        )


def _search_lists(measured: Sensitivity, tolerance: Tolerance, with_modules: bool) -> _Lists:
    """Measure ops and modules and search the smallest lists, as far as it gets."""
    lists = _Lists()
    with suppress(EndedEarlyError):
        measured.measure_ops()
        lists.ops = measured.smallest_ops(tolerance)
        measured.measure_modules()
        if lists.ops.fp32 and with_modules:
            lists.modules = measured.smallest_modules(tolerance)
        lists.is_complete = True
    return lists


def _unsettled(measured: Sensitivity, lists: _Lists) -> Iterator[str]:
    """What a search that ended early leaves open."""
    if lists.is_complete:
        return
    if text := _not_measured("op", measured.movable_ops, measured.ops):
        yield text
    if lists.ops is None:
        yield "the smallest list of ops was not searched to its end: there is no list"
        return
    if text := _not_measured("module", measured.movable_modules, measured.modules):
        yield text
    if lists.ops.fp32:
        yield "whether modules in float32 are a better answer than ops was not searched to its end"


def _not_measured(kind: str, calls: Mapping[str, int], effects: Sequence[OpEffect]) -> str | None:
    names = list(calls)[len(effects) :]
    if not names:
        return None
    listed = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" * (len(names) > NAMED))
    return f"{len(effects)} of {counted(len(calls), kind)} measured, not {listed}"


def _row(effect: OpEffect, tolerance: Tolerance) -> SensitivityRow:
    return SensitivityRow(harm_alone=tolerance.harm(effect.alone), **effect._asdict())


def _selection(smallest: Fp32List, time_ratio: float | None) -> Fp32Selection:
    return Fp32Selection(
        fp32=list(smallest.fp32),
        is_within=smallest.search.is_within,
        harm=smallest.search.harm,
        measure=smallest.measure,
        float32_share=smallest.float32_share,
        time_ratio=time_ratio,
        steps=list(smallest.search.steps),
    )


def loss_scales(plan: Plan) -> tuple[float, ...]:
    """The loss scales that a plan's may take, the largest first."""
    scale = build_loss_scale(plan.config, {}, torch.device("cpu"))
    if scale.tensor is None:
        return (1.0,)
    scales = [scale.tensor.item()]
    while scale.kind == "dynamic" and scales[-1] >= SCALE_STEP:
        scales.append(scales[-1] / SCALE_STEP)
    return tuple(scales)


def batches_of(parts: Parts, wanted: int, at_most: int) -> tuple[Samples, list[Batch]]:
    """Batches of validation data of the training's size, smaller if there is less data."""
    held_out = not parts.validation.is_empty
    source = parts.validation if held_out else parts.train
    batches = source.some(wanted, at_most)
    split = "validation" if held_out else "train"
    return Samples(split, len(batches), batches[0].size), [(b.inputs, b.content) for b in batches]


FORMATS_SCHEMA_VERSION = 2


def measure_formats(planned: PlannedSearch, parts: LimitedParts) -> FormatSearch:
    """Measure and search.

    Raises:
        EndedEarlyError: `parts` ended it before its first result.
        UsageError: the model cannot be measured, or the budget of effective bits is impossible.
        RunFailedError: the model's step cannot run.
    """
    low, settings = planned.low.plan, planned.settings.search_ops
    mode = low.policy.gemms
    with planned.low.executing(), backend_flags(low.policy, low.native_tf32):
        parts("counting the GEMMs")
        built = build_parts(as_native(low))
        samples, batches = batches_of(built, settings.batches, low.batch.micro)
        passes = Passes(built.model, LossTerms(low.recipe), batches, forward=low.recipe.forward)
        gemms = model_gemms(built.model, {}, mode, low.policy.hadamard)
        bits = EffectiveBits(gemm_sizes(built.model, lambda: passes.run(FLOAT32, 0)), gemms)
        _check_bits(bits, mode, settings.effective_bits)
        parts(f"training {settings.warmup_steps} steps in float32")
        weights = weights_after(make_plan(planned.float32.config, ()), settings.warmup_steps)
        parts("measuring float32")
        built.model.load_state_dict(weights)
        measured = FormatSensitivity(
            CastProbe(passes), gemms, bits, low.device.type, settings.per.name, parts
        )
        asked = Tolerance(settings.tolerance, settings.gradient_db)
        tolerance = asked.beside(measured.unavoidable, SLACK_DB)
        high: HighGemms | None = None
        with suppress(EndedEarlyError):
            measured.measure(tolerance)
            high = measured.smallest(tolerance, settings.effective_bits)
    return FormatSearch(
        format=mode,
        per=settings.per.name,
        measured_on=samples,
        tolerance=tolerance,
        unavoidable=measured.unavoidable,
        everything=measured.everything,
        bfloat16=measured.bfloat16,
        candidates=_rows(measured, bits),
        high=None if high is None else list(high.names),
        layers=None if high is None else layers_of(gemms, mode, bits.formatted, high.gemms),
        harm=None if high is None else high.harm,
        is_within=None if high is None else high.is_within,
        measure=None if high is None else high.measure,
        operations=None if high is None else 1 - bits.share(high.gemms),
        effective_bits=BitsOfChoices(
            budget=settings.effective_bits,
            everything=bits.of(()),
            answer=None if high is None else bits.of(high.gemms),
            bfloat16=bits.of(bits.formatted),
        ),
        steps=[] if high is None else list(high.steps),
        ended_by=parts.ended_by,
    )


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


def _rows(measured: FormatSensitivity, bits: EffectiveBits) -> list[FormatRow]:
    return [
        FormatRow(
            name=effect.name,
            layer=own[0].layer,
            products=[gemm.product for gemm in own],
            alone=effect.alone,
            harm_alone=effect.harm,
            kept=effect.kept,
            operations=bits.share(own),
        )
        for effect in measured.effects
        for own in (measured.candidates[effect.name],)
    ]


def layers_of(
    gemms: Mapping[str, LinearGemms],
    mode: str,
    formatted: Collection[GemmName],
    high: Collection[GemmName],
) -> dict[str, str]:
    """`precision.layers` of a run in the mode with these GEMMs in bfloat16.

    Args:
        gemms: the layers that the mode converts.
        mode: its name.
        formatted: the GEMMs that have a format and are computed.
        high: those of them that stay in bfloat16.
    """
    low = {*formatted} - {*high}
    kept = {layer: {p for p in PRODUCTS if GemmName(layer, p) not in low} for layer in gemms}
    return {
        layer: with_high_products(mode, kept[layer])
        for layer in gemms
        if any(name.layer == layer for name in high)
    }


def prove_formats(
    planned: PlannedSearch, search: FormatSearch, parts: LimitedParts
) -> FormatSearch:
    """The search with pairs of trainings, with its `layers` and in float32.

    None are made where no GEMM keeps the format, or the search ended early.

    Raises:
        RunFailedError: a training in float32 failed.
    """
    if not search.keeps_a_format or search.layers is None:
        return search
    low = copy.deepcopy(planned.low.composed.config)
    low.precision.layers = dict(search.layers)
    casts = SelectedCasts(None, search.layers, 1.0)
    settings = planned.settings.search_ops
    proof = prove(low, planned.float32.config, casts, settings, planned.seeds, parts)
    return replace(search, proof=proof, ended_by=search.ended_by or parts.ended_by)


def format_content(planned: PlannedSearch, search: FormatSearch) -> dict[str, Any]:
    """The format_content of search_ops.json."""
    return {"schema_version": FORMATS_SCHEMA_VERSION, **planned.described(), **asdict(search)}
