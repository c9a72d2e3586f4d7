"""Training steps in blocks, for comparing two ways of taking them turn by turn."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from datetime import date

import torch

from mprun.precision import backend_flags
from mprun.train.assemble import Plan
from mprun.train.loop import Trainer
from mprun.train.machine.machine import cpu_name, usable_cores


def step_blocks(plan: Plan, trainer: Trainer, steps: int) -> Iterator[float]:
    """Seconds per step on the first batch, block after block, after one that warms up."""
    taken = next(trainer.parts.train.epoch(None))
    for block in itertools.count():
        with backend_flags(plan.policy):
            start = time.perf_counter()
            for _ in range(steps):
                trainer.optimizer_step(taken)
            took = (time.perf_counter() - start) / steps
        if block:
            yield took


def heading(blocks: int) -> str:
    """Date, machine, versions and how often: a line above figures."""
    return (
        f"{date.today()}  {cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; {blocks} alternating blocks"
    )
