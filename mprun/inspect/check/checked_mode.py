"""A mode that is checked: its plan, float32's, and the batches that both run on.

The batches are the first samples of the training data, in the stored order, the same in all modes.
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from torch import nn

from mprun.inspect.check.check_result import CheckSettings, ModeChecks
from mprun.precision import Arithmetic
from mprun.study.planned_run import PlannedRun, PolicyProbe
from mprun.train.assemble import Plan, step_memory
from mprun.train.assemble.parts import build_batches, build_parts
from mprun.train.data import Batch
from mprun.train.data.random_numbers import untouched
from mprun.train.loop import Trainer
from mprun.watch.memory_recorder import StepMemory

# Different batches of the steps that are trained: few, so that each is visited several times and
# its losses can be compared
BATCHES = 4


@dataclass
class CheckedMode:
    """One mode of a check; the functions of `check_*.py` look at it."""

    planned: PlannedRun
    exact: Plan  # The same recipe in float32
    settings: CheckSettings
    checks: ModeChecks
    shared: dict[str, Any] = field(default_factory=dict)
    """What was computed once, for all modes with the same float32."""
    ends: float = math.inf  # When the mode's share of the budget is used up, by `time.monotonic`

    @property
    def left_s(self) -> float:
        """Seconds of its share that are left."""
        return self.ends - time.monotonic()

    @property
    def plan(self) -> Plan:
        """The mode's plan."""
        return self.planned.plan

    @cached_property
    def batches(self) -> list[Batch]:
        """`BATCHES` batches, or as many as there are, in the mode's input dtype."""
        return batches_of(self.plan, self.settings.samples)

    @cached_property
    def exact_batches(self) -> list[Batch]:
        """The same in float32."""
        return batches_of(self.exact, self.settings.samples)

    @cached_property
    def memory(self) -> StepMemory:
        """The memory of a step, counted on fake tensors where the model allows it."""
        with untouched():  # its model draws weights, which must not change those of the mode
            return step_memory(self.plan)

    def trainer(self, exact: bool = False) -> Trainer:
        """A new training of the mode, or of float32, at its start: take steps on `batches`."""
        plan = self.exact if exact else self.plan
        return Trainer(build_parts(plan), plan.limits)

    def start(self, exact: bool = False) -> nn.Module:
        """A new model with the first weights of the run, prepared for the mode."""
        return self.trainer(exact).parts.model

    def probe(self, exact: bool = False, arithmetic: Arithmetic | None = None) -> PolicyProbe:
        """A probe of the mode's policy, or of float32's, for passes beside the run.

        Args:
            exact: float32's.
            arithmetic: whose kernels compute; None: PyTorch's.
        """
        plan = self.exact if exact else self.plan
        return PolicyProbe(plan, plan.policy, arithmetic)


def batches_of(plan: Plan, at_most: int) -> list[Batch]:
    """The first batches of the training data, in the stored order."""
    size = min(plan.batch.micro, at_most)
    batches, order = build_batches(plan, plan.splits.train, size, size, shuffle=False)
    with closing(iter(batches.epoch(order.draw()))) as stream:  # ends loader processes at once
        return list(islice(stream, BATCHES))
