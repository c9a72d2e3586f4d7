"""The error that an arithmetic makes in a recipe's quantities, beside what training leaves open.

Both have the unit of every error here, the SQNR in dB over all entries of a quantity (20 dB: a
tenth of it):

    arithmetic    q in a precision against q in float64, by the same weights
    training      the spread of q in float64 over models that were trained from other seeds, on the
                  same samples and for as many steps

An arithmetic whose error is far below the spread changes nothing that the training knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mprun.inspect.numerics import SEEDS, QuantityError
from mprun.precision.policy import policy
from mprun.precision.rounding import sums_db
from mprun.study.planned_run import FLOAT32_MODE
from mprun.train.assemble import Plan
from mprun.train.assemble.parts import build_parts
from mprun.train.assemble.quantity_probe import EXACT, QuantityProbe, in_policy
from mprun.train.data.random_numbers import untouched
from mprun.train.loop import Limits, Trainer
from mprun.train.recipe_quantities import quantities_of


def trained_weights(plan: Plan, steps: int, seed: int) -> dict[str, Tensor]:
    """The weights of a float32 training from another seed, on the plan's samples."""
    exact = in_policy(plan, policy(FLOAT32_MODE))
    none = plan.splits.train.first(0)  # no samples: nothing is evaluated between the steps
    splits = replace(plan.splits, validation=none, test=none)
    config = replace(exact.config, seed=seed)
    other = replace(exact, config=config, splits=splits)
    with untouched(), other.backend_flags():
        trainer = Trainer(build_parts(other), Limits(None, steps, None))
        trainer.fit()
    return {name: x.detach().clone() for name, x in trainer.parts.model.state_dict().items()}


def exact_values(
    plan: Plan, weights: Mapping[str, Tensor], steps: int
) -> dict[str, tuple[Tensor, float]]:
    """Each quantity in float64 by these weights, which took so many steps, and its training_db.

    Raises:
        RunFailedError: a quantity cannot be computed.
    """
    if not quantities_of(plan.recipe):
        return {}
    probe, first = QuantityProbe(in_policy(plan, policy(EXACT))), plan.config.seed
    seeds = range(first + 1, first + SEEDS)
    others = [probe.values(trained_weights(plan, steps, seed)) for seed in seeds]
    exact = {}
    for name, own in probe.values(weights).items():
        value = own.entries
        every = torch.stack([value, *(other[name].entries for other in others)])
        exact[name] = value, sums_db(float(value.square().sum()), float(every.var(0).sum()))
    return exact


def quantity_errors(
    exact: Mapping[str, tuple[Tensor, float]],
    weights: Mapping[str, Tensor],
    plans: Mapping[str, Plan],
    steps: int,
) -> list[QuantityError]:
    """The errors of each plan by the weights of `exact_values`."""
    made = {name: QuantityProbe(own).values(weights) for name, own in plans.items() if exact}
    return [
        QuantityError(
            name, {m: sums_db(*own[name].powers(value)) for m, own in made.items()}, left, steps
        )
        for name, (value, left) in exact.items()
    ]
