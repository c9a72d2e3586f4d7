"""The memory of a plan's training step."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from mprun.assemble.parts import build_parts
from mprun.assemble.plan import Plan, batch_sizes
from mprun.nested import all_tensors
from mprun.numerics.memory_recorder import fake_tensors, memory
from mprun.numerics.step_memory import StepMemory
from mprun.train.init_from import DRAWN
from mprun.train.loop import Trainer


def step_memory(plan: Plan) -> StepMemory:
    """The tensors alive during one training step of this plan, on fake tensors.

    The batch is never larger than the training set, unless the plan was made with `load_shapes`.
    """
    splits, device = plan.splits, plan.device
    known = splits.train.device.type != "meta"
    rows = min(plan.batch.effective, len(splits.train) if known else sys.maxsize)

    def fake(like: torch.Tensor) -> torch.Tensor:
        return torch.empty(rows, *like.shape[1:], dtype=like.dtype, device=device)

    with fake_tensors():
        samples = splits.train.map(fake)
        none = samples.first(0)
        parts = build_parts(
            replace(
                plan,
                splits=replace(splits, train=samples, validation=none, test=none),
                execution="native",  # what a mode needs, not what emulating it takes
                policy=replace(plan.policy, partials_dtype="float32"),
                fp32_fallback="none",
                weights=DRAWN,  # fake tensors have no values to load into
            ),
            counted=False,
        )
        batch = next(parts.train.epoch(None))
        trainer = Trainer(parts, plan.limits)
        return memory(
            lambda: trainer.optimizer_step(batch),
            parts.model,
            parts.optimizer,
            all_tensors([(part.content, part.inputs) for part in batch.parts]),
        )


def with_batch_size(plan: Plan, size: int) -> Plan:
    """The plan with `train.batch_size=size`, without its preset's cap."""
    train = replace(plan.config.train, batch_size=size)
    preset = replace(plan.config.preset, max_batch_size=None)
    batch, _ = batch_sizes(replace(plan.config, train=train, preset=preset))
    return replace(plan, batch=batch)


def footprint(plan: Plan) -> dict[str, int]:
    """Bytes alive at the peak of that step, by category, as in a record's `memory_bytes`."""
    return step_memory(plan).totals
