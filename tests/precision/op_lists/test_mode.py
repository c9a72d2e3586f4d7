"""Regions: gradients, weights cast once, nesting, compilation, recomputation, whole layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mprun.precision import Policy, Precision, disable_casts
from mprun.precision.caster import NoCaster, OpListCaster
from tests.each import each
from tests.precision import normal
from tests.precision.op_lists import (
    BF16,
    FP16,
    FP32,
    Spy,
    caster,
    no_mode_is_left,
    own,
    same,
    watched,
)
from tests.precision.test_policy import policy
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("native_is_fast")

aten = torch.ops.aten


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


def two_layers() -> nn.Sequential:
    model: nn.Sequential = seeded(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    )
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of each parameter's gradient; all are float32."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == FP32, name
        found[name] = parameter.grad.clone()
    return found


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), f"{name} differs"


def backward(
    model: nn.Module, x: Tensor, by: OpListCaster, steps: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and the gradients of a step under a caster."""
    model.zero_grad()
    with by.region():
        out: Tensor = model(x)
    out.float().square().sum().backward()
    return out.detach(), gradients(model)


# ---- gradients -----------------------------------------------------------------------------------


@each("dtype", [BF16, FP16])
def test_gradients_of_float32_weights_equal_those_of_casts_by_hand(dtype: torch.dtype) -> None:
    model, x = two_layers(), normal(5, 6)
    out, ours = backward(model, x, caster(dtype=dtype))

    model.zero_grad()
    first, _, second = model
    hidden = F.linear(x.to(dtype), first.weight.to(dtype), first.bias.to(dtype)).relu()
    by_hand = F.linear(hidden, second.weight.to(dtype), second.bias.to(dtype))
    by_hand.float().square().sum().backward()

    assert same(out, by_hand.detach())
    assert out.dtype == dtype
    assert_equal(ours, gradients(model))


# ---- weights are cast once -----------------------------------------------------------------------


class Twice(nn.Module):
    """One layer applied two times, and its weight a third time, transposed: tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6)
        self.head.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.layer(x)))
        return out


def test_a_weight_used_several_times_is_cast_once_in_a_region() -> None:
    model, by = Twice(), caster()
    for _ in range(2):
        with watched(by) as spy:
            model(normal(5, 6))
        assert spy.casts_of(model.layer.weight) == [BF16]
        assert spy.casts_of(model.layer.bias) == [BF16]
    with Spy() as spy:  # each region casts anew: the weights may have changed between
        for _ in range(3):
            with by.region():
                model(normal(5, 6))
    assert spy.casts_of(model.layer.weight) == [BF16] * 3


def test_over_micro_batches_weights_are_cast_once_a_step() -> None:
    model, by = two_layers(), caster(keep=True)
    micro = [normal(5, 6, seed=i) for i in range(3)]
    for _ in range(2):
        model.zero_grad()
        with Spy() as spy:
            for x in micro:
                with by.region():
                    out = model(x)
                out.float().square().sum().backward()
        by.end_step()
        for parameter in model.parameters():
            assert spy.casts_of(parameter) == [BF16]
    kept = gradients(model)

    model.zero_grad()
    for x in micro:
        with caster().region():
            out = model(x)
        out.float().square().sum().backward()
    assert_equal(kept, gradients(model))


def test_a_step_after_the_optimizer_s_uses_the_new_weights_though_casts_are_kept() -> None:
    model, by, x = two_layers(), caster(keep=True), normal(5, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    outputs = []
    for end in (by.end_step, lambda: None):  # even where nobody says that the step ended
        backward(model, x, by)
        optimizer.step()
        end()
        with by.region():
            outputs.append(model(x).detach())
        by.end_step()
        with caster().region():
            assert same(outputs[-1], model(x).detach())
    assert not torch.equal(*outputs)


def test_a_weight_changed_inside_a_region_is_cast_again() -> None:
    model, x = two_layers(), normal(5, 6)
    with caster().region():
        before = model(x)
        with torch.no_grad():
            model[0].weight.mul_(2.0)
            model[2].bias += 1.0
        after = model(x)
    with caster().region():
        expected = model(x)
    assert same(after.detach(), expected.detach())
    assert not torch.equal(before, after)


def test_another_weight_in_the_place_of_one_that_is_gone_is_cast_itself() -> None:
    """Python gives the id of a collected tensor to a later one."""
    x = normal(5, 6)
    with caster().region():
        for i in range(20):
            weight = nn.Parameter(torch.full((3, 6), float(i)))
            assert same(
                F.linear(x, weight).detach(), F.linear(x.to(BF16), weight.to(BF16)).detach()
            )
            del weight


@each("keep", [False, True])
@each("where", ["before", "inside", "after"])
def test_a_forward_pass_without_graph_costs_no_gradient(keep: bool, where: str) -> None:
    model, x = two_layers(), normal(5, 6)
    _, expected = backward(model, x, caster())
    model.zero_grad()
    by = caster(keep=keep)

    def look() -> None:
        with torch.no_grad():
            assert model(x).dtype == BF16

    if where == "before":
        with by.region():
            look()
    with by.region():
        if where == "inside":
            look()
        out = model(x)
        if where == "after":
            look()
    out.float().square().sum().backward()
    assert_equal(gradients(model), expected)


# ---- one region in another -----------------------------------------------------------------------


def test_the_inner_region_alone_holds() -> None:
    a, b = normal(4, 4), normal(4, 4, seed=1)
    with caster().region():
        assert torch.matmul(a, b).dtype == BF16
        with caster(own(fp32=["relu"])).region():
            assert torch.matmul(a, b).dtype == FP32
            assert torch.relu(a.half()).dtype == FP32
            with caster(dtype=FP16).region():
                assert torch.matmul(a, b).dtype == FP16
            assert torch.matmul(a, b).dtype == FP32
        assert torch.matmul(a, b).dtype == BF16
        assert torch.relu(a.half()).dtype == BF16
    assert no_mode_is_left()


def test_a_layer_s_region_has_its_dtype_and_shares_the_casts() -> None:
    layer, x, by = nn.Linear(6, 6), normal(5, 6), caster()
    with by.region(), Spy() as spy:
        assert layer(x).dtype == BF16
        with by.layer_region(FP16)():
            assert layer(x).dtype == FP16
        with by.layer_region(FP32)():
            assert layer(x).dtype == FP32
        with by.layer_region(BF16)():
            assert layer(x).dtype == BF16
    assert spy.casts_of(layer.weight) == [BF16, FP16]


def a_mismatch() -> None:
    torch.matmul(torch.ones(2, 3), torch.ones(2, 3))


def one_in_an_inner_region() -> None:
    with caster(dtype=FP16).region(), disable_casts():
        raise RuntimeError


def one_inside_a_python_function() -> None:
    F.multi_head_attention_forward(*[torch.ones(4, 4)] * 13)  # type: ignore[arg-type]


FAULTS = (a_mismatch, one_in_an_inner_region, one_inside_a_python_function)


@each("fault", FAULTS)
def test_an_exception_leaves_no_mode_behind(fault: Callable[[], None]) -> None:
    by = caster()
    with pytest.raises((RuntimeError, AssertionError, TypeError)), by.region():
        fault()
    assert no_mode_is_left()
    with by.region():
        assert torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype == BF16
    assert no_mode_is_left()


@each("fault", FAULTS)
def test_an_exception_that_is_caught_inside_does_not_end_the_casts(
    fault: Callable[[], None],
) -> None:
    x, attention = normal(4, 4), nn.MultiheadAttention(4, 2)
    with caster().region():
        for _ in range(2):
            with pytest.raises((RuntimeError, AssertionError, TypeError)):
                fault()
        assert torch.matmul(x, x).dtype == BF16
        # The function that raised is cast inside as before.
        assert attention(x, x, x, need_weights=False)[0].dtype == BF16
    assert no_mode_is_left()


# ---- casts switched off --------------------------------------------------------------------------


@contextmanager
def by_autocast() -> Iterator[None]:
    with torch.autocast("cpu", BF16):
        yield


REGIONS: dict[str, Callable[[], Any]] = {
    "op lists": lambda: caster().region(),
    "autocast": by_autocast,
}


@each("kind", REGIONS)
def test_disable_casts_as_a_context_manager(kind: str) -> None:
    layer, x = nn.Linear(6, 6), normal(5, 6)
    with REGIONS[kind]():
        assert layer(x).dtype == BF16
        with disable_casts():
            assert same(layer(x).detach(), F.linear(x, layer.weight, layer.bias).detach())
            assert layer(x).dtype == FP32
            with pytest.raises(RuntimeError):  # as without mixed precision: dtypes do not fit
                layer(x.to(BF16))
        assert layer(x).dtype == BF16
    assert layer(x).dtype == FP32


@each("kind", REGIONS)
def test_a_region_inside_disabled_casts_casts_again(kind: str) -> None:
    a = normal(4, 4)
    with REGIONS[kind](), disable_casts():
        with REGIONS[kind]():
            assert (a @ a).dtype == BF16
        assert (a @ a).dtype == FP32


# ---- compiled ------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_module_in_a_region_gives_the_same_dtypes_and_gradients() -> None:
    """Traced, and run by PyTorch's own kernels: the bits are those of the plain module."""
    model, x = two_layers(), normal(5, 6)
    out, expected = backward(model, x, caster())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        model.zero_grad()
        with caster().region():
            ours = compiled(x)
        ours.float().square().sum().backward()
        assert same(ours.detach(), out)
        assert_equal(gradients(model), expected)
    assert compiled(x).dtype == FP32  # outside of a region it is compiled anew
    with caster(dtype=FP16).region():
        assert compiled(x).dtype == FP16


class Switching(nn.Module):
    """The same layers, cast and not, and a decorated function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.conv = nn.Conv1d(5, 4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        low = torch.sin(self.conv(self.layer(x)))
        with disable_casts():
            full = torch.sin(self.conv(self.layer(x)))
        return low, full, product(x), self.layer(x)


@disable_casts()
def product(x: Tensor) -> Tensor:
    return x @ x.T


SWITCHED = [BF16, FP32, FP32, BF16]


@pytest.mark.representative("op lists-*")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager"])
@pytest.mark.parametrize("kind", REGIONS)
def test_disable_casts_compiles_in_one_graph(kind: str, backend: str) -> None:
    """What was traced with no casts runs without them: compiled code is not cast a second time."""
    model, x = seeded(Switching), normal(5, 6)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with REGIONS[kind]():
        expected, ours = model(x), compiled(x)
    assert [y.dtype for y in expected] == SWITCHED
    assert [y.dtype for y in ours] == SWITCHED
    for a, b in zip(ours, expected, strict=True):
        assert same(a.detach(), b.detach())


# ---- run again in the backward pass --------------------------------------------------------------


def precision(by: OpListCaster, max_norm: float | None = None) -> Precision:
    """bf16_mixed, cast by op lists."""
    from dataclasses import replace

    row: Policy = replace(policy("bf16_mixed"), casting="op_lists")
    return Precision(row, device="cpu", execution="native", max_norm=max_norm, op_lists=by)


@each("reentrant", [False, True])
def test_recomputed_code_is_cast_as_it_was(reentrant: bool) -> None:
    seen: list[torch.dtype] = []
    layer = nn.Linear(8, 8)

    def block(x: Tensor) -> Tensor:
        low = layer(x)
        seen.append(low.dtype)
        soft = torch.softmax(low, -1)
        seen.append(soft.dtype)
        with disable_casts():
            wide = F.linear(soft, layer.weight)
            seen.append(wide.dtype)
        return layer(wide)

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(block, x, use_reentrant=reentrant)

    ours = precision(caster())
    ours.backward(ours.forward(Outer(), normal(4, 8).requires_grad_()).sum())
    assert seen == [BF16, FP32, FP32] * 2
    assert no_mode_is_left()


class Descent(torch.optim.Optimizer):
    """Gradient descent by ops that HMP's lists would cast: a product and a matrix product."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p -= 0.1 * p.grad
            if p.dim() == 2:
                p += 0.01 * (p @ p.T @ p)


def test_clipping_and_the_optimizer_s_step_are_not_cast() -> None:
    """Both are outside of any region, even where somebody trains inside of one."""
    weights = {}
    for inside in (False, True):
        model = two_layers()
        ours = precision(caster(), max_norm=0.01)
        optimizer = Descent(model.parameters())
        ours.begin_step(1)
        ours.backward(ours.forward(model, normal(5, 6)).sum())
        with caster().region() if inside else NoCaster().region():
            ours.step(optimizer)
        weights[inside] = dict(model.state_dict())
    assert_equal(weights[True], weights[False])


# ---- whole layers --------------------------------------------------------------------------------


def test_a_python_function_on_a_list_is_cast_as_a_whole() -> None:
    """Not what is inside: that runs in the dtypes it is given."""
    module, x = seeded(lambda: nn.MultiheadAttention(8, 2)), normal(5, 3, 8)
    lists = own(lower=["multi_head_attention_forward"], fp32=["softmax", "bmm"])
    with watched(caster(lists)) as spy:
        out, weights = module(x, x, x)
    assert spy.dtypes == {BF16}
    assert weights.dtype == BF16
    low = module.to(BF16)
    assert same(out.detach(), low(x.to(BF16), x.to(BF16), x.to(BF16))[0].detach())


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(6, 5, 2, bidirectional=True),
    "GRU": lambda: nn.GRU(6, 5, 2, batch_first=True),
    "RNN, tanh": lambda: nn.RNN(6, 5),
    "LSTM, projected": lambda: nn.LSTM(6, 5, proj_size=3),
    "LSTMCell": lambda: nn.LSTMCell(6, 5),
}


def leaves(value: Any) -> list[Tensor]:
    found: list[Tensor] = torch.utils._pytree.tree_leaves(value)
    return found


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@each("name", RECURRENT)
def test_a_recurrent_layer_follows_linear(name: str) -> None:
    module, low = (seeded(RECURRENT[name]) for _ in range(2))
    x = normal(4, 6) if "Cell" in name else normal(7, 4, 6)
    with caster().region():
        ours = leaves(module(x))
    by_hand = leaves(low.to(BF16)(x.to(BF16)))
    assert {t.dtype for t in ours} == {BF16}
    for a, b in zip(ours, by_hand, strict=True):
        assert same(a.detach(), b.detach())
    ours[0].float().sum().backward()
    by_hand[0].float().sum().backward()
    for a, b in zip(module.parameters(), low.parameters(), strict=True):
        if b.grad is None:
            assert a.grad is None or not a.grad.any()
            continue
        assert a.grad is not None
        assert a.grad.dtype == FP32
        assert torch.equal(a.grad, b.grad.float())


def encoder_layer() -> Any:
    return seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))


def test_an_encoder_layer_computes_the_same_in_training_and_evaluation() -> None:
    """PyTorch's fused path for evaluation would be one op that no list names."""
    layer, x = encoder_layer(), normal(2, 5, 8)
    with caster().region():
        trained = layer(x)
        layer.eval()
        with watched(caster()) as spy, torch.no_grad():
            fast = layer(x)
        with torch.inference_mode():
            inferred = layer(x)
    assert same(fast, trained.detach())
    assert same(inferred.clone(), fast)
    assert not any("transformer" in s.op for s in spy.seen)
    assert trained.dtype == BF16  # layer_norm is on the lower list
    trained.float().sum().backward()
    assert gradients(layer)


# ---- threads -------------------------------------------------------------------------------------


def test_threads_have_regions_of_their_own() -> None:
    """Three threads, in step with each other: bfloat16, float16, and no region."""
    a, barrier = normal(4, 4), threading.Barrier(3, timeout=PATIENCE_S)
    found: dict[str, list[torch.dtype]] = {}

    def work(name: str, by: Any) -> None:
        seen = found.setdefault(name, [])
        with by.region():
            for _ in range(20):
                barrier.wait()
                seen.append(torch.matmul(a, a).dtype)
                barrier.wait()
                with disable_casts():
                    barrier.wait()
                    seen.append(torch.matmul(a, a).dtype)
        barrier.wait()
        seen.append(torch.matmul(a, a).dtype)

    casters = {"bf16": caster(), "fp16": caster(dtype=FP16), "none": NoCaster()}
    threads = [threading.Thread(target=work, args=item) for item in casters.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["bf16"] == [BF16, FP32] * 20 + [FP32]
    assert found["fp16"] == [FP16, FP32] * 20 + [FP32]
    assert found["none"] == [FP32] * 41
    assert no_mode_is_left()


# ---- what a region leaves alone ------------------------------------------------------------------


def test_a_tensor_subclass_keeps_its_own_rules() -> None:
    class Tagged(Tensor):
        pass

    x = normal(4, 4).as_subclass(Tagged)
    with caster().region():
        out = x @ x
    assert type(out) is Tagged
    assert out.dtype == BF16
