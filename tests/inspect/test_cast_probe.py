"""Loss and gradients of a model under some cast plan, compared with float32's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mprun.errors import NotMeasurableError
from mprun.inspect.cast_probe import LOSS_SCALES, CastProbe
from mprun.inspect.passes import FLOAT32, CastPlan, Passes, ready
from mprun.inspect.tolerance import Deviation
from mprun.precision import AutocastCaster, NoCaster, OpListCaster, op_lists
from mprun.precision.rounding import sqnr_db
from mprun.watch.updates import MOVE, MOVED, weights_moved

FP16 = CastPlan(AutocastCaster("cpu", torch.float16))
BF16 = CastPlan(AutocastCaster("cpu", torch.bfloat16))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(n: int = 2, features: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, features, generator=generator),
            torch.randint(0, 3, (8,), generator=generator),
        )
        for _ in range(n)
    ]


def probe(model: nn.Module, data: Any = None, **options: Any) -> CastProbe:
    return CastProbe(Passes(model, F.cross_entropy, batches() if data is None else data), **options)


class Casting(nn.Module):
    """A model that computes `function` on the outcome of a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Spoiling(NoCaster):
    """Casts nothing; gradients are changed after the backward pass."""

    def __init__(self, change: Callable[[], None]) -> None:
        self.change = change

    def backward(self, loss: Tensor, *_: object) -> None:
        loss.backward()
        self.change()


def overflow(*parameters: Tensor) -> None:
    for p in parameters:
        assert p.grad is not None
        p.grad.view(-1)[0] = math.inf


# ---- the measurement -----------------------------------------------------------------------------


def test_float32_is_exactly_itself() -> None:
    assert probe(mlp()).measure(FLOAT32) == Deviation(
        *(0.0, math.inf, math.inf, "0.weight", 1.0, "", 0.0, math.inf, "0.weight")
    )


@pytest.mark.parametrize(("plan", "dtype"), [(FP16, torch.float16), (BF16, torch.bfloat16)])
def test_the_measure_is_that_of_a_loop_written_out(plan: CastPlan, dtype: torch.dtype) -> None:
    """Exactly: both run the same ops, and sums of squares of a few hundred numbers in float64
    differ by less than 1e-9 dB whatever their order."""
    model, data = mlp(), batches()
    change = whole = 0.0
    exact: list[list[Tensor]] = []
    measured: list[list[Tensor]] = []
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        exact.append(list(torch.autograd.grad(loss, list(model.parameters()))))
        with torch.autocast("cpu", dtype):
            output = model(x)
        low = F.cross_entropy(output.float(), y)
        measured.append(list(torch.autograd.grad(low, list(model.parameters()))))
        change, whole = change + abs(low.item() - loss.item()), whole + loss.item()
    measure = probe(model).measure(plan)
    assert measure.loss_difference == change / whole

    def together(tensors: list[list[Tensor]], which: slice) -> Tensor:
        return torch.cat([g.flatten() for batch in tensors for g in batch[which]])

    each = [
        sqnr_db(together(exact, slice(n, n + 1)), together(measured, slice(n, n + 1)))
        for n in range(4)
    ]
    everything = sqnr_db(together(exact, slice(None)), together(measured, slice(None)))
    assert measure.gradients_db == pytest.approx(everything, abs=1e-9)
    assert measure.worst_db == pytest.approx(min(each), abs=1e-9)
    names = [name for name, _ in model.named_parameters()]
    assert measure.worst_parameter == names[each.index(min(each))]


def test_a_layer_whose_gradient_is_lost_shows_beside_one_with_larger_gradients() -> None:
    """Its gradients are 1e-4 of the other's and underflow in float16; all of them as one vector
    would have an SQNR of 80 dB."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.large(x) + 1e-4 * self.small(x)

    torch.manual_seed(0)
    model = Two()

    def lose() -> None:
        for p in model.small.parameters():
            p.grad = torch.zeros_like(p)

    measure = probe(model).measure(CastPlan(Spoiling(lose)))
    assert measure.gradients_db > 70
    assert measure.worst_db == pytest.approx(0, abs=1e-9)  # all of it is error
    assert measure.worst_parameter.startswith("small.")


def test_a_bias_before_a_normalisation_is_not_judged() -> None:
    """Its gradient is zero by theory and rounding errors in float32, so no dtype gets it right."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 3))
    data = [(x.unsqueeze(1), y) for x, y in batches()]
    measured = probe(model, data)
    assert measured.rounding.undetermined == ("0.bias",)
    assert measured.measure(FP16).worst_db > 40  # 11 bits are 66 dB; with the bias it would be 0


class Float32Only(nn.Module):
    """A model whose code does not run in float64, with a bias before a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.first.weight.dtype == torch.float64:
            raise TypeError("float32 is all there is")
        return self.last(self.norm(self.first(x)))


class OtherInFloat64(Float32Only):
    """One that computes something else there."""

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first.weight.dtype == torch.float64
        return self.last(self.norm(self.first(2 * x.exp() if wide else x)))


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Float32Only, "float32 is all there is"), (OtherInFloat64, "its loss is ")],
)
def test_a_model_that_has_no_float64_is_looked_at_with_moved_weights(
    model: type[nn.Module], reason: str
) -> None:
    measured = probe(model())
    assert measured.rounding.reference.name == MOVED
    assert measured.rounding.reference.reason.startswith(reason)
    assert measured.rounding.undetermined == ("first.bias",)
    assert measured.rounding.zero == ()


def test_a_gradient_that_overflows_counts_though_it_means_nothing() -> None:
    """A step with it cannot be taken."""

    model = Float32Only()
    measure = probe(model).measure(CastPlan(Spoiling(lambda: overflow(model.first.bias))))
    assert math.isnan(measure.worst_db)
    assert math.isnan(measure.judged_db)
    assert measure.worst_parameter == "first.bias"


def noisy(model: nn.Module, power: float, along: bool) -> CastPlan:
    """Errors of a given power relative to each gradient's, across it or along it."""

    def spoil() -> None:
        generator = torch.Generator().manual_seed(3)
        for p in model.parameters():
            assert p.grad is not None
            error = p.grad if along else torch.randn(p.shape, generator=generator)
            p.grad -= error / error.norm() * p.grad.norm() * power**0.5

    return CastPlan(Spoiling(spoil))


def test_noise_that_batches_have_as_well_is_forgiven_and_what_is_lost_is_not() -> None:
    """Gradients of 2 samples differ by more than their mean from batch to batch."""
    torch.manual_seed(0)
    model = nn.Linear(32, 3)
    data = [(torch.randn(2, 32), torch.randint(0, 3, (2,))) for _ in range(8)]
    measured = probe(model, data)
    noise = measured.measure(noisy(model, 0.3, along=False))
    assert noise.worst_db == pytest.approx(5.2, abs=0.1)
    assert noise.judged_db == math.inf
    lost = measured.measure(noisy(model, 0.5, along=True))
    assert lost.worst_db == lost.judged_db == pytest.approx(3, abs=0.1)
    many = measured.measure(noisy(model, 0.6, along=False))
    assert many.judged_db == many.worst_db


def test_nothing_is_forgiven_where_one_batch_says_nothing_of_others() -> None:
    model = mlp()
    measure = probe(model, batches(1)).measure(noisy(model, 0.5, along=False))
    assert measure.judged_db == measure.worst_db == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_measure_too(value: float) -> None:
    def spoil(x: Tensor) -> Tensor:
        return x * value if x.dtype == torch.float16 else x

    measure = probe(Casting(spoil)).measure(FP16)
    assert not math.isfinite(measure.loss_difference)
    assert math.isnan(measure.gradients_db)
    assert math.isnan(measure.worst_db)
    assert measure.worst_parameter == ""


def test_a_gradient_that_is_not_finite_beside_a_finite_loss() -> None:
    model = mlp()
    measured = probe(model, loss_scales=(16.0, 4.0))
    assert measured.rounding.undetermined == ()  # all are judged
    measure = measured.measure(CastPlan(Spoiling(lambda: overflow(model[0].bias))))
    assert measure.loss_difference == 0
    assert math.isnan(measure.worst_db)
    assert (measure.worst_parameter, measure.loss_scale) == ("0.bias", 4)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_unavoidable_is_what_weights_of_a_dtype_s_precision_do(
    dtype: torch.dtype, bits: int
) -> None:
    """A uniform share of at most 2^-bits has a root mean square of 2^-bits / sqrt(3). The gradient
    of a linear loss in one layer is linear in the other; its error is a mean over 4,096 shares,
    known to about 0.1 dB."""
    model = nn.Sequential(nn.Linear(16, 4096, bias=False), nn.Linear(4096, 1, bias=False))
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p)
    data = [(torch.randn(64, 16), torch.zeros(()))]
    passes = Passes(model, lambda output, _: output.sum(), data)
    before = passes.run(FLOAT32, 0).loss
    measured = CastProbe(passes).unavoidable(dtype)
    noise = 2.0**-bits / math.sqrt(3)
    assert measured.gradients_db == pytest.approx(-20 * math.log10(noise), abs=0.5)
    assert passes.run(FLOAT32, 0).loss == before  # the weights are back


def test_gradients_are_taken_with_the_largest_loss_scale_at_which_they_are_finite() -> None:
    """Behind the factor 64 the gradient of the first layer overflows float16 at 2^16, not at 2^8:
    it is of the order of 64 / 8 samples."""
    model = Casting(lambda x: x * 64)
    measured = probe(model, loss_scales=LOSS_SCALES[torch.float16])
    measure = measured.measure(FP16)
    assert measure.loss_scale in (2.0**12, 2.0**8)
    assert measure.worst_db > 40


def test_a_loss_scale_saves_gradients_that_underflow() -> None:
    def tiny(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * 1e-6

    without = CastProbe(Passes(mlp(), tiny, batches())).measure(FP16)
    scaled = CastProbe(Passes(mlp(), tiny, batches()), (2.0**16,)).measure(FP16)
    assert without.worst_db < 10
    assert scaled.worst_db > 40


def test_sparse_gradients_are_measured() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.EmbeddingBag(20, 6, sparse=True), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.table(x))

    torch.manual_seed(0)
    data = [(torch.randint(0, 20, (8, 4)), torch.randint(0, 3, (8,)))]
    measure = probe(Bag(), data).measure(FP16)
    assert 40 < measure.worst_db < 90


# ---- an op that fails ----------------------------------------------------------------------------


def test_an_op_without_a_kernel_is_a_measure_with_its_failure() -> None:
    def inverse(x: Tensor) -> Tensor:
        return x @ torch.linalg.inv(x.mT @ x + torch.eye(8, dtype=x.dtype))

    measured = probe(Casting(inverse))
    plan = CastPlan(OpListCaster(op_lists(["linear"], [], ["add"]), torch.float16))
    measure = measured.measure(plan)
    assert math.isnan(measure.loss_difference)
    assert "Low precision dtypes not supported" in measure.failure


def test_what_fails_in_float32_too_is_the_model_s_own_fault() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        probe(Casting(broken))


def test_a_device_out_of_memory_is_no_property_of_a_dtype() -> None:
    def full(x: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x

    with pytest.raises(torch.OutOfMemoryError):
        probe(Casting(full)).measure(FP16)


# ---- what is refused -----------------------------------------------------------------------------


def not_a_number(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * math.nan


def steep(output: Tensor, target: Tensor) -> Tensor:
    return (output - output.detach()).sqrt().sum()


@pytest.mark.parametrize(
    ("model", "data", "loss", "message"),
    [
        (mlp(), [], F.cross_entropy, "there is no batch"),
        (nn.Flatten(), batches(), F.cross_entropy, "no parameter that is trained"),
        (mlp().requires_grad_(False), batches(), F.cross_entropy, "no parameter that is trained"),
        (mlp().half(), batches(), F.cross_entropy, "parameter 0.weight is torch.float16"),
        (mlp(), batches(), not_a_number, "the loss of batch 0 is nan: nothing to compare with"),
        (mlp(), batches(), steep, "a gradient of batch 0 is not finite"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(
    model: nn.Module, data: Any, loss: Any, message: str
) -> None:
    with pytest.raises(NotMeasurableError, match=message):
        CastProbe(Passes(model, loss, data))


# ---- the model is left as it was -----------------------------------------------------------------


class Busy(nn.Module):
    """Draws random numbers, keeps statistics in every plan there is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1  # another tensor
        return self.last(self.drop(self.norm(x)))


@pytest.mark.parametrize("fails", [False, True])
def test_flags_buffers_gradients_and_random_numbers_are_put_back(fails: bool) -> None:
    torch.manual_seed(0)
    model = Busy()
    model.last.eval()
    model(torch.randn(8, 6)).sum().backward()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    state = torch.get_rng_state()
    if fails:
        with pytest.raises(RuntimeError, match="running_mean"), ready(model):
            model(torch.randn(8, 7))
    else:
        measured = probe(model)
        measured.measure(FP16)
    assert [m.training for m in (model, model.norm, model.drop, model.last)] == [
        True,
        True,
        True,
        False,
    ]
    assert {k: v.tolist() for k, v in model.state_dict().items()} == {
        k: v.tolist() for k, v in before.items()
    }
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_batch_normalisation_takes_the_batch_s_statistics_and_dropout_drops_nothing() -> None:
    model = Busy()
    x = batches()[0][0]
    with ready(model):
        output = model(x)
    normal = (x - x.mean(0)) / (x.var(0, unbiased=False) + model.norm.eps).sqrt()
    expected = F.linear(normal, model.last.weight, model.last.bias)
    torch.testing.assert_close(output, expected)


class GivesLossesInTraining(nn.Module):
    """As a detector does."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        output = self.last(self.drop(x))
        return {"loss": output.square().mean()} if self.training else [output]


def test_a_module_whose_code_asks_for_training_trains_and_dropout_drops_nothing() -> None:
    model, x = GivesLossesInTraining(), torch.randn(8, 6)
    with ready(model):
        output = model(x)
    assert torch.equal(output["loss"], model.last(x).square().mean())
    assert model.drop.training


def test_random_numbers_of_a_model_are_the_same_in_each_pass() -> None:
    measured = probe(Casting(lambda x: x + torch.randn_like(x)))
    assert measured.measure(CastPlan(NoCaster())).worst_db == math.inf


def test_moved_weights_move_by_a_millionth_and_come_back() -> None:
    parameters = list(mlp().parameters())
    before = [p.detach().clone() for p in parameters]
    with weights_moved(parameters, MOVE):
        for p, b in zip(parameters, before, strict=True):
            share = (p / b - 1).abs()
            assert 0 < share.max() <= MOVE * 1.1  # the product is rounded too, by 2^-24
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


# ---- models and inputs of all kinds --------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, other: Tensor) -> dict[str, Tensor]:
        return {"logits": self.a(x) + self.b(other), "count": torch.tensor(2)}


@pytest.mark.parametrize("named", [False, True])
def test_inputs_may_be_several_and_outputs_a_structure(named: bool) -> None:
    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        assert output["logits"].dtype == torch.float32
        assert output["count"].dtype == torch.int64
        return F.cross_entropy(output["logits"], target)

    torch.manual_seed(0)
    data = [({"x": x, "other": x} if named else (x, x), y) for x, y in batches()]
    measure = CastProbe(Passes(Pair(), loss, data)).measure(BF16)
    assert 30 < measure.worst_db < 70


def test_code_that_is_run_again_in_the_backward_pass_is_cast_again() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    lists = op_lists(["linear", "tanh"], [])
    plain = probe(mlp()).measure(CastPlan(OpListCaster(lists, torch.bfloat16)))
    again = probe(Again()).measure(CastPlan(OpListCaster(lists, torch.bfloat16)))
    for figure in ("loss_difference", "gradients_db", "worst_db"):
        assert getattr(again, figure) == getattr(plain, figure)
