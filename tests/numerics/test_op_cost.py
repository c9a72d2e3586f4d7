"""The work of a step: hand counts of a linear layer and a convolution, and what is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun._torch import op_name
from mprun.numerics.memory_recorder import fake_tensors
from mprun.numerics.op_cost import (
    UPDATE,
    OpCost,
    OpTraffic,
    count_costs,
    op_flops,
    tensor_bytes,
    traffic,
    update_bytes,
)
from mprun.numerics.op_watcher import OpWatcher, RunOp
from mprun.optim import AdamW


def costs(
    model: nn.Module, x: Tensor, shape: tuple[int, ...], optimizer: torch.optim.Optimizer
) -> list[OpCost]:
    """Of a step whose loss gives the output a gradient of ones, made before the step."""
    gradient = torch.ones(shape)

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward(gradient)
        optimizer.step()

    return count_costs(step, model, optimizer)


def totals(ops: list[OpCost]) -> dict[str, tuple[int, int, int]]:
    """Group to ops, FLOPs and bytes."""
    names = {op.group for op in ops}
    own = {name: [op for op in ops if op.group == name] for name in names}
    return {n: (len(v), sum(o.flops for o in v), sum(o.nbytes for o in v)) for n, v in own.items()}


@pytest.mark.parametrize("fake", [False, True])
def test_the_step_of_a_linear_layer_is_its_hand_count(fake: bool) -> None:
    batch, inputs, outputs = 5, 7, 11
    x_n, w_n, y_n = batch * inputs, inputs * outputs, batch * outputs

    def count() -> list[OpCost]:
        model, x = nn.Linear(inputs, outputs), torch.randn(batch, inputs, requires_grad=True)
        return costs(model, x, (batch, outputs), torch.optim.SGD(model.parameters(), 0.1))

    if fake:
        with fake_tensors():
            ops = count()
    else:
        ops = count()
    found = totals(ops)
    # y = x w' + b, and the gradients of x and w: batch * inputs * outputs products each
    assert found["matmul"] == (
        3,
        3 * 2 * batch * inputs * outputs,
        4 * ((x_n + w_n + outputs + y_n) + (y_n + w_n + x_n) + (y_n + x_n + w_n)),
    )
    assert found["optimizer"] == (1, 0, 4 * 3 * (w_n + outputs))  # p read and written, g read
    bias = [op for op in ops if op.name == "sum"]
    assert [op.nbytes for op in bias] == [4 * (y_n + outputs)]
    assert "cast" not in found
    assert "convolution" not in found


def test_the_step_of_a_convolution_is_its_hand_count() -> None:
    n, channels, filters, height, width = 2, 3, 4, 6, 5
    model = nn.Conv2d(channels, filters, 3, padding=1)
    x, shape = torch.randn(n, channels, height, width), (n, filters, height, width)
    found = totals(costs(model, x, shape, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)))
    # of 3 taps, the first and the last row (column) have 2 that meet no padding
    products = n * filters * channels * (3 * height - 2) * (3 * width - 2)
    w_n, y_n = 9 * channels * filters, n * filters * height * width
    assert found["convolution"] == (
        2,  # x has no gradient
        2 * 2 * products,
        4 * ((x.numel() + w_n + filters + y_n) + (y_n + x.numel() + w_n + filters)),
    )
    assert found["optimizer"] == (1, 0, 4 * 5 * (w_n + filters))  # momentum read and written


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_products_with_padding_do_not_count(
    stride: int, padding: int, dilation: int, groups: int
) -> None:
    x, w = torch.ones(2, 4, 9, 7), torch.ones(6, 4 // groups, 3, 2)
    y = torch.conv2d(x, w, None, stride, padding, dilation, groups)
    args = (x, w, None, [stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups)
    # of ones, the result is the number of products that are not with a zero
    assert op_flops(torch.ops.aten.convolution.default, args, {}, y) == 2 * int(y.sum())


def test_the_masked_half_of_causal_attention_does_not_count() -> None:
    q = torch.randn(2, 3, 16, 8, requires_grad=True)

    def flops(causal: bool) -> int:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step() -> None:
            F.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward()

        return sum(op.flops for op in count_costs(step, model, optimizer))

    forward, backward = 2 * 2 * 2 * 3 * 16 * 16 * 8, 5 * 2 * 2 * 3 * 16 * 16 * 8
    assert flops(False) == forward + backward  # two products, and five with the recomputed scores
    assert flops(True) == (forward + backward) // 2


def test_the_layers_of_an_lstm_multiply_each_sample_by_all_their_weights() -> None:
    model, x = nn.LSTM(3, 5, num_layers=2), torch.randn(7, 2, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ops = count_costs(lambda: model(x)[0].sum().backward(), model, optimizer)
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    forward = 2 * 7 * 2 * weights
    # backward: to the weights and to what they were multiplied by
    whole = 3 * forward
    if "mkldnn_rnn_layer" in {op.name for op in ops}:
        assert sum(op.flops for op in ops) == whole
    else:  # PyTorch's own products leave out the gradient of x
        assert forward < sum(op.flops for op in ops) <= whole


class WithCasts(nn.Module):
    """A linear layer, with needless casts of its output if asked for."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.layer, self.casts = nn.Linear(64, 64), casts

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.to(torch.bfloat16).to(torch.float32) if self.casts else y


def test_a_needless_cast_shows_up_as_one() -> None:
    found = {}
    for casts in (False, True):
        model = WithCasts(casts)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found[casts] = costs(model, torch.randn(32, 64), (32, 64), optimizer)
    assert "cast" not in totals(found[False])
    # there and back, in both passes: 4 bytes and 2 bytes a number each
    assert totals(found[True])["cast"] == (4, 0, 4 * 6 * 32 * 64)
    assert all(op.time_s > 0 for op in found[True] if op.group == "cast")
    assert totals(found[True])["matmul"] == totals(found[False])["matmul"]


@pytest.mark.parametrize(
    ("make", "per_number"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), 12),
        (lambda p: torch.optim.AdamW(p, foreach=False), 28),
        (lambda p: torch.optim.AdamW(p, fused=True), 28),
        (lambda p: AdamW(p, 1e-3), 28),
    ],
)
def test_an_update_counts_as_one_pass_whatever_its_kernels_are(
    make: Callable[..., torch.optim.Optimizer], per_number: int
) -> None:
    model = nn.Linear(32, 32, bias=False)
    frozen = nn.Parameter(torch.ones(100))  # without a gradient
    optimizer = make([*model.parameters(), frozen])
    (update,) = [
        op for op in costs(model, torch.randn(4, 32), (4, 32), optimizer) if op.name == UPDATE
    ]
    steps = 2 * 4  # the count of steps may be a tensor: read and written
    assert 0 <= update.nbytes - per_number * 32 * 32 <= steps
    assert update.nbytes == update_bytes(optimizer)
    assert update.time_s > 0


def test_ops_know_their_phase() -> None:
    model = nn.Linear(8, 8)
    ops = costs(model, torch.randn(4, 8), (4, 8), torch.optim.SGD(model.parameters(), 0.1))
    assert Counter(op.phase for op in ops if op.group == "matmul") == {"forward": 1, "backward": 1}
    assert ops[-1].phase == "optimizer"


# ---- the bytes of an op --------------------------------------------------------------------------


class Traffics(OpWatcher):
    """Keeps the traffic of each op."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, OpTraffic]] = []

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        result = run()
        self.rows.append((op_name(func), traffic(func, args, kwargs, result)))
        return result


def moved(call: Callable[[], object]) -> list[tuple[str, OpTraffic]]:
    watcher = Traffics()
    with watcher:
        call()
    return watcher.rows


X = torch.randn(10, 20)
TABLE = torch.randn(1000, 20)
ROWS = torch.tensor([3, 5, 7])


@pytest.mark.parametrize(
    ("call", "read", "written"),
    [
        (lambda: X + X, 800, 800),  # one tensor twice is read once
        (lambda: X + X.t().reshape(10, 20), 2 * 800, 800),  # of the last op, after the copy
        (lambda: X.clone().add_(1.0), 800, 800),
        (lambda: X.clone().zero_(), 0, 800),
        (lambda: X.clone().copy_(X), 800, 800),
        (lambda: torch.zeros_like(X), 0, 800),
        (lambda: torch.empty_like(X), 0, 0),
        (lambda: X.new_empty(5), 0, 0),
        (lambda: torch.ones(5), 0, 20),
        (lambda: X.to(torch.bfloat16), 800, 400),
        (lambda: X.sum(), 800, 4),
        (lambda: torch.ones(1, 20).expand(10, 20) + X, 80 + 800, 800),
        (lambda: F.embedding(ROWS, TABLE), 24 + 240, 240),
        (lambda: TABLE[ROWS], 24 + 240, 240),
        (lambda: TABLE.clone().index_add_(0, ROWS, TABLE[:3]), 24 + 240, 0),
        (lambda: torch._foreach_add_([X.clone(), X.clone()], 1.0), 1600, 1600),
    ],
)
def test_an_op_moves_its_distinct_tensors_once(
    call: Callable[[], object], read: int, written: int
) -> None:
    name, last = moved(call)[-1]
    assert last == OpTraffic(read, written, False), name


@pytest.mark.parametrize(
    "call",
    [
        lambda: X.t(),
        lambda: X.view(20, 10),
        lambda: X[2:5],
        lambda: X.detach(),
        lambda: X.expand(3, 10, 20),
    ],
)
def test_a_view_moves_nothing(call: Callable[[], object]) -> None:
    assert moved(call)[-1][1] == OpTraffic(0, 0, True)


def test_the_backward_pass_of_a_pooling_does_not_read_its_input() -> None:
    x = torch.randn(1, 1, 8, 8, requires_grad=True)
    y = F.max_pool2d(x, 2)
    rows = dict(moved(lambda: y.backward(torch.ones_like(y))))
    # the gradient and the indices (int64) of 16 maxima are read, 64 numbers are written
    assert rows["max_pool2d_with_indices_backward"] == OpTraffic(16 * (4 + 8), 64 * 4, False)


@pytest.mark.parametrize("wanted", ["input", "weight", "both"])
def test_a_gradient_of_a_convolution_reads_the_other_factor(wanted: str) -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=wanted != "weight")
    w = torch.randn(4, 3, 3, 3, requires_grad=wanted != "input")
    y = torch.conv2d(x, w)
    rows = dict(moved(lambda: y.backward(torch.ones(y.shape))))
    own = {"input": w.numel(), "weight": x.numel(), "both": w.numel() + x.numel()}[wanted]
    made = {"input": x.numel(), "weight": w.numel(), "both": w.numel() + x.numel()}[wanted]
    assert rows["convolution_backward"] == OpTraffic(4 * (own + y.numel()), 4 * made, False)


def test_windows_that_overlap_have_no_more_than_their_storage() -> None:
    assert tensor_bytes(torch.ones(10).unfold(0, 5, 1)) == 40
