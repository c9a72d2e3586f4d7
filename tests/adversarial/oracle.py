"""The truth about a case: PyTorch's own tools train it, mprun has no part in it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.adversarial.models import CASES, Points, loss_of, points

STEPS = 200
BATCH = 64
SAMPLES = 512
LOST_ACCURACY = 0.05
"""A mode fails a case where its accuracy is this much below float32's."""
LOST_STEPS = 0.2
"""It fails as well where this share of its steps could not be taken."""


class Outcome(NamedTuple):
    """What a training came to."""

    accuracy: float
    """On unseen samples, from 0 to 1; 0 where outputs are not finite."""
    skipped: float
    """The share of steps that could not be taken, because a gradient was not finite."""


def fails(low: Outcome, exact: Outcome) -> bool:
    """Whether a mode loses what float32 (`exact`) has."""
    return low.accuracy < exact.accuracy - LOST_ACCURACY or low.skipped > LOST_STEPS


def _region(mode: str) -> AbstractContextManager[object]:
    if not mode.endswith("_mixed"):
        return contextlib.nullcontext()
    return torch.autocast("cpu", torch.bfloat16 if mode.startswith("bf16") else torch.float16)


def _outputs(model: nn.Module, x: Tensor, mode: str) -> Tensor:
    if mode.endswith("_true"):
        x = x.to(next(model.parameters()).dtype)
    with _region(mode):
        out: Tensor = model(x)
    return out.float()


def trained(case: str, mode: str, seed: int) -> Outcome:
    """Train a case for `STEPS` steps of AdamW at 1e-2.

    Args:
        case: a key of `CASES`.
        mode: fp32, fp64, or one of `MODES`; the 16-bit parameters of `*_true` are rounded from
            float32 ones after each step, so that only the arithmetic differs.
        seed: of weights, samples and order.
    """
    torch.manual_seed(seed)
    outlier = CASES[case].outlier
    train = points(SAMPLES, 1000 + seed, outlier)
    test = points(4 * SAMPLES, 2000 + seed, outlier)
    master = CASES[case].model()
    loss_of_case = loss_of(case)
    model = CASES[case].model()
    model.load_state_dict(master.state_dict())
    if mode == "fp64":
        model, train, test = model.double(), _wide(train), _wide(test)
    if mode.endswith("_true"):
        model = model.to(torch.bfloat16 if mode.startswith("bf16") else torch.float16)
    optimizer = torch.optim.AdamW(
        (master if mode.endswith("_true") else model).parameters(), lr=1e-2
    )
    scaler = torch.amp.GradScaler("cpu", enabled=mode == "fp16_mixed")
    order, skipped = torch.Generator().manual_seed(seed), 0
    for _ in range(STEPS):
        rows = torch.randperm(SAMPLES, generator=order)[:BATCH]
        optimizer.zero_grad()
        model.zero_grad()
        out = (
            model(train.inputs[rows])
            if mode == "fp64"
            else _outputs(model, train.inputs[rows], mode)
        )
        loss = loss_of_case(out, train.targets[rows])
        if not mode.endswith("_true"):
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < scale
            continue
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        if not all(g is None or bool(g.isfinite().all()) for g in gradients):
            skipped += 1
            continue
        for p, g in zip(master.parameters(), gradients, strict=True):
            p.grad = None if g is None else g.float()
        optimizer.step()
        with torch.no_grad():
            for low, p in zip(model.parameters(), master.parameters(), strict=True):
                low.copy_(p)
    model.eval()
    with torch.no_grad():
        out = model(test.inputs) if mode == "fp64" else _outputs(model, test.inputs, mode)
    right = float(out.argmax(1).eq(test.targets).float().mean())
    return Outcome(right if out.isfinite().all() else 0.0, skipped / STEPS)


def _wide(part: Points) -> Points:
    return part._replace(inputs=part.inputs.double())
