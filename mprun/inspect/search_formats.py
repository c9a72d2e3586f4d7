"""A search for the GEMMs of linear layers that do not tolerate a format of 8 bits or fewer.

As `search.py` does for ops: train a few steps in float32, measure each GEMM on batches of
validation data, and search the set to keep in bfloat16.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

from mprun.assemble import (
    build_parts,
    make_plan,
)
from mprun.assemble.planned_memory import as_native
from mprun.config import Composed
from mprun.config.settings import SearchOpsSettings
from mprun.errors import UsageError
from mprun.experiments.budget import EndedEarlyError, LimitedParts
from mprun.experiments.planned_run import PlannedRun
from mprun.experiments.proof import weights_after
from mprun.numerics.cast_probe import CastProbe
from mprun.numerics.format_search import (
    BFLOAT16_BITS,
    SLACK_DB,
    EffectiveBits,
    GemmCandidates,
    GemmName,
    gemm_sizes,
)
from mprun.numerics.passes import FLOAT32, Batch, NotMeasurableError, Passes
from mprun.numerics.set_search import CandidateSearch, KeptHigh
from mprun.numerics.tolerance import Tolerance
from mprun.precision import backend_flags
from mprun.precision.gemms import LinearGemms, model_gemms
from mprun.records.layer_values import PRODUCTS, with_high_products
from mprun.results.search_result import (
    BitsOfChoices,
    FormatRow,
    FormatSearch,
    Samples,
)
from mprun.train.loop import TrainingComponents
from mprun.train.loss_terms import LossTerms


def batches_of(parts: TrainingComponents, wanted: int, at_most: int) -> tuple[Samples, list[Batch]]:
    """Batches of validation data of the training's size, smaller if there is less data."""
    held_out = not parts.validation.is_empty
    source = parts.validation if held_out else parts.train
    batches = source.some(wanted, at_most)
    split = "validation" if held_out else "train"
    return Samples(split, len(batches), batches[0].size), [(b.inputs, b.content) for b in batches]


def measure_formats(
    planned: PlannedRun, float32: Composed, settings: SearchOpsSettings, parts: LimitedParts
) -> FormatSearch:
    """Measure and search.

    Args:
        planned: the run in the mode.
        float32: the same run in fp32.
        settings: of the search.
        parts: is called before each measurement.

    Raises:
        EndedEarlyError: `parts` ended it before its first result.
        UsageError: the model cannot be measured, or the budget of effective bits is impossible.
        RunFailedError: the model's step cannot run.
    """
    low = planned.plan
    mode = low.policy.gemms
    with planned.executing(), backend_flags(low.policy, low.native_tf32):
        parts("counting the GEMMs")
        built = build_parts(as_native(low))
        samples, batches = batches_of(built, settings.batches, low.batch.micro)
        passes = Passes(built.model, LossTerms(low.recipe), batches, forward=low.recipe.forward)
        gemms = model_gemms(built.model, {}, mode, low.policy.hadamard)
        bits = EffectiveBits(gemm_sizes(built.model, lambda: passes.run(FLOAT32, 0)), gemms)
        _check_bits(bits, mode, settings.effective_bits)
        parts(f"training {settings.warmup_steps} steps in float32")
        weights = weights_after(make_plan(float32.config, ()), settings.warmup_steps)
        parts("measuring float32")
        built.model.load_state_dict(weights)
        probe = CastProbe(passes)
        candidates = GemmCandidates(gemms, bits, low.device.type, settings.per)
        measured = CandidateSearch(probe, candidates, parts)
        unavoidable = candidates.moved_weights(probe)
        everything, bfloat16 = (measured.kept(x) for x in ((), tuple(candidates.names)))
        asked = Tolerance(settings.tolerance, settings.gradient_db)
        tolerance = asked.beside(unavoidable, SLACK_DB)
        high: KeptHigh | None = None
        with suppress(EndedEarlyError):
            measured.measure()
            high = measured.smallest(tolerance, settings.effective_bits)
    kept = () if high is None else candidates.gemms_of(high.names)
    return FormatSearch(
        format=mode,
        per=settings.per,
        measured_on=samples,
        tolerance=tolerance,
        unavoidable=unavoidable,
        everything=everything,
        bfloat16=bfloat16,
        candidates=_format_rows(measured, candidates, tolerance),
        high=None if high is None else list(high.names),
        layers=None if high is None else layers_of(gemms, mode, bits.formatted, kept),
        harm=None if high is None else high.harm,
        is_within=None if high is None else high.is_within,
        measure=None if high is None else high.measure,
        operations=None if high is None else 1 - bits.share(kept),
        effective_bits=BitsOfChoices(
            budget=settings.effective_bits,
            everything=bits.of(()),
            answer=None if high is None else high.cost,
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


def _format_rows(
    measured: CandidateSearch, candidates: GemmCandidates, tolerance: Tolerance
) -> list[FormatRow]:
    return [
        FormatRow(
            name=effect.name,
            layer=own[0].layer,
            products=[gemm.product for gemm in own],
            alone=effect.alone,
            harm_alone=tolerance.harm(effect.alone),
            kept=effect.kept,
            operations=candidates.bits.share(own),
        )
        for effect in measured.effects
        for own in (candidates.own[effect.name],)
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
