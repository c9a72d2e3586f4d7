"""Sums of gradients and means of buffers, in two processes of gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mprun.errors import RunFailedError
from mprun.precision.policy import policy
from mprun.train.parallel.layouts import BufferMean, ReplicaLayout
from mprun.train.parallel.ranks import GroupRanks
from tests.train.parallel.processes import Groups

FP32 = policy("fp32")
SHAPES = [(3, 5), (7,), (2, 2, 2), ()]


class Parameters(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for i, shape in enumerate(SHAPES):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype)))


def gradient(rank: int, index: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.Generator().manual_seed(10 * rank + index)
    return torch.randn(SHAPES[index], generator=drawn).to(dtype)


def layout_of(model: nn.Module, reduce_dtype: str = "float32") -> ReplicaLayout:
    layout = ReplicaLayout(GroupRanks(torch.device("cpu")))
    layout.arrange(model, replace(FP32, reduce_dtype=reduce_dtype))
    return layout


def backward(
    layout: ReplicaLayout, loss: Callable[[], Tensor], size: int = 1, is_last: bool = True
) -> None:
    value, output = layout.compute(lambda: (loss(), "output"), size, is_last)
    assert output == "output"
    value.backward()  # type: ignore[no-untyped-call]


def summed(
    dtype: torch.dtype,
    reduce_dtype: str,
    given: dict[int, list[int]],
    took: list[bool],
    passes: int = 1,
) -> list[Any]:
    """What the gradients are after two steps; `given` maps a process to its parameters in use."""
    rank = dist.get_rank()
    model = Parameters(dtype)
    layout = layout_of(model, reduce_dtype)
    parameters = [*model.parameters()]

    def loss() -> Tensor:
        used = [(parameters[i], gradient(rank, i, dtype)) for i in given[rank]]
        return torch.stack([(p * g).sum() for p, g in used]).sum()

    for _ in range(2):
        model.zero_grad()
        for number in range(passes):
            backward(layout, loss, int(took[rank]), number == passes - 1)
            if number < passes - 1:  # nothing was exchanged
                for i in given[rank]:
                    own = gradient(rank, i, dtype) * (number + 1)
                    assert torch.equal(parameters[i].grad, own)  # type: ignore[arg-type]
        layout.end_backward()
    return [p.grad for p in parameters]


def every_case() -> dict[str, Any]:
    full = [0, 1, 2, 3]
    f32, f16 = torch.float32, torch.float16
    both = {0: full, 1: full}
    return {
        "float32": summed(f32, "float32", both, [True, True]),
        "bfloat16 sums": summed(f32, "bfloat16", both, [True, True]),
        "float16 gradients": summed(f16, "float32", both, [True, True]),
        "on one side": summed(f32, "float32", {0: [0], 1: [1]}, [True, True]),
        "one took no part": summed(f32, "float32", both, [True, False]),
        "two micro-batches": summed(f32, "float32", both, [True, True], passes=2),
    }


def test_gradients_are_summed(groups: Groups) -> None:
    results = groups.call(every_case)
    for name in results[0]:
        for mine, other in zip(results[0][name], results[1][name], strict=True):
            assert (mine is None) == (other is None), name
            assert mine is None or torch.equal(mine, other), name
    found = results[0]
    for index in range(len(SHAPES)):
        a, b = (gradient(rank, index, torch.float32) for rank in range(2))
        assert torch.equal(found["float32"][index], a + b)
        # two terms: each is rounded to bfloat16, and so is their sum
        rounded = (a.bfloat16() + b.bfloat16()).float()
        assert torch.equal(found["bfloat16 sums"][index], rounded)
        low = gradient(0, index, torch.float16).float() + gradient(1, index, torch.float16).float()
        assert found["float16 gradients"][index].dtype == torch.float16
        assert torch.equal(found["float16 gradients"][index], low.half())
        assert torch.equal(found["one took no part"][index], a)
        assert torch.equal(found["two micro-batches"][index], 2 * a + 2 * b)
    assert not torch.equal(found["bfloat16 sums"][0], found["float32"][0])
    first, second, *rest = found["on one side"]
    assert torch.equal(first, gradient(0, 0, torch.float32))
    assert torch.equal(second, gradient(1, 1, torch.float32))
    assert rest == [None, None]


def overflow() -> list[float]:
    model = Parameters()
    layout, p = layout_of(model), model.p0
    factors = torch.ones(SHAPES[0])
    if dist.get_rank() == 1:
        factors[0, 0], factors[0, 1] = torch.inf, torch.nan
    backward(layout, lambda: (p * factors).sum())
    layout.end_backward()
    assert p.grad is not None
    found: list[float] = p.grad[0].tolist()
    return found


def test_an_overflow_of_one_process_reaches_all(groups: Groups) -> None:
    for row in groups.call(overflow):
        assert row[0] == torch.inf
        assert row[1] != row[1]
        assert row[2:] == [2.0, 2.0, 2.0]


def penalty() -> list[Any]:
    """The loss reads a parameter that the forward pass does not."""
    model = Parameters()
    layout = layout_of(model)
    for _ in range(2):
        model.zero_grad()
        backward(layout, lambda: model.p1.sum() + (model.p2 + 3.0).square().sum())
        layout.end_backward()
    return [p.grad for p in model.parameters()]


def test_parameters_that_the_loss_alone_reads_are_summed(groups: Groups) -> None:
    for first, second, third, last in groups.call(penalty):
        assert first is None
        assert last is None
        assert second.tolist() == [2.0] * 7
        assert third.flatten().tolist() == [12.0] * 8


def overlapping() -> bool:
    """Whether the sum of the last layer begins before the gradient of the first one is there."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(9)))  # 4 MiB each, 36 together
    layout = layout_of(model)
    begun: list[str] = []
    model[0].weight.register_hook(lambda _: begun.append("first layer's gradient"))
    send = dist.all_reduce

    def noted(*args: Any, **kwargs: Any) -> Any:
        begun.append("sum")
        return send(*args, **kwargs)

    dist.all_reduce = noted
    try:
        for _ in range(2):  # buckets are made in the order of the first step's gradients
            begun.clear()
            model.zero_grad()
            backward(layout, lambda: model(torch.ones(1, 1024)).sum())
            layout.end_backward()
    finally:
        dist.all_reduce = send
    return begun[0] == "sum" and begun[-1] == "sum" and "first layer's gradient" in begun


def test_sums_begin_during_the_backward_pass(groups: Groups) -> None:
    assert groups.call(overlapping) == [True, True]


def sparse() -> str:
    table = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    try:
        layout_of(table)
    except RunFailedError as error:
        return str(error)
    return ""


def test_sparse_gradients_are_refused(groups: Groups) -> None:
    for text in groups.call(sparse):
        assert "parallel=ddp adds up dense gradients, and those of 0 are sparse" in text
        assert "sparse=False" in text


def buffers(took: list[bool]) -> list[Tensor]:
    rank = dist.get_rank()
    norm = nn.BatchNorm1d(3)
    norm.running_mean = torch.full((3,), 1.0 + 2 * rank)
    norm.running_var = torch.full((3,), 4.0 + 4 * rank, dtype=torch.float64)
    norm.num_batches_tracked = torch.tensor(5 + rank)
    mean = BufferMean(norm, GroupRanks(torch.device("cpu")))
    mean.begin(took[rank])
    mean.finish()
    return [*norm.buffers()]


def test_buffers_are_the_mean_over_processes(groups: Groups) -> None:
    for rank, (mean, variance, count) in enumerate(groups.call(buffers, [True, True])):
        assert mean.tolist() == [2.0] * 3
        assert variance.tolist() == [6.0] * 3
        assert variance.dtype == torch.float64
        assert count.item() == 5 + rank  # integers are each process's own


def test_a_process_that_took_no_part_does_not_count(groups: Groups) -> None:
    for mean, variance, _ in groups.call(buffers, [False, True]):
        assert mean.tolist() == [3.0] * 3
        assert variance.tolist() == [8.0] * 3
