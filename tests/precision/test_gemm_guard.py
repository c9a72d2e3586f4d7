"""The guard of products: what it measures, what it promotes, and which bits it leaves alone."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mprun.precision import Precision, guard_of
from mprun.precision.arithmetic import EmulatedProducts
from mprun.precision.formats import (
    BLOCK_FORMATS,
    FP8_ROWWISE,
    FP8_TENSORWISE,
    BlockFormat,
    quantise,
)
from mprun.precision.gemm_guard import (
    MIN_ROW,
    NO_GUARD,
    Factor,
    GemmFinding,
    GemmGuard,
    Loss,
    losses,
)
from mprun.precision.gemms import GEMMS, HIGH, StepBits, linear, product
from mprun.watch.nonfinite import WatchedRunExceptions
from tests.each import each

pytestmark = pytest.mark.usefixtures("native_is_fast")

CPU = torch.device("cpu")
MODES = [*GEMMS]
EIGHT_BITS = [mode for mode in MODES if mode != "nvfp4"]
NOTHING, ANYTHING = Loss(math.inf, math.inf), Loss(-1.0, -1.0)


def measured(x: Tensor, to: BlockFormat) -> Loss:
    return Loss(*losses(x, quantise(x, to), to.half_step).tolist())


# ---- the measures --------------------------------------------------------------------------------


def test_a_row_that_float32_cannot_hold_beside_the_largest_has_no_error() -> None:
    """2^-24 of it still counts; its numbers count for underflow in any case."""
    for smallest, error in ((2.0**-24, 0.5), (2.0**-25, 0.0)):
        x = torch.tensor([[1.0, 1.0], [smallest, smallest]])
        assert measured(x, FP8_TENSORWISE) == Loss(0.5, error)


def test_numbers_that_are_none_any_more_are_an_infinite_error() -> None:
    x = torch.ones(2, 2)
    assert losses(x, torch.tensor([[1.0, math.nan], [1.0, 1.0]]), 0.1)[1] == math.inf


@each("bad", [math.inf, -math.inf, math.nan])
def test_a_factor_that_is_not_finite_is_not_judged(bad: float) -> None:
    """The rounding is not the cause."""
    assert measured(torch.tensor([[1.0, bad], [1e-30, 1.0]]), FP8_TENSORWISE) == Loss(0.0, 0.0)


@settings(max_examples=60)
@given(
    st.sampled_from(BLOCK_FORMATS),
    st.integers(0, 2**31),
    st.tuples(st.integers(1, 5), st.integers(1, 70)),
    st.floats(0, 12),
)
def test_measures_are_those_of_float64(
    to: BlockFormat, seed: int, shape: tuple[int, int], spread: float
) -> None:
    """By loops over Python numbers; float32 keeps 24 bits of each, 70 are added."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw) * torch.exp2(spread * torch.randn(shape, generator=draw))
    x[torch.rand(shape, generator=draw) < 0.1] = 0
    q = quantise(x, to)
    pairs = [list(zip(*rows, strict=True)) for rows in zip(x.tolist(), q.tolist(), strict=True)]
    present = [(a, b) for row in pairs for a, b in row if a]
    shares = [
        sum((a - b) ** 2 for a, b in row if abs(a - b) > to.half_step * abs(a))
        / sum(a**2 for a, _ in row)
        for row in pairs
        if (size := max(abs(a) for a, _ in row)) and size >= MIN_ROW * float(x.abs().max())
    ]
    underflow, error = losses(x, q, to.half_step).tolist()
    assert underflow == pytest.approx(sum(b == 0 for _, b in present) / max(1, len(present)))
    assert error == pytest.approx(sum(shares) / max(1, len(shares)), rel=1e-5, abs=1e-12)


# ---- one product ---------------------------------------------------------------------------------


def factors(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(32, 64, generator=draw).bfloat16(), torch.randn(48, 64, generator=draw)


def guard(action: str, limit: Loss) -> GemmGuard:
    return GemmGuard(action, {8: limit, 4: limit})


@each("mode", MODES)
def test_a_promoted_product_is_that_of_the_layers_dtype(mode: str) -> None:
    """Bit for bit, forward and backward, as `nn.Linear` in bfloat16."""
    x, weight = factors()
    gradient = torch.randn(32, 48).bfloat16()
    ours, theirs = ([t.clone().requires_grad_() for t in (x, weight)] for _ in range(2))
    watch = guard("promote", ANYTHING)
    watch.begin_step(1)
    linear(*ours, None, GEMMS[mode], StepBits(0), watch, "fc").backward(gradient)
    watch.end_step()
    nn.functional.linear(theirs[0], theirs[1].bfloat16()).backward(gradient)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.grad, other.grad)
    found = [(row.module, row.product) for row in watch.rows]
    without = {"fp8_rowwise_hp": ["grad_weight"]}.get(mode, [])
    names = [n for n in ("forward", "grad_input", "grad_weight") if n not in without]
    assert found == [("fc", name) for name in names]


@each("action", ["log", "promote"])
@each("mode", MODES)
def test_a_product_that_is_not_promoted_keeps_its_bits(mode: str, action: str) -> None:
    x, weight = factors()
    gradient = torch.randn(32, 48).bfloat16()
    guards: list[GemmGuard] = [
        NO_GUARD,
        guard(action, NOTHING if action == "promote" else ANYTHING),
    ]
    results = []
    for watch in guards:
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        output = linear(*leaves, None, GEMMS[mode], StepBits(0), watch, "fc")
        output.backward(gradient)
        results.append([output, *(leaf.grad for leaf in leaves)])
    for plain, watched in zip(*results, strict=True):
        assert torch.equal(plain, watched)


def test_random_bits_are_those_of_a_run_without_a_guard() -> None:
    """The product after a promoted one is rounded with the bits that it has anyway."""
    gemm, (a, b) = GEMMS["nvfp4"].grad_weight, factors()
    results = []
    for promoted in (False, True):
        bits = StepBits(0)
        bits.begin_step(1)
        first, second = (
            product(a, b, gemm, torch.float32, bits, "grad_weight", lambda *_, x=x: x)
            for x in (promoted, False)
        )
        results.append(second)
    assert torch.equal(*results)
    assert torch.equal(first, product(a, b, HIGH, torch.float32))
    assert not torch.equal(second, first)


# ---- a model -------------------------------------------------------------------------------------


class Planted(nn.Module):
    """Layers of 64 features; before the middle one, feature 0 is `outlier` times as large, and its
    weights are as much smaller. After it, the gradient of feature 0 is `steep` times as large."""

    def __init__(self, outlier: float = 1.0, steep: float = 1.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)
        self.before, self.middle, self.after = (nn.Linear(64, 64) for _ in range(3))
        self.scale, self.steep = torch.tensor([outlier, *[1.0] * 63]), steep
        with torch.no_grad():
            self.middle.weight[:, 0] /= outlier

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.before(nn.functional.layer_norm(self.first(x), [64])))
        x = self.middle(nn.functional.layer_norm(x, [64]) * self.scale)
        x = Steep.apply(x, self.steep)
        x = nn.functional.gelu(self.after(nn.functional.layer_norm(x, [64])))
        return self.last(x)  # type: ignore[no-any-return]


class Steep(torch.autograd.Function):
    """The identity, with a larger gradient of feature 0; its own input gets the usual one."""

    @staticmethod
    def forward(ctx, x, factor):  # type: ignore[no-untyped-def]
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        larger = gradient.clone()
        larger[..., 0] *= ctx.factor
        return larger, None


def steps(mode: str, model: nn.Module, count: int = 3, **options: object) -> Precision:
    """Train `model` for some steps of SGD with a learning rate of 0: its numbers stay healthy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        precision = Precision(mode, device="cpu", **options)  # type: ignore[arg-type]
    precision.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(64, 16, generator=draw)
        y = torch.randint(4, (64,), generator=draw)
        optimizer.zero_grad()
        precision.begin_step()
        loss = precision.loss(cross_entropy, precision.forward(model, x), y)
        precision.backward(loss)
        precision.step(optimizer)
        precision.update()
    return precision


def found(precision: Precision) -> set[tuple[str, str]]:
    return {(row.module, row.product) for row in precision.guard.rows}


def planted(outlier: float = 1.0, steep: float = 1.0) -> Planted:
    torch.manual_seed(0)
    return Planted(outlier, steep)


@each("mode", MODES)
def test_a_healthy_model_has_nothing_to_promote(mode: str) -> None:
    assert steps(mode, planted(), guard="promote").guard.rows == []


OF_AN_INPUT = {
    # One scale for the tensor: small features of the input, and its weights' row for grad_input.
    "fp8_tensorwise": {"forward", "grad_input", "grad_weight"},
    # A scale for each row or block along K: for grad_weight a row is a feature, without neighbours.
    "fp8_rowwise": {"forward"},
    "fp8_rowwise_hp": {"forward", "grad_input"},  # its weight has one scale for grad_input
    "mxfp8": {"forward"},
}


@each("mode", EIGHT_BITS)
def test_an_outlier_in_an_input_promotes_products_of_that_layer(mode: str) -> None:
    precision = steps(mode, planted(outlier=1e5), guard="promote")
    assert found(precision) == {("middle", name) for name in OF_AN_INPUT[mode]}
    for row in precision.guard.rows:
        assert (row.steps, row.first_step) == (3, 1)
        assert row.factors == (["weight"] if row.product == "grad_input" else ["input"])


OF_A_GRADIENT = {
    "fp8_tensorwise": {"grad_input", "grad_weight"},
    "fp8_rowwise": {"grad_input"},
    "fp8_rowwise_hp": {"grad_input"},
    "mxfp8": {"grad_input"},
}


@each("mode", EIGHT_BITS)
def test_an_outlier_in_a_gradient_promotes_products_of_that_gradient(mode: str) -> None:
    """E5M2 has a range of 2^32 in a tensor, E4M3 of 2^18."""
    steep = 2.0**40 if mode == "fp8_tensorwise" else 2.0**26
    precision = steps(mode, planted(steep=steep), guard="promote")
    of_middle = {product for module, product in found(precision) if module == "middle"}
    assert of_middle == OF_A_GRADIENT[mode]
    assert not any(product == "forward" for _, product in found(precision))
    assert not any(module == "after" for module, _ in found(precision))


def test_thresholds_decide() -> None:
    generous = guard_of("promote", underflow=1.0, error=math.inf)
    assert steps("fp8_tensorwise", planted(outlier=1e5), guard=generous).guard.rows == []
    strict = guard_of("promote", underflow=0.0)
    assert steps("nvfp4", planted(), guard=strict).guard.rows


# ---- counting ------------------------------------------------------------------------------------


def test_evaluation_is_promoted_and_not_counted() -> None:
    model = planted(outlier=1e5)
    precision = steps("fp8_tensorwise", model, guard="promote", count=2)
    before = copy.deepcopy(precision.guard.rows)
    x = torch.randn(8, 16)
    with torch.no_grad():
        guarded = precision.forward(model, x)
    assert precision.guard.rows == before
    unguarded = steps("fp8_tensorwise", other := planted(outlier=1e5), count=0)
    with torch.no_grad():
        assert not torch.equal(guarded, unguarded.forward(other, x))


def test_a_step_of_several_passes_counts_once() -> None:
    watch = guard("log", ANYTHING)
    a, b = (x.float() for x in factors())
    judged = [
        Factor("input", a, FP8_TENSORWISE, quantise(a, FP8_TENSORWISE)),
        Factor("weight", b, FP8_TENSORWISE, quantise(b, FP8_TENSORWISE)),
    ]
    for step in (1, 2):
        watch.begin_step(step)
        watch.promotes("fc", "forward", judged)
        watch.promotes("fc", "forward", judged)
        watch.end_step()
        watch.resume_step()  # another optimizer's turn
        watch.promotes("fc", "forward", judged)
        watch.end_step()
        watch.end_step()
    (row,) = watch.rows
    assert (row.steps, row.first_step) == (2, 1)


def test_findings_of_other_processes_count_with_their_worst() -> None:
    other = GemmFinding(1, "fc", "forward", ("weight",), 0.5, math.inf)
    watch = GemmGuard("log", {8: ANYTHING}, lambda own: [*own, other])
    heard: list[GemmFinding] = []
    watch.listen(heard.append)
    a = factors()[0].float()
    for step in (1, 2):
        watch.begin_step(step)
        watch.promotes("fc", "forward", [Factor("input", a, FP8_ROWWISE, a)])
        watch.end_step()
    (row,) = watch.rows
    assert (row.steps, row.underflow, row.error) == (2, 0.5, math.inf)
    assert row.factors == ["input", "weight"]
    assert [x.factors for x in heard] == [("input", "weight")] * 2


def test_the_names_of_two_models_differ() -> None:
    precision = Precision("fp8_tensorwise", device="cpu", execution="emulated", guard="promote")
    models = [precision.prepare(planted(outlier=1e5)) for _ in range(2)]
    precision.begin_step()
    for model in models:
        precision.forward(model, torch.randn(8, 16))
    precision.step(torch.optim.SGD(models[0].parameters(), lr=0.0))
    assert found(precision) == {("middle", "forward"), ("model 2: middle", "forward")}


# ---- `Precision` ---------------------------------------------------------------------------------


def test_the_state_continues() -> None:
    whole = steps("fp8_tensorwise", planted(outlier=1e5), guard="log")
    state = copy.deepcopy(whole.state_dict())
    again = Precision("fp8_tensorwise", device="cpu", execution="emulated", guard="log")
    again.load_state_dict(state)
    assert again.guard.rows == whole.guard.rows
    assert again.state_dict() == state
    plain = Precision("fp8_tensorwise", device="cpu", execution="emulated")
    assert "guard" not in plain.state_dict()
    plain.load_state_dict(state)  # a loop that has dropped its guard
    again.load_state_dict(plain.state_dict())
    assert again.guard.rows == []


def test_a_wrong_action_is_refused() -> None:
    with pytest.raises(ValueError, match="guard='on'; legal: off, log, promote"):
        Precision("fp8_tensorwise", device="cpu", guard="on")


def test_a_mode_without_formats_warns() -> None:
    with pytest.warns(UserWarning, match="guard='log' has no effect: precision=bf16_mixed has no"):
        Precision("bf16_mixed", device="cpu", execution="native", guard="log")


def test_watching_for_exceptions_keeps_random_bits_and_guard() -> None:
    """Both are parts of the arithmetic that the watch wraps."""
    emulation = EmulatedProducts("nvfp4", 0, guard("promote", NOTHING))
    exceptions = WatchedRunExceptions("log", 20)
    watched = exceptions.precision("nvfp4", device="cpu", execution=emulation)
    assert watched.arithmetic.bits is emulation.bits
    assert watched.guard is emulation.guard
