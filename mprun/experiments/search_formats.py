"""A search for the GEMMs of linear layers that do not tolerate a format of 8 bits or fewer.

As `search_ops.py` does for ops: train a few steps in float32, measure each GEMM on batches of
validation data, search the set to keep in bfloat16, and train with it in pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from mprun.assemble import build_parts, make_plan
from mprun.assemble.planned_memory import as_native
from mprun.errors import UsageError
from mprun.experiments.budget import EndedEarlyError, LimitedParts
from mprun.experiments.proof import SelectedCasts, prove, weights_after
from mprun.experiments.search_ops import PlannedSearch, batches_of
from mprun.numerics.cast_probe import CastProbe
from mprun.numerics.effective_bits import BFLOAT16_BITS, EffectiveBits, GemmName, gemm_sizes
from mprun.numerics.format_search import SLACK_DB, FormatSensitivity, HighGemms
from mprun.numerics.passes import FLOAT32, NotMeasurableError, Passes
from mprun.numerics.tolerance import Tolerance
from mprun.precision import backend_flags
from mprun.precision.gemms import LinearGemms, model_gemms
from mprun.records.format_search_record import BitsOfChoices, FormatRow, FormatSearch
from mprun.records.layer_values import PRODUCTS, with_high_products
from mprun.train.loss_terms import LossTerms

SCHEMA_VERSION = 2


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


def content(planned: PlannedSearch, search: FormatSearch) -> dict[str, Any]:
    """The content of search_ops.json."""
    return {"schema_version": SCHEMA_VERSION, **planned.described(), **asdict(search)}
