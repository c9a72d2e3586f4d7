"""Float32 copies in emulation: always of the value of the 16-bit tensor, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.precision import Emulated16, emulate, kernels
from mprun.precision.emulate import WideCopies
from tests.each import each
from tests.precision import normal

LOW = [torch.float16, torch.bfloat16]
COMPILED = pytest.mark.skipif(
    kernels.why_not() is not None, reason="copies come from a C loop, which is not here"
)


# ---- when a copy is valid ----------------------------------------------------------------------


def kept(copies: WideCopies, *shape: int) -> Tensor:
    low = normal(*shape).bfloat16()
    copies.keep(low, low.float())
    return low


def is_copy(wide: Tensor | None, low: Tensor) -> bool:
    expected = low.float()
    return wide is not None and torch.equal(wide, expected) and wide.stride() == expected.stride()


@each(
    "view",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[2:],
        lambda x: x.view(3, 8),
        lambda x: x.detach(),
        lambda x: x.unsqueeze(1),
    ],
)
def test_views_share_the_copy_of_their_storage(view: Callable[[Tensor], Tensor]) -> None:
    copies = WideCopies()
    low = view(kept(copies, 6, 4))
    assert is_copy(copies.get(low), low)


@each("view", [lambda x: x[:, 1:], lambda x: x[:1].expand(6, 4)])
def test_a_view_with_gaps_or_overlaps_has_none(view: Callable[[Tensor], Tensor]) -> None:
    copies = WideCopies()
    assert copies.get(view(kept(copies, 6, 4))) is None  # its `float()` is laid out differently


def test_a_write_a_new_generation_and_another_owner_end_a_copy() -> None:
    copies = WideCopies()
    low = kept(copies, 4)
    assert WideCopies().get(low) is None
    low[1:].mul_(2)
    assert copies.get(low) is None
    low = kept(copies, 4)
    copies.invalidate()
    assert copies.get(low) is None


def test_a_copy_is_taken_once_and_by_its_whole_tensor_alone() -> None:
    copies = WideCopies()
    low = kept(copies, 6, 4)
    assert copies.take(low[2:]) is None
    low = low.t()
    wide = copies.take(low)
    assert is_copy(wide, low)
    assert copies.take(low) is None
    assert copies.get(low) is None


# ---- emulation with and without copies ---------------------------------------------------------


class Mixed(nn.Module):
    """Ops that move, select, view, write in place and through `.data`, between ops that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.fc = nn.Linear(36, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = self.norm(x).flatten(1)
        x = F.dropout(self.fc(x), 0.0, training=True)
        y = x * 1.5
        y.add_(x)  # what `x * 1.5` kept is stale now
        y = y + 0.5
        with torch.no_grad():
            y.data.mul_(1.25)  # not counted as a write to `y`
        y = y.sin()
        y = torch.cat([y[:, 4:], y[:, :4]], 1).exp() * y.t().t()
        z = self.out(y).float()
        z = z.add(1) + self.out(y).float().mul_(2)
        return self.out(z.clamp(-3, 3).to(y.dtype)).relu_() * z


def trained(dtype: torch.dtype, rounding: str, casts: bool) -> list[Tensor]:
    """The output and the gradients of two steps of two micro-batches, and an evaluation."""
    torch.manual_seed(0)
    model, arithmetic = Mixed(), Emulated16(rounding, "infinity", "float32", 0)
    if not casts:
        model = model.to(dtype)
    results: list[Tensor] = []
    for step in (1, 2):
        arithmetic.begin_step(step)
        for part in range(2):
            x = normal(3, 2, 8, 8, seed=10 * step + part)
            with arithmetic.region():
                with torch.autocast("cpu", dtype, enabled=casts):
                    output = model(x if casts else x.to(dtype))
                loss = output.float().square().mean()
            with arithmetic.region():
                loss.backward()
        arithmetic.end_step()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                results.append(p.grad.clone())
                p.data.add_(p.grad, alpha=-0.1)
                p.grad = None
    with torch.inference_mode(), arithmetic.region():
        results.append(model(normal(3, 2, 8, 8).to(torch.float32 if casts else dtype)).clone())
    return [output.detach(), *results]


@COMPILED
@pytest.mark.filterwarnings("ignore:dropout")
@each("rounding", ["nearest", "stochastic"])
@each("dtype", LOW, ids=str)
def test_copies_change_no_bit(
    dtype: torch.dtype, rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = [False] if rounding == "stochastic" else [False, True]
    with_copies = [trained(dtype, rounding, casts) for casts in modes]
    rounded: list[int] = []

    def without(x: Tensor, *_: object) -> None:
        rounded.append(x.numel())

    monkeypatch.setattr(emulate, "round_twice", without)
    plain = [trained(dtype, rounding, casts) for casts in modes]
    assert rounded
    for ours, expected in zip(with_copies, plain, strict=True):
        assert all(map(torch.equal, ours, expected))
