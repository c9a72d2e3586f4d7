"""A float32 model in float64: the same model, the same random numbers, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.inspect.passes import in_float64

Function = Callable[[Tensor], Tensor]


class Written(nn.Module):
    """Two layers with something between them that code may hold."""

    def __init__(self, between: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.register_buffer("table", torch.randn(32))
        self.plain = torch.randn(32)  # no buffer: stays float32
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x)) * self.table + self.plain)
        return out


def made(x: Tensor) -> Tensor:
    """Tensors that the code makes, written into, and cast."""
    zeros = torch.zeros(x.shape)
    zeros[:, :8] = x[:, :8].float()
    return zeros + x.to(torch.float32) @ torch.eye(32) + torch.ones_like(x, dtype=torch.float32)


BETWEEN: dict[str, Function] = {
    "tanh": torch.tanh,
    "made": made,
    "dropout": lambda x: F.dropout(x, 0.4),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randn": lambda x: x + torch.randn(x.shape),
    "rand of its dtype": lambda x: x * torch.rand(x.shape, dtype=x.dtype),
    "in place": lambda x: x + torch.empty_like(x).normal_() + torch.empty_like(x).uniform_(),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "normal": lambda x: x + torch.distributions.Normal(torch.zeros_like(x), 1.0).rsample(),
    "integers": lambda x: x[torch.randperm(len(x))],
}


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    loss = F.cross_entropy(model(x), y)
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_it_is_the_same_model_with_errors_a_billionth_as_large(between: Function) -> None:
    """The oracle is float32: 24 bits of it are about 140 dB, of which sums lose some."""
    model = Written(between)
    x, y = torch.randn(64, 16), torch.randint(0, 4, (64,))
    loss, found = gradients(model, x, y)
    with in_float64(model):
        exact_loss, exact = gradients(model, x, y)
    assert exact_loss.dtype == torch.float64
    assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-6)
    for low, true in zip(found, exact, strict=True):
        assert true.dtype == torch.float64
        assert 0 < (low - true).norm() < 1e-5 * true.norm()


def test_the_values_are_those_of_a_model_in_float64() -> None:
    """The oracle is PyTorch's own `double`, bit for bit."""
    x, y = torch.randn(64, 16), torch.randint(0, 4, (64,))
    model, wide = Written(torch.tanh), Written(torch.tanh).double()
    with in_float64(model):
        loss, found = gradients(model, x, y)
    expected_loss, expected = gradients(wide, x.double(), y)
    assert loss == expected_loss
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    model = Written(torch.tanh)
    model(torch.randn(4, 16)).sum().backward()
    kept = [*model.parameters(), *model.buffers()]
    before = [(x, x.data_ptr(), x.grad) for x in kept]
    with pytest.raises(RuntimeError) if fails else torch.enable_grad(), in_float64(model):
        model(torch.randn(4, 17 if fails else 16)).sum().backward()
    after = [*model.parameters(), *model.buffers()]
    for (old, address, gradient), new in zip(before, after, strict=True):
        assert new is old
        assert (new.dtype, new.data_ptr()) == (torch.float32, address)
        assert new.grad is gradient
    assert torch.zeros(1).dtype == torch.float32
