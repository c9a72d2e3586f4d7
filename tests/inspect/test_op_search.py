"""A search names the planted ops that do not tolerate the lower dtype, and no others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.errors import NotMeasurableError
from mprun.inspect.op_search import HEAVY, OpCandidates, Sensitivity, promoted, sensitivity
from mprun.inspect.tolerance import Deviation, Tolerance
from mprun.precision.op_lists.lists import known, spelled

Function = Callable[[Tensor], Tensor]
FP16, BF16 = torch.float16, torch.bfloat16


class Planted(nn.Module):
    """Two linear layers with something between them, and something before them."""

    def __init__(self, between: Function = torch.relu, before: Function = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.between, self.before = between, before

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(self.before(x))))


def batches(largest: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.rand(8, 8, generator=generator) * largest,
            torch.randint(0, 3, (8,), generator=generator),
        )
        for _ in range(2)
    ]


def measured_with(
    between: Function = torch.relu,
    before: Function = lambda x: x,
    dtype: torch.dtype = FP16,
    largest: float = 1.0,
    **options: Any,
) -> Sensitivity:
    model = Planted(between, before)
    return sensitivity(model, F.cross_entropy, batches(largest), dtype, **options)


# ---- planted ops ---------------------------------------------------------------------------------
# Each is harmless in float32. What overflows is brought back into range by the ops behind it, which
# run in float32 because their input is: only the cause has to be on the list.


def exp(x: Tensor) -> Tensor:
    """e^12 and more: above 65504."""
    return torch.exp(x.abs() + 12).sqrt() / 1000


def power(x: Tensor) -> Tensor:
    """30^4 = 810000."""
    return ((torch.tanh(x) + 30).pow(4) - 810000) / 1e5


def total(x: Tensor) -> Tensor:
    """A sum of 16 numbers around 10000."""
    return x + (torch.tanh(x) + 10000).sum(-1, keepdim=True) / 160000


def reciprocal(x: Tensor) -> Tensor:
    """1 / 0.001 fits; the square of it, which the gradient takes, does not."""
    return torch.reciprocal(torch.sigmoid(x) * 1e-3 + 1e-3) * 1e-3


def inverse(x: Tensor) -> Tensor:
    """It has no 16-bit kernel."""
    return x @ torch.linalg.inv(x.mT @ x + torch.eye(16, dtype=x.dtype))


@pytest.mark.representative(1, 4, 8)
@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (torch.relu, ()),
        (F.gelu, ()),
        (nn.Softmax(-1), ()),
        (exp, ("exp",)),
        (power, ("pow",)),
        (total, ("sum",)),
        (reciprocal, ("reciprocal",)),
        (inverse, ("linalg_inv",)),
        (lambda x: exp(x) + reciprocal(x), ("exp", "reciprocal")),
        (lambda x: exp(x) + total(x), ("exp", "sum")),
    ],
)
def test_the_planted_ops_and_no_others_are_on_the_list(
    between: Function, expected: tuple[str, ...]
) -> None:
    ops = measured_with(between).smallest_ops()
    assert sorted(ops.fp32) == sorted(expected)
    assert {n for n, kind in ops.lists.rules.items() if kind == "fp32"} == set(expected)
    assert ops.is_within
    assert ops.measure.loss_difference < 0.01
    assert ops.measure.worst_db > 10


@pytest.mark.representative(2, 3)
@pytest.mark.parametrize(
    ("before", "largest", "expected"),
    [
        (torch.log1p, 1e6, ("log1p",)),  # raw counts
        (torch.sin, 1e4, ("sin",)),  # a time in seconds: float16 has steps of 8 there
        (lambda x: torch.log1p(x) + torch.sin(x / 10), 1e5, ("log1p", "div")),
        (torch.tanh, 1.0, ()),
    ],
)
def test_an_op_on_the_model_s_own_input_is_lower_at_first_too(
    before: Function, largest: float, expected: tuple[str, ...]
) -> None:
    assert sorted(measured_with(before=before, largest=largest).smallest_ops().fp32) == sorted(
        expected
    )


def test_in_the_backward_pass_alone_it_is_seen_in_the_gradients() -> None:
    measured = measured_with(reciprocal)
    assert measured.lower.loss_difference < 1e-3
    assert math.isnan(measured.lower.worst_db)
    (row,) = (row for row in measured.ops if row.name == "reciprocal")
    assert row.alone.loss_difference < 1e-3
    assert math.isnan(row.alone.worst_db)
    assert measured.kept(("reciprocal",)).worst_db > 40
    assert measured.smallest_ops(Tolerance(gradient_db=None)).fp32 == ()


def test_bfloat16_has_the_range_and_lacks_the_precision() -> None:
    """1000 + x has 8 bits for both: steps of 4 in bfloat16, of 1/2 in float16."""

    def shift(x: Tensor) -> Tensor:
        return torch.sub(torch.add(x * 2, 1000), 1000)

    assert measured_with(exp, dtype=BF16).smallest_ops().fp32 == ()
    assert measured_with(shift, dtype=BF16).smallest_ops().fp32 == ("add",)


# ---- rows ----------------------------------------------------------------------------------------


def test_alone_everything_else_is_float32_and_kept_everything_else_is_lower() -> None:
    measured = measured_with(exp)
    rows = {row.name: row for row in measured.ops}
    assert rows["linear"].alone.worst_db > 50  # 11 bits are 66 dB
    assert not math.isfinite(rows["exp"].alone.loss_difference)
    assert not math.isfinite(rows["sqrt"].alone.loss_difference)  # it takes 160000
    assert not math.isfinite(measured.kept(("div",)).loss_difference)
    assert math.isfinite(measured.kept(("exp",)).loss_difference)


@pytest.mark.parametrize(
    ("measure", "harm"),
    [
        (Deviation(0.005, 99, math.inf, "w", 1), 0.5),
        (Deviation(0.0, 99, 10.0, "w", 1), 1.0),
        (Deviation(0.0, 99, 30.0, "w", 1), 0.1),  # a tenth of the error in amplitude
        (Deviation(math.inf, math.nan, math.nan, "", 1), math.inf),
        (Deviation(math.nan, math.nan, math.nan, "", 1), math.inf),
        (Deviation(0.0, math.inf, math.inf, "w", 1), 0.0),
    ],
)
def test_harm_is_1_at_the_tolerance_and_infinite_where_a_number_is_none(
    measure: Deviation, harm: float
) -> None:
    assert Tolerance(loss=0.01, gradient_db=10).harm(measure) == pytest.approx(harm)


@pytest.mark.parametrize(
    ("difference", "db", "expected"),
    [
        (0.0001, 60.0, Tolerance(0.01, 20.0)),  # weights alone are far better than what is asked
        (0.01, 25.0, Tolerance(0.01 * 10**0.5, 15.0)),  # 10 dB worse: 10 times the power
        (0.0, math.inf, Tolerance(0.01, 20.0)),
    ],
)
def test_what_weights_alone_do_is_tolerated_and_10_db_more(
    difference: float, db: float, expected: Tolerance
) -> None:
    result = Tolerance(0.01, 20.0).beside(Deviation(difference, db, db, "w", 1))
    assert result.loss == pytest.approx(expected.loss)
    assert result.gradient_db == expected.gradient_db
    assert Tolerance(0.01, None).beside(Deviation(0.0, db, db, "w", 1)).gradient_db is None


def test_a_model_whose_gradients_no_16_bits_can_keep_gets_no_list() -> None:
    """A deep network of ReLU and batch normalisation: in bfloat16 its gradients are 10 dB above
    their errors, as with weights of 8 bits in float32. It trains in bfloat16 all the same."""
    torch.manual_seed(0)
    layers = [m for _ in range(12) for m in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU())]
    model = nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 3))
    measured = sensitivity(model, F.cross_entropy, batches(), BF16)
    assert measured.lower.worst_db < 15
    assert measured.unavoidable.worst_db < 25
    assert measured.smallest_ops().fp32 == ()


# ---- candidates ----------------------------------------------------------------------------------


def test_heavy_and_promoted_ops_are_named_as_calls_are() -> None:
    for name in (*HEAVY, *promoted()):
        assert name in known()
        assert spelled(name) == (name,)
    assert len(set(HEAVY)) == len(HEAVY)


def candidates(model: nn.Module, x: Tensor) -> OpCandidates:
    return OpCandidates(model, x, FP16)


def test_everything_lower_is_lower_from_the_first_op_to_the_last() -> None:
    """Buffers, constants, casts in the model's code and the input itself notwithstanding."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(8))
            self.scale = nn.Parameter(torch.ones(8))
            self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(torch.tanh(x) + self.table)
            h = self.scale * self.norm(h.float())
            return F.log_softmax(torch.where(h > 0, h, torch.zeros(8)), -1, dtype=torch.float32)

    model, x = Mixed(), torch.randn(4, 8)
    movable = candidates(model, x)
    assert list(movable.names) == [
        "tanh",
        "add",
        "linear",
        "layer_norm",
        "mul",
        "where",
        "log_softmax",
    ]


def test_ops_that_cannot_be_moved_are_no_candidates() -> None:
    class Code(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.drop(self.layer(x)).view(2, -1).reshape(-1, 8).contiguous()
            h.add_(1)  # in place
            h = F.relu(h.transpose(0, 1).clone()).double().sum()  # a view, a copy, a cast
            return h.float() if (h > 0).item() else h.float() * 2

    movable = candidates(Code(), torch.randn(4, 8))
    assert list(movable.names) == ["linear", "relu", "sum"]


def test_an_error_that_is_no_op_s_is_reported() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            raise RuntimeError("expected Float")
        return x

    with pytest.raises(
        NotMeasurableError, match=r"with every op in torch.float16, .*expected Float"
    ):
        measured_with(picky)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch.float64: legal are torch.float16, torch.bf"):
        measured_with(dtype=torch.float64)


def test_models_of_many_kinds_of_layer_are_measured() -> None:
    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)
            self.table, self.recurrent = nn.Embedding(10, 16), nn.LSTM(16, 16, batch_first=True)
            self.conv, self.norm = nn.Conv1d(16, 16, 3), nn.BatchNorm1d(16)
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            h, _ = self.recurrent(self.encoder(self.table(x)))
            return self.head(self.norm(self.conv(h.mT)).mean(2))

    torch.manual_seed(0)
    model = Kinds()
    data = [(torch.randint(0, 10, (4, 6)), torch.randint(0, 3, (4,)))]
    measured = sensitivity(model, F.cross_entropy, data, BF16)
    assert "conv.bias" in measured.probe.rounding.undetermined  # before a normalisation
    names = {row.name for row in measured.ops}
    assert {"embedding", "linear", "scaled_dot_product_attention", "lstm", "conv1d"} <= names
    assert {"batch_norm", "layer_norm", "mean"} <= names
    assert measured.lower.loss_difference < 0.05
