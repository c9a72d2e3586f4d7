"""The largest gradient of a backward pass, wherever it arises."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mprun.inspect.collect import PARAMETER, GradientSource, LargestGradients


class Inside(nn.Module):
    """A large gradient between two functions: of no module's output and no parameter."""

    def forward(self, x: Tensor) -> Tensor:
        inner = x * 1e-6
        return torch.tanh(inner * 1e6)


def looked(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> LargestGradients:
    seen = LargestGradients()
    with seen.following(model):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            y = model(x)
        y.float().sum().backward()
    return seen


def test_one_that_no_module_gives_is_found_with_its_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Inside())
    size, place = looked(model, torch.zeros(1, 2)).worst()
    assert (place, size) == (GradientSource("1", "Mul", torch.float32), pytest.approx(1e6, rel=1))
    assert str(place) == "Mul in 1"


def test_every_gradient_autograd_has_is_looked_at() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    seen = looked(model, x).magnitudes
    first, _, last = model
    hidden = torch.tanh(first(x))
    by_hidden = torch.ones(5, 2) @ last.weight
    wanted = {
        "2.weight": last.weight.grad,
        "2.bias": last.bias.grad,
        "0.weight": first.weight.grad,
        "0.bias": first.bias.grad,
        "Tanh in 1": by_hidden,
        "Addmm in 0": by_hidden * (1 - hidden**2),
        "Addmm in 2": torch.ones(1),
    }
    found: dict[str, float] = {}
    for place, size in seen.items():
        found[str(place)] = max(size, found.get(str(place), 0))
    assert found == pytest.approx({k: v.abs().max().item() for k, v in wanted.items()}, rel=1e-5)


def test_only_float16_counts_where_there_is_some() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))  # autocast: softmax in float32
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    seen = looked(model, x, torch.float16)
    dtypes = {place.dtype for place in seen.magnitudes}
    assert dtypes == {torch.float16, torch.float32}
    _, place = seen.worst()
    assert place is not None
    assert place.dtype == torch.float16
    assert looked(model, x, torch.bfloat16).worst()[1] is not None


def test_weights_cast_by_autocast_are_called_by_their_names() -> None:
    model = nn.Linear(4, 4)
    seen = looked(model, torch.ones(64, 4), torch.float16)
    size, place = seen.worst()
    assert place in (
        GradientSource("weight", PARAMETER, torch.float16),
        GradientSource("bias", PARAMETER, torch.float16),
    )
    assert (str(place), size) in (("weight", 64.0), ("bias", 64.0))


def test_overflow_is_infinite_and_so_is_nan() -> None:
    assert looked(nn.Linear(2, 2), torch.full((1, 2), math.inf)).worst()[0] == math.inf
    assert looked(nn.Linear(2, 2), torch.full((1, 2), math.nan)).worst()[0] == math.inf


def test_the_scale_is_divided_by() -> None:
    model, seen = nn.Linear(2, 2), LargestGradients(lambda: 1024.0)
    with seen.following(model):
        (model(torch.ones(1, 2)).sum() * 1024).backward()
    assert seen.worst()[0] == 1.0


def test_the_loss_s_own_nodes_are_looked_at_where_it_is_given() -> None:
    model, seen = nn.Linear(2, 2), LargestGradients()
    with seen.following(model):
        loss = model(torch.ones(1, 2)).half().sum() * 0.125
        seen.follow(loss)
        loss.backward()
    size, place = seen.worst()
    assert (size, str(place)) == (1.0, "Mul in the loss")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.inside = nn.Linear(2, 2), Inside()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inside, self.a(x), use_reentrant=reentrant)
            return out

    size, place = looked(Model(), torch.zeros(1, 2)).worst()
    assert (str(place), size) == ("Mul in inside", pytest.approx(1e6, rel=1))


def test_two_calls_before_one_backward_pass() -> None:
    model, seen = nn.Linear(2, 2), LargestGradients()
    with seen.following(model):
        first = model(torch.full((1, 2), 5.0))
        (first * 100 + model(torch.ones(1, 2))).sum().backward()
    assert max(v for p, v in seen.magnitudes.items() if p.op == "Addmm") == 100


def test_what_comes_after_or_before_is_not_looked_at() -> None:
    model, seen = nn.Linear(2, 2), LargestGradients()
    early = model(torch.ones(1, 2)).sum()
    with seen.following(model):
        early.backward()
        late = model(torch.ones(1, 2)).sum()
    late.backward()
    with torch.no_grad(), seen.following(model):
        model(torch.ones(1, 2))
    assert seen.magnitudes == {}
    assert seen.worst() == (0.0, None)
