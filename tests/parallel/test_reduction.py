"""Sums of gradients and means of buffers, in two processes of gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mprun.errors import RunFailedError
from mprun.parallel import reduction
from mprun.parallel.ranks import GroupRanks
from mprun.parallel.reduction import BufferMean, GradientSum
from tests.parallel.processes import Groups

SHAPES = [(3, 5), (7,), (2, 2, 2), ()]


def parameters(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Module()
    for i, shape in enumerate(SHAPES):
        model.register_parameter(f"p{i}", nn.Parameter(torch.zeros(shape, dtype=dtype)))
    return model


def gradient(rank: int, index: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.Generator().manual_seed(10 * rank + index)
    return torch.randn(SHAPES[index], generator=drawn).to(dtype)


def summed(
    dtype: torch.dtype, reduce_dtype: torch.dtype, given: dict[int, list[int]], took: list[bool]
) -> list[Any]:
    """What the gradients are after the sum; `given` maps a process to the parameters with one."""
    rank = dist.get_rank()
    model = parameters(dtype)
    for index, p in enumerate(model.parameters()):
        if index in given[rank]:
            p.grad = gradient(rank, index, dtype)
    before = [p.grad for p in model.parameters()]
    GradientSum(model, GroupRanks(torch.device("cpu")), reduce_dtype)(took[rank])
    after = [p.grad for p in model.parameters()]
    kept = [a is b for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    assert all(kept), "a gradient's tensor was replaced"
    return after


def every_case(bucket_bytes: int) -> dict[str, Any]:
    reduction.BUCKET_BYTES = bucket_bytes
    full = [0, 1, 2, 3]
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    both = {0: full, 1: full}
    return {
        "float32": summed(f32, f32, both, [True, True]),
        "bfloat16 sums": summed(f32, bf16, both, [True, True]),
        "float16 gradients": summed(f16, f32, both, [True, True]),
        "on one side": summed(f32, f32, {0: [0], 1: [1]}, [True, True]),
        "one took no part": summed(f32, f32, both, [True, False]),
    }


def check(results: list[dict[str, Any]]) -> None:
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
    assert not torch.equal(found["bfloat16 sums"][0], found["float32"][0])
    first, second, *rest = found["on one side"]
    assert torch.equal(first, gradient(0, 0, torch.float32))
    assert torch.equal(second, gradient(1, 1, torch.float32))
    assert rest == [None, None]


def test_gradients_are_summed_in_one_bucket(groups: Groups) -> None:
    check(groups.call(every_case, reduction.BUCKET_BYTES))


def test_gradients_are_summed_in_several_buckets(groups: Groups) -> None:
    check(groups.call(every_case, 32))


def test_buckets_hold_every_parameter_once_in_order() -> None:
    model = parameters()
    wanted = [*model.parameters()]
    assert [p for b in reduction._buckets(wanted, 4) for p in b] == wanted
    assert len([*reduction._buckets(wanted, 4)]) == 1


def overflow() -> list[float]:
    model = parameters()
    for index, p in enumerate(model.parameters()):
        p.grad = torch.ones(SHAPES[index])
    if dist.get_rank() == 1:
        first = next(model.parameters())
        assert first.grad is not None
        first.grad[0, 0], first.grad[0, 1] = torch.inf, torch.nan
    GradientSum(model, GroupRanks(torch.device("cpu")), torch.float32)(True)
    found = next(model.parameters()).grad
    assert found is not None
    return found[0].tolist()


def test_an_overflow_of_one_process_reaches_all(groups: Groups) -> None:
    for row in groups.call(overflow):
        assert row[0] == torch.inf
        assert row[1] != row[1]
        assert row[2:] == [2.0, 2.0, 2.0]


def sparse() -> str:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()  # type: ignore[no-untyped-call]
    try:
        GradientSum(table, GroupRanks(torch.device("cpu")), torch.float32)(True)
    except RunFailedError as error:
        return str(error)
    return ""


def test_sparse_gradients_are_refused(groups: Groups) -> None:
    for text in groups.call(sparse):
        assert "parallel=ddp adds up dense gradients" in text
        assert "[4, 2]" in text
        assert "sparse=False" in text


def buffers(took: list[bool]) -> list[Tensor]:
    rank = dist.get_rank()
    norm = nn.BatchNorm1d(3)
    norm.running_mean = torch.full((3,), 1.0 + 2 * rank)
    norm.running_var = torch.full((3,), 4.0 + 4 * rank, dtype=torch.float64)
    norm.num_batches_tracked = torch.tensor(5 + rank)
    BufferMean(norm, GroupRanks(torch.device("cpu")))(took[rank])
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
