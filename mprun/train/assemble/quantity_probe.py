"""The quantities of a plan's recipe, in the plan's precision or in another, by given weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mprun.errors import RunFailedError
from mprun.precision import Policy, Precision
from mprun.precision.execution import choose_fp32_fallback
from mprun.precision.policy import policy as policy_of
from mprun.records.run_record import QuantityRow
from mprun.train.assemble.parts import build_batches, build_precision, prepared_model
from mprun.train.assemble.plan import Plan
from mprun.train.data import MicroBatch
from mprun.train.data.random_numbers import untouched
from mprun.train.loop import TrainingComponents
from mprun.train.recipe_quantities import BATCHES, Values, quantities_of, quantity_row, values_of
from mprun.train.user_code import described

EXACT = "fp64"


def in_policy(plan: Plan, policy: Policy) -> Plan:
    """The plan in another native precision, all its layers alike."""
    fallback = choose_fp32_fallback(plan.config.speed.name, policy, "native", plan.device)
    return replace(
        plan, policy=policy, execution="native", op_lists=None, layers={}, fp32_fallback=fallback
    )


def held_out_batches(plan: Plan) -> tuple[str, list[MicroBatch]]:
    """The name of the samples that quantities are of, and some batches in the plan's precision."""
    splits, size = plan.splits, plan.batch.micro
    sets = {"validation": splits.validation, "test": splits.test, "train": splits.train}
    name = next(name for name, data in sets.items() if not data.is_empty or name == "train")
    batches, _ = build_batches(plan, sets[name], size, size, shuffle=False)
    known = batches.samples
    wanted = BATCHES if known is None else min(BATCHES, -(-known // size))
    return name, batches.some(wanted, size)


class QuantityProbe:
    """A model in the plan's precision that computes the quantities with a run's weights."""

    def __init__(self, plan: Plan) -> None:
        self._quantities = quantities_of(plan.recipe)
        self._precision = build_precision(plan)
        self._split, self._batches = held_out_batches(plan)
        with untouched():
            self._model = prepared_model(plan, self._precision)
        self._flags: Callable[[], AbstractContextManager[Any]] = plan.backend_flags

    def values(self, weights: Mapping[str, Tensor]) -> dict[str, Values]:
        """The quantities; the weights are cast to the dtypes of the precision."""
        self._model.load_state_dict(weights)
        with untouched(), self._flags():
            return measured(self._quantities, self._precision, self._model, self._batches)


def measured(
    quantities: Mapping[str, Any],
    precision: Precision,
    model: nn.Module,
    batches: list[MicroBatch],
) -> dict[str, Values]:
    """As `values_of`, where every error of the user's code is one line.

    Raises:
        RunFailedError: there was one.
    """
    precision.begin_step(1)  # whose number the random bits of stochastic rounding need
    try:
        pairs = [(part.inputs, part.content) for part in batches]
        return values_of(quantities, precision, model, pairs)
    except RunFailedError:
        raise
    except Exception as error:
        raise RunFailedError(f"quantities: {described(error)}") from error


def quantity_rows(
    plan: Plan, parts: TrainingComponents, warn: Callable[[str], None]
) -> dict[str, QuantityRow]:
    """The record of the quantities of a run that has ended; what is missing is a warning."""
    quantities = quantities_of(plan.recipe)
    if not quantities:
        return {}
    if plan.config.parallel.world_size > 1:
        warn("quantities are not computed in a run of several processes")
        return {}
    eager = torch.compiler.set_stance("force_eager") if plan.speed.compile else nullcontext()
    split, batches = held_out_batches(plan)
    note, exact = "", dict[str, Values]()
    try:
        with eager:
            own = measured(quantities, parts.precision, parts.model, batches)
    except RunFailedError as error:
        warn(str(error))
        return {}
    try:
        exact = QuantityProbe(in_policy(plan, policy_of(EXACT))).values(parts.model.state_dict())
    except Exception as error:  # a device without float64, code of the user's: the run is kept
        note = f"not computed in float64: {error}"
        warn(note)
    return {
        name: quantity_row(split, batches, value, exact.get(name), note)
        for name, value in own.items()
    }
