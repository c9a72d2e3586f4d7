"""`mprun.diff` names the planted module first, and nothing on healthy pairs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mprun
from mprun.inspect.divergence import Side


class Attention(nn.Module):
    """Self-attention with its products in its own code, beside linear children."""

    def __init__(self, rounds: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self._rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 4
        if self._rounds:
            scores = scores.bfloat16().float()
        return scores.softmax(-1) @ self.v(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(20, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(32, 5)),
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 8, 3)),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 5)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, torch.randn(16, 20, generator=torch.Generator().manual_seed(1))),
    "cnn": (cnn, torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))),
    "transformer": (Transformer, torch.arange(48).reshape(4, 12) * 7 % 20),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


class _BackwardRounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int) -> Tensor:
        ctx.bits = bits
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return quantised(gradients[0], ctx.bits), None


def quantised(x: Tensor, bits: int) -> Tensor:
    """`x` with so many bits of mantissa, by arithmetic: no cast is seen."""
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent).to(x.dtype)


class Planted(nn.Module):
    """A module whose result, or whose gradient, is rounded; its own name and weights stay."""

    def __init__(self, inner: nn.Module, how: str, bits: int = 8) -> None:
        super().__init__()
        self._how, self._bits = how, bits
        self._forward = inner.forward
        for name, p in inner.named_parameters():
            self.register_parameter(name, p)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._forward(x)
        if self._how == "cast":
            return y.bfloat16().float()
        if self._how == "arithmetic":
            return y + (quantised(y, self._bits) - y).detach()
        return _BackwardRounded.apply(y, self._bits)  # type: ignore[no-any-return]


def plant(model: nn.Module, path: str, how: str, bits: int = 8) -> nn.Module:
    parent, _, name = path.rpartition(".")
    holder = model.get_submodule(parent)
    setattr(holder, name, Planted(model.get_submodule(path), how, bits))
    return model


PLACES = [
    ("mlp", "3"),
    ("mlp", "2"),
    ("cnn", "3"),
    ("cnn", "0"),
    ("transformer", "blocks.1.norm"),
    ("transformer", "blocks.0.mlp.2"),
    ("transformer", "blocks.1.attention.k"),
]


@pytest.mark.representative(
    "mlp-3-cast",
    "mlp-2-arithmetic",
    "cnn-3-backward",
    "cnn-0-arithmetic",
    "transformer-blocks.1.norm-backward",
    "transformer-blocks.1.attention.k-arithmetic",
)
@pytest.mark.parametrize("how", ["cast", "arithmetic", "backward"])
@pytest.mark.parametrize(("name", "path"), PLACES, ids=lambda x: str(x))
def test_the_planted_module_is_the_first(name: str, path: str, how: str) -> None:
    batch = MODELS[name][1]
    result = mprun.diff(made(name), plant(made(name), path, how), batch)
    assert result.first is not None
    phase = "backward" if how == "backward" else "forward"
    assert (result.first.module, result.first.phase) == (path, phase)
    assert result.first.b.arising > 10 * result.first.a.arising
    if how == "cast":
        assert result.first.op == "_to_copy"


def test_rounding_in_the_own_code_of_a_module_with_children_is_named() -> None:
    faulty = made("transformer")
    faulty.blocks[1].attention._rounds = True  # type: ignore[union-attr, index]
    result = mprun.diff(made("transformer"), faulty, MODELS["transformer"][1])
    assert result.first is not None
    assert result.first.module == "blocks.1.attention"
    assert (result.first.phase, result.first.op) == ("forward", "_to_copy")


def test_the_faulty_side_may_be_the_first() -> None:
    result = mprun.diff(plant(made("mlp"), "3", "cast"), made("mlp"), MODELS["mlp"][1])
    assert result.first is not None
    assert result.first.module == "3"
    assert result.first.a.arising > result.first.b.arising


@pytest.mark.parametrize("how", ["arithmetic", "backward"])
def test_a_fault_in_a_bfloat16_model_is_told_from_bfloat16(how: str) -> None:
    """Three bits of mantissa are 2^5 times as coarse as bfloat16's eight."""
    good = made("mlp").bfloat16()
    bad = plant(made("mlp").bfloat16(), "3", how, bits=3)
    result = mprun.diff(good, bad, MODELS["mlp"][1])
    assert result.first is not None
    assert result.first.module == "3"


@pytest.mark.representative(
    "same-mlp", "autocast-transformer", "bfloat16-mlp", "both-cnn", "float16-mlp"
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pair", ["same", "autocast", "bfloat16", "both", "float16"])
def test_healthy_pairs_have_no_first(name: str, pair: str) -> None:
    model, batch = made(name), MODELS[name][1]
    other = copy.deepcopy(model)
    sides: dict[str, tuple[Any, Any]] = {
        "same": (model, other),
        "autocast": (model, Side(other, torch.bfloat16)),
        "bfloat16": (model, other.bfloat16() if pair == "bfloat16" else other),
        "both": (Side(model, torch.bfloat16), Side(other, torch.bfloat16)),
        "float16": (model, Side(other, torch.float16)),
    }
    result = mprun.diff(*sides[pair], batch)
    assert result.first is None, str(result)
    if pair in ("autocast", "bfloat16"):
        errors = [row.b.arising for row in result.rows]
        assert max(errors) > 2**-10  # bfloat16's errors are shown
        # Gradients that are 0 but for rounding errors have no relative error to speak of.
        assert max(row.a.arising for row in result.rows if row.phase == "forward") < 2**-18


@pytest.mark.parametrize("seeds", [3, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_many_initial_weights_give_no_false_alarm(seeds: int) -> None:
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = mlp()
        batch = torch.randn(16, 20)
        for low in (Side(copy.deepcopy(model), torch.bfloat16), copy.deepcopy(model).bfloat16()):
            assert mprun.diff(model, low, batch).first is None


def test_inherited_errors_grow_and_arising_ones_do_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(12)))
    result = mprun.diff(model, copy.deepcopy(model).bfloat16(), torch.randn(16, 32))
    rows = [row.b for row in result.rows if row.phase == "forward" and row.module]
    assert rows[-1].inherited > 1.5 * rows[-1].arising  # some sqrt(12), less in a chain of means
    assert rows[0].inherited == pytest.approx(0, abs=2**-8)  # the batch and weights in bfloat16
    assert max(x.arising for x in rows) < 2 * min(x.arising for x in rows)


def test_bias_is_told_from_noise() -> None:
    """Truncation moves every number by half a unit on average, rounding to nearest none."""

    class Truncating(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + ((y.detach() * 2**10).floor() / 2**10 - y.detach())

    class Nearest(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + ((y.detach() * 2**10).round() / 2**10 - y.detach())

    biases = {}
    for kind in (Truncating, Nearest):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 64))
        torch.manual_seed(0)
        other = nn.Sequential(kind(20, 64))
        [row] = [
            x
            for x in mprun.diff(model, other, torch.randn(64, 20)).rows
            if (x.module, x.phase) == ("0", "forward")
        ]
        biases[kind] = (row.b.bias, row.b.arising)
    assert biases[Truncating][0] == pytest.approx(-(2**-11) / 0.6, rel=0.3)
    assert abs(biases[Nearest][0]) < biases[Nearest][1] / 10


def test_a_loss_with_a_target_and_outputs_with_a_loss() -> None:
    model = made("mlp")
    target = torch.zeros(16, dtype=torch.long)
    batch = (MODELS["mlp"][1], target)
    result = mprun.diff(model, copy.deepcopy(model), batch, nn.functional.cross_entropy)
    with torch.no_grad():
        model.eval()
        expected = nn.functional.cross_entropy(model(batch[0]), target)  # without dropout
    assert result.losses[0] == result.losses[1] == pytest.approx(float(expected))

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            out = self.layer(x)
            return {"loss": (out.sum(1) - y).square().mean(), "out": out}

    own = WithLoss()
    both = {"x": torch.randn(3, 4), "y": torch.randn(3)}
    assert mprun.diff(own, own, both).losses[0] == own(**both)["loss"].item()


def test_nothing_of_the_models_changes() -> None:
    model = made("cnn")
    model(MODELS["cnn"][1]).sum().backward()
    before = copy.deepcopy(model)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state = torch.get_rng_state()
    mprun.diff(model, Side(model, torch.bfloat16), MODELS["cnn"][1])
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(
        [*model.parameters(), *model.buffers()],
        [*before.parameters(), *before.buffers()],
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    now = [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(now, gradients, strict=True))  # type: ignore[arg-type]
    assert all(m.training for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_printed_it_is_a_table() -> None:
    text = str(mprun.diff(made("mlp"), plant(made("mlp"), "3", "cast"), MODELS["mlp"][1]))
    assert "first: 3 (Linear), forward, op _to_copy: in b its own error is" in text
    assert "rounding to float32 makes at most" in text


def test_a_batch_that_is_no_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="with loss, batch is a pair"):
        mprun.diff(made("mlp"), made("mlp"), MODELS["mlp"][1], nn.functional.mse_loss)
