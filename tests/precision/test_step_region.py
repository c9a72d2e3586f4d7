"""Autocast casts a weight once per step, however many passes the step has; no bit changes."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mprun.precision import AutocastCaster, Caster
from mprun.precision._torch import OpOverload, TorchDispatchMode
from tests.each import each

PASSES = 3


class Plain(nn.Module):
    """Two layers; `kind` says whether the second one is computed again in the backward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(6, 5), nn.Linear(5, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "plain":
            return torch.as_tensor(self.second(x))
        if self.kind == "without gradients first":
            with torch.no_grad():
                self.second(x)
            return torch.as_tensor(self.second(x))
        return torch.as_tensor(checkpoint(self.second, x, use_reentrant=self.kind == "reentrant"))


class WeightCasts(TorchDispatchMode):
    """Counts the casts of tensors of a shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert isinstance(func, OpOverload)
        if func is torch.ops.aten._to_copy.default and tuple(args[0].shape) == self.shape:
            self.count += args[0].dtype == torch.float32
        return func(*args, **(kwargs or {}))


def step(model: nn.Module, caster: Caster, around: AbstractContextManager[object]) -> None:
    generator = torch.Generator().manual_seed(1)
    with around:
        for _ in range(PASSES):
            x = torch.randn(3, 6, generator=generator)
            with caster.region():
                output = model(x)
            caster.backward(output.float().square().mean())


@each("kind", ["plain", "reentrant", "not reentrant", "without gradients first"])
def test_a_weight_is_cast_once_per_step_with_the_same_gradients(kind: str) -> None:
    caster = AutocastCaster("cpu", torch.bfloat16, keep=True)
    rows, counts = [], []
    for kept in (False, True):
        torch.manual_seed(0)
        model = Plain(kind)
        for _ in range(2):  # the second step sees the weights that the first one changed
            around = caster.step_region() if kept else nullcontext()
            with WeightCasts((5, 6)) as casts:
                step(model, caster, around)
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p -= 0.1 * p.grad
        counts.append(casts.count)
        rows.append([x.detach() for p in model.parameters() for x in (p, p.grad) if x is not None])
    assert counts == [PASSES, 1]
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))


def test_nothing_is_kept_after_the_step_nor_after_one_that_failed() -> None:
    model, caster = nn.Linear(6, 5), AutocastCaster("cpu", torch.bfloat16, keep=True)
    x = torch.randn(2, 6)
    with contextlib.suppress(ValueError), caster.step_region(), caster.region():
        model(x)
        raise ValueError
    with torch.no_grad():
        model.weight.mul_(2)
    with caster.region():
        after = model(x)
    expected = nn.functional.linear(x.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16())
    assert torch.equal(after, expected)
