"""Statistics of steps in a loop of one's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mprun.numerics
from mprun.inspect.collect import INPUT, Statistics, scale_of, statistics
from mprun.inspect.histograms import histogram
from mprun.inspect.measurements import gradient_errors
from mprun.inspect.numerics import KINDS
from mprun.optim import AdamW
from mprun.precision import (
    DynamicLossScale,
    DynamicRule,
    Emulated16,
    LossScale,
    OpListCaster,
    StaticLossScale,
    op_lists,
)


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


# ---- what is seen --------------------------------------------------------------------------------


def test_rows_hold_the_values_of_the_step() -> None:
    model, x = mlp(), data(5, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with statistics(model, optimizer) as seen:
        model(x).square().sum().backward()
        optimizer.step()
    h0 = x @ before["0.weight"].T + before["0.bias"]
    h1 = h0.clamp(min=0)
    out = F.linear(h1, before["2.weight"], before["2.bias"])
    by_h1 = 2 * out @ before["2.weight"]
    wanted = {f"weights {n}": p for n, p in before.items()}
    wanted |= {f"activations {INPUT}": x, "activations 0": h0, "activations 1": h1}
    wanted |= {"activations 2": out, "activation_gradients 2": 2 * out}
    wanted |= {"activation_gradients 1": by_h1, "activation_gradients 0": by_h1 * (h0 > 0)}
    for name, p in model.named_parameters():
        assert p.grad is not None
        wanted[f"weight_gradients {name}"] = p.grad
        wanted[f"updates {name}"] = -0.5 * p.grad.double()
    rows = seen.of(*KINDS)
    assert set(rows) == set(wanted)
    for name, x in wanted.items():
        found, expected = rows[name].histogram, histogram(x)
        assert (found.total, found.zero) == (expected.total, expected.zero)
        assert found.largest == pytest.approx(expected.largest, rel=1e-5)
        if not name.startswith("activation"):  # those are computed in another order here
            assert found.exponents == expected.exponents
        assert rows[name].noise.signal == pytest.approx(x.double().square().sum().item(), rel=1e-4)
    assert rows["activations 0"].dtypes == {torch.float32}


def test_several_steps_add_up_and_updates_follow_the_weights() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with statistics(model, optimizer) as seen:
        for step in range(3):
            optimizer.zero_grad()
            model(data(5, 6, seed=step)).sum().backward()
            optimizer.step()
    assert {row.histogram.total for row in seen.of("weights", "updates").values()} == {
        3 * p.numel() for p in model.parameters()
    }
    assert seen.lost["0.weight"].updated == seen.of("updates")["updates 0.weight"].histogram.nonzero
    assert seen.scales == [1.0] * 3


def test_gradients_are_divided_by_the_scale_of_their_step() -> None:
    model, found = mlp(), []
    for scale in (1.0, 1024.0, 1000.0):
        with statistics(model, loss_scale=lambda scale=scale: scale) as seen:
            (model(data(5, 6)).sum() * scale).backward()
        found.append(seen.of("weight_gradients", "activation_gradients"))
    for name, row in found[0].items():
        assert row.histogram == found[1][name].histogram  # exact, for a power of two
        assert row.histogram.largest == pytest.approx(found[2][name].histogram.largest, rel=1e-6)


@pytest.mark.parametrize(
    ("loss_scale", "expected"),
    [
        (None, 1.0),
        (256, 256.0),
        (torch.tensor(512.0), 512.0),
        (lambda: 8.0, 8.0),
        (torch.amp.GradScaler("cpu", init_scale=2.0**12), 4096.0),
        (torch.amp.GradScaler("cpu", enabled=False), 1.0),
        (LossScale(), 1.0),
        (StaticLossScale(1024.0, torch.device("cpu")), 1024.0),
        (DynamicLossScale(32.0, DynamicRule(), torch.device("cpu")), 32.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_loss_scale_is_understood(loss_scale: Any, expected: float) -> None:
    assert scale_of(loss_scale) == expected


# ---- kinds of models -----------------------------------------------------------------------------


class Several(nn.Module):
    """Two inputs, one by name; outputs in a dict, one of them whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, y: Tensor, n: int = 0) -> dict[str, Any]:
        a = self.a(x)
        return {"sum": a + self.b(y), "pair": (a, self.b(x)), "index": a.argmax(-1)}


def test_several_inputs_and_outputs() -> None:
    model = Several()
    with statistics(model) as seen:
        out = model(data(2, 4), y=data(2, 4, seed=1), n=1)
        (out["sum"].sum() + out["pair"][1].sum()).backward()
    rows = seen.of(*KINDS)
    assert rows[f"activations {INPUT}"].histogram.total == 16
    assert rows["activations b"].histogram.total == 16  # called twice
    assert rows["activations (model)"].histogram.total == 8  # the sum; the others are a's and b's
    assert rows["activation_gradients b"].histogram.total == 16


def test_a_tensor_handed_on_is_counted_once_and_one_changed_in_place_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Identity(), nn.Flatten())
    wrapped = nn.Sequential(model)
    with statistics(wrapped) as seen:
        wrapped(data(3, 4)).sum().backward()
    assert [row.name for row in seen.of("activations").values()] == [INPUT, "0.0", "0.1"]
    names = [row.name for row in seen.of("activation_gradients").values()]
    assert sorted(names) == ["0.0", "0.1"]


def test_tied_parameters_have_one_row() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with statistics(model) as seen:
        model(data(2, 4)).sum().backward()
    assert [r.name for r in seen.of("weights").values()] == ["0.weight", "0.bias", "1.bias"]
    assert seen.of("weight_gradients")["weight_gradients 0.weight"].histogram.total == 16


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_counted_once(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.b, self.a(x), use_reentrant=reentrant)
            return out

    model = Model()
    with statistics(model) as seen:
        model(data(2, 4)).sum().backward()
    rows = seen.of(*KINDS)
    for name in ("a", "b.0", "b.1"):
        assert rows[f"activations {name}"].histogram.total == 8, name
        assert rows[f"activation_gradients {name}"].histogram.total == 8, name


def test_passes_without_gradients_are_not_looked_at() -> None:
    model = mlp()
    with statistics(model) as seen, torch.no_grad():
        model(data(5, 6))
    assert seen.rows == {}
    assert seen.recommended_loss_scale() is None


def test_an_optimizer_with_a_closure_is_warned_of() -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(data(5, 6)).square().sum()
        loss.backward()
        return loss

    with statistics(model, optimizer) as seen:
        closure()
        with pytest.warns(UserWarning, match=r"LBFGS.step is given a closure.*not measured"):
            optimizer.step(closure)
    assert not seen.of("updates")


# ---- nothing is changed --------------------------------------------------------------------------


def trained(
    watch: Callable[..., Any], make: Callable[..., Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Weights and buffers after four steps of a model with everything in it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Flatten(2),
        nn.TransformerEncoderLayer(16, 2, 8, batch_first=True),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, enabled=dtype is torch.float16)
    with watch(model, optimizer, scaler):
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                out = model(data(5, 1, 6, 6, seed=step))
            scaler.scale(F.cross_entropy(out.float(), torch.tensor([0, 1, 2, 0, 1]))).backward()
            scaler.step(optimizer)
            scaler.update()
    return {**model.state_dict(), "random": torch.get_rng_state()}


@pytest.mark.representative("sgd-torch.float16", "fused adamw-None", "our adamw-torch.bfloat16")
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: AdamW(p, lr=0.01, engine="eager"),
    ],
    ids=["sgd", "fused adamw", "rmsprop", "our adamw"],
)
def test_a_watched_run_is_the_same_bit_for_bit(make: Any, dtype: torch.dtype | None) -> None:
    without = trained(lambda *_: nullcontext(), make, dtype)
    found = trained(statistics, make, dtype)
    for name, x in without.items():
        assert torch.equal(x, found[name]), name


def test_hooks_are_gone_afterwards() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = Statistics(model, optimizer)
    failing = model[1].register_forward_pre_hook(lambda *_: 1 // 0)
    with seen.watching(), pytest.raises(ZeroDivisionError):
        model(data(5, 6))
    failing.remove()
    rows = copy.deepcopy({k: r.histogram for k, r in seen.rows.items()})
    model(data(5, 6)).sum().backward()
    optimizer.step()
    assert {k: r.histogram for k, r in seen.rows.items()} == rows
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not optimizer._optimizer_step_pre_hooks


# ---- inside modes --------------------------------------------------------------------------------


def test_statistics_are_not_rounded_by_an_emulation() -> None:
    model = mlp().half()
    arithmetic = Emulated16("stochastic", "infinity", "float32", seed=0)
    seen = Statistics(model)
    outputs: list[Tensor] = []
    model[2].register_forward_hook(lambda *a: outputs.append(a[2].detach()))
    with seen.watching():
        arithmetic.begin_step(1)
        with arithmetic.region():
            loss = model(data(5, 6).half()).float().square().sum()
            loss.backward()
    row = seen.of("activations")["activations 2"]
    assert row.histogram == histogram(outputs[0])
    assert row.noise.signal == pytest.approx(outputs[0].double().square().sum().item(), rel=1e-6)
    assert row.noise.db("fp16") == math.inf
    assert 40 < row.noise.db("bf16") < 70


def test_statistics_are_not_cast_by_op_lists() -> None:
    model = mlp()
    caster = OpListCaster(op_lists(["linear", "mul", "dot"], ["sum"], []), torch.bfloat16)
    with statistics(model) as seen:
        with caster.region():
            out = model(data(5, 6))
        caster.backward(out.float().sum())
    rows = seen.of(*KINDS)
    assert rows["activations 0"].dtypes == {torch.bfloat16}
    x = data(5, 6)
    assert rows[f"activations {INPUT}"].histogram == histogram(x)
    assert rows[f"activations {INPUT}"].noise.signal == pytest.approx(
        x.double().square().sum().item(), rel=1e-6
    )


# ---- the loss scale ------------------------------------------------------------------------------


class Underflowing(nn.Module):
    """Gradients from 70 in the last layer to 1e-9 in the first if `steep`, else all are small."""

    def __init__(self, steep: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.inward, self.outward = (0.02, 50.0) if steep else (1.0, 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x * self.inward))
        return x * self.outward


def loss_of(model: Underflowing, out: Tensor) -> Tensor:
    return (out.float() - data(64, 16, seed=1) * model.outward).square().mean()


def gradients_at(scale: float | None, steep: bool) -> dict[str, Tensor]:
    """Unscaled; in float16 by autocast, or exact where `scale` is None."""
    model = Underflowing(steep)
    with torch.autocast("cpu", torch.float16, enabled=scale is not None):
        out = model(data(64, 16))
    (loss_of(model, out) * (scale or 1.0)).backward()
    return {n: p.grad.double() / (scale or 1.0) for n, p in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("steep", [True, False])
def test_recommended_is_within_four_of_the_best_power_on_a_model_that_underflows(
    steep: bool,
) -> None:
    exact = gradients_at(None, steep)
    tried = {2.0**k: gradient_errors(exact, gradients_at(2.0**k, steep)).db for k in range(-4, 50)}
    # half a bit less counts as the same: between underflow and overflow scales differ by chance
    best = max(scale for scale, db in tried.items() if db >= max(tried.values()) - 3)
    assert tried[1.0] < 15  # nothing much is left of some layer's gradients without a scale
    assert tried[best] > 35
    if steep:  # no plateau: every doubling helps until one overflows
        assert best == max(tried, key=lambda s: tried[s])
    model = Underflowing(steep)
    with mprun.numerics.statistics(model) as seen:
        loss_of(model, model(data(64, 16))).backward()
    advice = seen.recommended_loss_scale()
    assert advice is not None
    assert best / 4 <= advice.scale <= best
    verdicts = [seen.judge(s) for s in (1.0, advice.scale / 64, advice.scale, best, best * 4)]
    words = [v.word for v in verdicts if v is not None]
    assert words == ["too low", "too low" if steep else "fine", "fine", "fine", "too high"]
