"""Which random bits a parameter is rounded with; updates below float32's resolution; refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mprun.optim import AdamW, LowPrecisionOptimizer
from mprun.precision import Precision, kernels
from tests.optim import BRAIN, HALF, MAKE, give

CPU = torch.device("cpu")


def equal_layers() -> list[nn.Linear]:
    """Four layers with the same weights and the same gradients: what differs is their bits."""
    layers = [nn.Linear(64, 64, bias=False).to(BRAIN) for _ in range(4)]
    for layer in layers:
        nn.init.ones_(layer.weight)
        layer.weight.grad = torch.full_like(layer.weight, 0.3)
    return layers


def rounded(optimizers: list[LowPrecisionOptimizer], layers: list[nn.Linear]) -> list[Tensor]:
    for optimizer in optimizers:
        optimizer.step()
    return [layer.weight.detach().clone() for layer in layers]


def share_equal(a: Tensor, b: Tensor) -> float:
    return (a == b).float().mean().item()


def test_optimizers_of_two_prepared_models_round_with_different_bits() -> None:
    layers = equal_layers()
    models = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]  # their names are the same
    precision = Precision("bf16_sr", device=CPU, execution="native")
    gradient = layers[0].weight.grad
    for model in models:
        precision.prepare(model, CPU)
        for p in model.parameters():
            p.grad = gradient
    optimizers = [AdamW(m.parameters(), lr=0.002) for m in models]
    a, b, c, d = rounded([*optimizers], [*models[0], *models[1]])  # type: ignore[arg-type]
    # Of 4,096 about half are rounded up: two streams agree in half, one stream in all of them.
    for x, y in ((a, b), (a, c), (a, d), (b, d), (c, d)):
        assert 0.4 < share_equal(x, y) < 0.6


def test_named_parameters_give_two_optimizers_their_own_bits() -> None:
    layers = equal_layers()
    optimizers: list[LowPrecisionOptimizer] = [
        AdamW([(f"layer{n}", layer.weight)], lr=0.002) for n, layer in enumerate(layers)
    ]
    first, *others = rounded(optimizers, layers)
    assert all(0.4 < share_equal(first, other) < 0.6 for other in others)


# ---- updates that float32 cannot see ----


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("engine", ["c", "eager"])
@pytest.mark.parametrize("start", [1.0, -1.375])
def test_a_decay_of_1e_8_is_kept_on_average(dtype: torch.dtype, engine: str, start: float) -> None:
    """Against float64's (1 - 1e-8)^steps, gradients being 0; it used to vanish altogether."""
    if engine == "c" and kernels.why_not() is not None:
        pytest.skip(f"no compiled kernels: {kernels.why_not()}")
    count, steps, decay = 400_000, 25, 1e-8
    p = nn.Parameter(torch.full((count,), start, dtype=dtype))
    p.grad = torch.zeros_like(p)
    optimizer = AdamW([p], lr=1e-6, weight_decay=1e-2, engine=engine)
    for _ in range(steps):
        optimizer.step()
    moved = (start - p.detach().double()).sum().item()
    expected = count * start * (1 - (1 - decay) ** steps)
    unit = abs(p.detach().double() - start).max().item()
    assert unit > 0
    flips = abs(expected) / unit  # a Poisson number of moves of one unit each
    assert abs(moved - expected) < 5 * unit * flips**0.5
    assert moved / expected > 0.2


@pytest.mark.parametrize("dtype", [BRAIN, HALF, torch.float32])
@pytest.mark.parametrize("engine", ["c", "eager"])
def test_a_decay_of_1e_7_has_its_size_beside_an_update(dtype: torch.dtype, engine: str) -> None:
    """The factor 1 - 1e-7 is 1 - 1.19e-7 in float32: 19 % too much. With a first-moment update of
    lr in the same step, float32 sees the sum; its own rounding is 6e-8 at most.
    """
    if engine == "c" and kernels.why_not() is not None:
        pytest.skip(f"no compiled kernels: {kernels.why_not()}")
    starts = torch.linspace(0.5, 0.9921875, 128).to(dtype).repeat(4000)
    p = nn.Parameter(starts.clone())
    give(p, torch.ones_like(starts))
    other = nn.Parameter(starts.clone())
    give(other, torch.ones_like(starts))
    lr = 2.0**-12
    AdamW([p], lr=lr, weight_decay=1e-7 / lr, eps=0.0, engine=engine).step()
    AdamW([other], lr=lr, weight_decay=0.0, eps=0.0, engine=engine).step()
    # The same random bits: the difference of both means is the decay.
    decay = (other.detach().double() - p.detach().double()).mean() / starts.double().mean()
    if dtype == torch.float32:
        assert decay.item() == pytest.approx(1e-7, rel=0.05)
    else:
        assert 0.2e-7 < decay.item() < 1.8e-7


# ---- refusals ----


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("scaled", [False, True])
def test_sparse_gradients_are_refused_in_one_clear_line(name: str, scaled: bool) -> None:
    table = nn.Embedding(4, 2, sparse=True).to(HALF)
    before = table.weight.detach().clone()
    optimizer = MAKE[name](table.parameters())
    table(torch.tensor([1])).float().sum().backward()
    refusal = r"^mprun\.optim\.\w+ does not take sparse gradients.*; legal: dense ones"
    with pytest.raises(RuntimeError, match=refusal):
        optimizer.scaled_step(torch.ones(()), 1.0) if scaled else optimizer.step()
    assert torch.equal(table.weight, before)
