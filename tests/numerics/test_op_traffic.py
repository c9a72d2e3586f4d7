"""The bytes of an op: hand counts of each rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional

from mprun._torch import op_name
from mprun.numerics.op_cost import OpTraffic, tensor_bytes, traffic
from mprun.numerics.op_watcher import OpWatcher, RunOp


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
        (lambda: functional.embedding(ROWS, TABLE), 24 + 240, 240),
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
    y = functional.max_pool2d(x, 2)
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
