"""Weights a few float32 steps on: what a training has, where drawn weights are only its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from mprun.assemble import Plan, build_parts
from mprun.precision import backend_flags
from mprun.train.callbacks import NoObserver
from mprun.train.loop import Limits, Trainer


def weights_after(plan: Plan, steps: int) -> Mapping[str, Tensor]:
    """The model's state after so many steps of a plan, without validation."""
    splits = replace(plan.splits, validation=plan.splits.validation.first(0))
    with backend_flags(plan.policy, plan.native_tf32):
        parts = build_parts(replace(plan, splits=splits))
        if steps:
            Trainer(parts, Limits(None, steps, None), NoObserver(), lambda: False).fit()
    state: Mapping[str, Tensor] = parts.model.state_dict()
    return state
