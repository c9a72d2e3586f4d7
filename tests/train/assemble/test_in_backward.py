"""Parameters that are updated in the backward pass: the same bits, fewer gradients at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mprun.config import compose
from mprun.errors import UsageError
from mprun.precision import backend_flags
from mprun.train.assemble import Plan, build_parts, make_plan
from mprun.train.assemble.planned_memory import step_memory
from mprun.train.loop import Limits, Trainer

SMALL = [
    *("recipe=char_gpt", "data.source=generated", "device=cpu", "recipe.model.layers=4"),
    *("recipe.model.width=64", "recipe.model.context=16", "train.batch_size=4", "speed=plain"),
    *("execution=native", "train.clip_norm=null", "data.eval_limit=8"),
]
EARLY = "speed.optimizer_in_backward=true"


def planned(*words: str) -> Plan:
    return make_plan(compose([*SMALL, *words]).config, ())


def trained(plan: Plan, steps: int = 4) -> list[Tensor]:
    with backend_flags(plan.policy):
        parts = build_parts(plan)
        Trainer(parts, Limits(None, steps, None)).fit()
    state = parts.optimizer.state
    entries = [x for p in parts.model.parameters() for _, x in sorted(state[p].items())]
    return [*(p.detach() for p in parts.model.parameters()), *entries]


@pytest.mark.parametrize(
    "words",
    [
        ["precision=fp32"],
        ["precision=bf16_mixed", "train.optimizer.name=sgd", "train.optimizer.momentum=0.9"],
        ["precision=bf16_sr"],
        ["precision=bf16_true", "precision.rounding=split", "precision.variance_dtype=uint8"],
    ],
    ids=lambda words: words[0],
)
def test_the_bits_are_those_of_a_step_at_the_end(words: list[str]) -> None:
    late, early = trained(planned(*words)), trained(planned(*words, EARLY))
    assert len(late) == len(early)
    assert all(torch.equal(a, b) for a, b in zip(late, early, strict=True))


def test_gradients_leave_the_peak() -> None:
    """By C kernels: the temporary tensors of the eager engine would be a peak of their own."""
    words = ("precision=bf16_sr", "speed=auto", "train.batch_size=1", "recipe.model.context=4")
    late, early = (step_memory(planned(*words, *more)).categories for more in ((), (EARLY,)))
    assert early["gradients"] < late["gradients"] / 4
    assert sum(early.values()) < sum(late.values())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["train.clip_norm=1"], "train.clip_norm needs the norm of all gradients"),
        (["precision=fp16_mixed"], "a step with a loss scale may be skipped"),
        (["train.accumulate=2"], "gradients of 2 passes are added up"),
        (["precision=half_sr_full", "execution=auto"], "a step with a loss scale may be skipped"),
        (["debug.fp_exceptions=log"], "debug.fp_exceptions inspects gradients"),
    ],
)
def test_what_needs_all_gradients_is_refused(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=f"optimizer_in_backward=true: {reason}; legal is false"):
        planned(*words, EARLY)
