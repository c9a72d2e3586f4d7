"""The learning-rate schedule of a run: the configuration's, or the recipe's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
)

from mprun.assemble.optimizer_class import article
from mprun.config.schema import Scheduler, TrainConfig
from mprun.errors import UsageError
from mprun.recipe import Recipe
from mprun.train.schedule import Schedule


def warmup_warning(train: TrainConfig, steps: int | None, given: Sequence[str]) -> str | None:
    """A sentence if the recipe's warm-up is longer than the planned optimizer steps.

    Args:
        train: the configuration.
        steps: that are planned; None where only time ends the run.
        given: the fields that the user set.

    Raises:
        UsageError: the user set such a warm-up.
    """
    if steps is None or train.warmup_steps <= steps:
        return None
    if "train.warmup_steps" not in given:
        return f"the run's {steps} steps end within the recipe's warm-up of {train.warmup_steps}"
    raise UsageError(
        f"train.warmup_steps={train.warmup_steps}: the run has {steps} optimizer steps "
        f"(train.epochs, train.max_steps); legal is at most {steps}"
    )


def build_schedule(
    train: TrainConfig, recipe: Recipe, optimizer: Optimizer, steps: int | None
) -> Schedule:
    """The recipe's own schedule, or the configuration's over the planned optimizer steps.

    Raises:
        UsageError: the recipe's `schedule` gives something else.
    """
    if recipe.makes_schedule:
        return Schedule(_recipes_own(recipe, optimizer))
    if train.warmup_steps or train.min_lr:
        lowest = 0.0 if train.scheduler is Scheduler.none else train.min_lr
        curve = CURVES[train.scheduler]
        bases = [float(group["lr"]) for group in optimizer.param_groups]
        factors = [factor(curve, train.warmup_steps, steps or 1, lowest / base) for base in bases]
        return Schedule(LambdaLR(optimizer, factors))
    if train.scheduler is Scheduler.none or steps is None:
        return Schedule()
    if train.scheduler is Scheduler.cosine:
        return Schedule(CosineAnnealingLR(optimizer, T_max=steps))
    return Schedule(LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps))


CURVES: dict[Scheduler, Callable[[float], float]] = {
    Scheduler.none: lambda _: 1.0,
    Scheduler.linear: lambda done: 1 - done,
    Scheduler.cosine: lambda done: (1 + math.cos(math.pi * done)) / 2,
}
"""The share of the fall that is left, by the share of the steps after the warm-up."""


def factor(
    curve: Callable[[float], float], warmup: int, steps: int, lowest: float
) -> Callable[[int], float]:
    """What the learning rate is multiplied by in a step, counted from 0.

    It is (step + 1) / warmup in the warm-up. Then it falls along the curve from 1 to `lowest`,
    which it would reach one step after the last.
    """

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return lowest + (1 - lowest) * curve(done)

    return at


def _recipes_own(recipe: Recipe, optimizer: Optimizer) -> LRScheduler:
    name = f"schedule(optimizer) of {type(recipe).__name__}"
    schedule = recipe.schedule(optimizer)
    if not isinstance(schedule, LRScheduler):
        raise UsageError(
            f"{name} gave {article(schedule)}; legal is a scheduler of torch.optim.lr_scheduler"
        )
    if isinstance(schedule, ReduceLROnPlateau):
        raise UsageError(
            f"{name} gave ReduceLROnPlateau, which needs a score, and mprun steps a schedule after "
            "each optimizer step; legal: any other of torch.optim.lr_scheduler"
        )
    return schedule
