"""A search for the linear layers that do not tolerate a mode's format of 8 bits or fewer.

As `search_ops.py` does for ops: train a few steps in float32, measure each layer on batches of
validation data, search the smallest set to keep in bfloat16, and train with it in pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from mprun.assemble import build_parts, make_plan
from mprun.assemble.planned_memory import as_native
from mprun.experiments.budget import EndedEarlyError, LimitedParts
from mprun.experiments.proof import SelectedCasts, prove, weights_after
from mprun.experiments.search_ops import PlannedSearch, batches_of
from mprun.numerics.cast_probe import CastProbe
from mprun.numerics.format_search import SLACK_DB, FormatSensitivity, HighLayers
from mprun.numerics.passes import Passes
from mprun.numerics.tolerance import Tolerance
from mprun.precision import backend_flags
from mprun.precision.gemms import linear_layers, model_gemms
from mprun.records.format_search_record import FormatRow, FormatSearch
from mprun.train.loss_terms import LossTerms

SCHEMA_VERSION = 1


def measure_formats(planned: PlannedSearch, parts: LimitedParts) -> FormatSearch:
    """Measure and search.

    Raises:
        EndedEarlyError: `parts` ended it before its first result.
        UsageError: the model cannot be measured.
        RunFailedError: the model's step cannot run.
    """
    low, settings = planned.low.plan, planned.settings.search_ops
    mode = low.policy.gemms
    with planned.low.executing(), backend_flags(low.policy, low.native_tf32):
        parts(f"training {settings.warmup_steps} steps in float32")
        weights = weights_after(make_plan(planned.float32.config, ()), settings.warmup_steps)
        parts("measuring float32")
        built = build_parts(as_native(low))
        built.model.load_state_dict(weights)
        samples, batches = batches_of(built, settings.batches, low.batch.micro)
        probe = CastProbe(
            Passes(built.model, LossTerms(low.recipe), batches, forward=low.recipe.forward)
        )
        gemms = model_gemms(built.model, {}, mode, low.policy.hadamard)
        shares = _shares(built.model, gemms)
        measured = FormatSensitivity(probe, gemms, low.device.type, parts)
        asked = Tolerance(settings.tolerance, settings.gradient_db)
        tolerance = asked.beside(measured.unavoidable, SLACK_DB)
        high: HighLayers | None = None
        with suppress(EndedEarlyError):
            measured.measure(tolerance)
            high = measured.smallest(tolerance, shares)
    return FormatSearch(
        format=mode,
        measured_on=samples,
        tolerance=tolerance,
        unavoidable=measured.unavoidable,
        everything=measured.everything,
        bfloat16=measured.bfloat16,
        layers=[
            FormatRow(
                name=effect.name,
                alone=effect.alone,
                harm_alone=effect.harm,
                kept=effect.kept,
                operations=shares[effect.name],
            )
            for effect in measured.effects
        ],
        high=None if high is None else list(high.search.fp32),
        harm=None if high is None else high.search.harm,
        is_within=None if high is None else high.search.is_within,
        measure=None if high is None else high.measure,
        operations=None if high is None else 1 - sum(shares[n] for n in high.search.fp32),
        steps=[] if high is None else list(high.search.steps),
        ended_by=parts.ended_by,
    )


def prove_formats(
    planned: PlannedSearch, search: FormatSearch, parts: LimitedParts
) -> FormatSearch:
    """The search with pairs of trainings, with these layers in bfloat16 and in float32.

    None are made where no layer keeps the format, or the search ended early.

    Raises:
        RunFailedError: a training in float32 failed.
    """
    if search.high is None or len(search.high) == len(search.layers):
        return search
    casts = SelectedCasts(None, dict.fromkeys(search.high, "bf16"), 1.0)
    configs = planned.low.composed.config, planned.float32.config
    settings = planned.settings.search_ops
    proof = prove(*configs, casts, settings, planned.seeds, parts)
    return replace(search, proof=proof, ended_by=search.ended_by or parts.ended_by)


def content(planned: PlannedSearch, search: FormatSearch) -> dict[str, Any]:
    """The content of search_ops.json."""
    return {"schema_version": SCHEMA_VERSION, **planned.described(), **asdict(search)}


def _shares(model: nn.Module, gemms: Mapping[str, object]) -> dict[str, float]:
    """Of each layer in the operations of all, whose samples are as many."""
    layers = linear_layers(model)
    sizes = {name: layers[name].in_features * layers[name].out_features for name in gemms}
    return {name: size / sum(sizes.values()) for name, size in sizes.items()}
