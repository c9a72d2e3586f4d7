"""A search for the ops of a recipe that must stay in float32.

1  train a few steps in float32, so that weights and gradients are those of a training
2  take a few batches of validation data
3  measure each op and module, search the smallest list (`mprun.numerics.sensitivity`)
4  keep modules apart instead of ops, where that leaves less in float32
5  train with the outcome and in float32, in pairs (`proof.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch

from mprun.assemble import Plan, build_arithmetic, build_caster, build_loss_scale, build_parts
from mprun.config.settings import SearchOpsSettings
from mprun.experiments.proof import Choice
from mprun.experiments.warmup import weights_after
from mprun.numerics.op_sensitivity import Found, Sensitivity, sensitivity
from mprun.numerics.passes import FLOAT32, Batch, Way
from mprun.numerics.probe import Measure
from mprun.numerics.tolerance import Tolerance
from mprun.precision import backend_flags
from mprun.precision.policy import torch_dtype
from mprun.train.loop import Parts

SCALE_STEP = 16.0
"""Loss scales that are tried are this factor apart."""


@dataclass(frozen=True)
class Samples:
    """What was measured on."""

    split: str
    """validation, or train where the recipe holds nothing out."""
    batches: int
    batch_size: int


@dataclass(frozen=True)
class Given:
    """The casts that the configuration has now."""

    name: str
    """autocast, or the name of its op lists."""
    measure: Measure
    time_ratio: float | None
    """Time of a forward and a backward pass over that with everything lower."""


@dataclass(frozen=True)
class Searched:
    """The outcome."""

    samples: Samples
    tolerance: Tolerance
    rows: Sensitivity
    given: Given
    float32_time_ratio: float | None
    ops: Found
    ops_time_ratio: float | None
    modules: Found | None
    """None where no op has to be in float32, or modules were not asked for."""
    modules_time_ratio: float | None

    @property
    def answer(self) -> Found:
        """Modules where these are enough and leave less in float32 than the ops do, else ops."""
        found = self.modules
        if found is None or not found.search.is_within:
            return self.ops
        return found if found.float32_share < self.ops.float32_share else self.ops

    @property
    def choice(self) -> Choice:
        """The answer as trainings take it."""
        answer, apart = self.answer, self.answer is self.modules
        layers = dict.fromkeys(answer.fp32, "fp32") if apart else {}
        return Choice(answer.lists, layers, answer.measure.loss_scale)


def search_ops(
    chosen: Plan,
    reference: Plan,
    settings: SearchOpsSettings,
    told: Callable[[str], None],
) -> Searched:
    """Measure and search.

    Args:
        chosen: the plan of a mixed mode, without `precision.layers`.
        reference: the same in fp32.
        settings: how.
        told: is told what is done next, in a few words.

    Raises:
        ValueError: the model cannot be measured, see `sensitivity`.
    """
    told(f"training {settings.warmup_steps} steps in float32")
    weights = weights_after(reference, settings.warmup_steps)
    with backend_flags(chosen.policy, chosen.native_tf32):
        parts = build_parts(chosen)
        parts.model.load_state_dict(weights)
        samples, batches = _batches(parts, settings.batches)
        arithmetic = build_arithmetic(chosen)
        native = chosen.execution == "native"  # times of emulation say nothing of the hardware
        tolerance = Tolerance(settings.tolerance, settings.gradient_db)
        found = sensitivity(
            parts.model,
            chosen.recipe.loss,
            batches,
            torch_dtype(chosen.policy.compute_dtype),
            modules=settings.modules,
            always=settings.always,
            timed_steps=settings.timed_steps if native else 0,
            arithmetic=arithmetic,
            loss_scales=loss_scales(chosen),
            told=told,
        )
        ops = found.smallest_ops(tolerance)
        modules = found.smallest_modules(tolerance) if ops.fp32 and settings.modules else None
        given = Way(build_caster(chosen), arithmetic=arithmetic)
        choice = found.choice
        return Searched(
            samples,
            tolerance,
            found,
            Given(given_name(chosen), found.measure(given), found.time_ratio(given)),
            found.time_ratio(FLOAT32),
            ops,
            found.time_ratio(choice.way(ops.fp32)),
            modules,
            found.time_ratio(choice.way(modules=modules.fp32)) if modules else None,
        )


def given_name(chosen: Plan) -> str:
    """What casts in a plan."""
    return chosen.config.op_lists.name if chosen.op_lists is not None else chosen.policy.casting


def loss_scales(chosen: Plan) -> tuple[float, ...]:
    """The loss scales that a plan's may come to, the largest first."""
    scale = build_loss_scale(chosen.config, {}, torch.device("cpu"))
    if scale.tensor is None:
        return (1.0,)
    found = [scale.tensor.item()]
    while scale.kind == "dynamic" and found[-1] >= SCALE_STEP:
        found.append(found[-1] / SCALE_STEP)
    return tuple(found)


def _batches(parts: Parts, wanted: int) -> tuple[Samples, list[Batch]]:
    """Batches of validation data of the size trained on, smaller where there is less."""
    held_out = len(parts.validation.data) > 0
    source = parts.validation if held_out else parts.train
    wanted = min(wanted, len(source.data))
    source.batch_size = min(parts.micro_batch, len(source.data) // wanted)
    batches = [(b.inputs, b.targets) for b in islice(source, wanted)]
    split = "validation" if held_out else "train"
    return Samples(split, len(batches), source.batch_size), batches
