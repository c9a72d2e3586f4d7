"""What is a finding and what is none: masks, constants, infinities that come to nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from mprun.watch.nonfinite import NonfiniteReport, fp_exceptions

LENGTH, WIDTH = 6, 8
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
INF = math.inf

Mask = Callable[[Tensor], Tensor]
HIDDEN = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)


class Attention(nn.Module):
    """Causal attention of one head, with scores masked by a function."""

    def __init__(self, mask: Mask | None) -> None:
        super().__init__()
        self.mask = mask
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.mask is None:
            heads = (t.unsqueeze(1) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True).squeeze(1)
        else:
            scores = self.mask(q @ k.transpose(-1, -2) / math.sqrt(WIDTH))
            mixed = scores.softmax(-1) @ v
        return self.out(mixed)  # type: ignore[no-any-return]


def filled(scores: Tensor) -> Tensor:
    return scores.masked_fill(HIDDEN, -INF)


def chosen(scores: Tensor) -> Tensor:
    return torch.where(HIDDEN, -INF, scores)


def added(scores: Tensor) -> Tensor:
    return scores + torch.full((LENGTH, LENGTH), -INF, dtype=scores.dtype).triu(1)


def tensor_filled(scores: Tensor) -> Tensor:
    return scores.masked_fill(HIDDEN, torch.tensor(-INF))


def written(scores: Tensor) -> Tensor:
    mask = torch.zeros(LENGTH, LENGTH, dtype=scores.dtype)
    mask[HIDDEN] = -INF
    return scores + mask


def logarithm(scores: Tensor) -> Tensor:
    return scores + (~HIDDEN).to(scores.dtype).log()


def huge(scores: Tensor) -> Tensor:
    return scores + HIDDEN.to(scores.dtype) * -1e9


def padded(scores: Tensor) -> Tensor:
    wide = F.pad(scores, (0, 1), value=-INF)
    return filled(wide[..., :-1])


CONSTANT = [filled, chosen, added, tensor_filled, written, padded]
COMPUTED = [logarithm, huge]


def model_with(mask: Mask | None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attention(mask), nn.ReLU(), Attention(mask))


def train(
    model: nn.Module, dtype: torch.dtype = torch.float16, scale: float = 2.0**16, monitor: int = 4
) -> NonfiniteReport:
    """A few monitor of mixed precision with a dynamic loss scale."""
    optimizer = SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with fp_exceptions(model, optimizer) as found:
        for _ in range(monitor):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                output = model(X)
            scaler.scale(output.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    return found


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, *CONSTANT], ids=lambda m: getattr(m, "__name__", "sdpa"))
def test_a_clean_fp16_mixed_run_with_a_causal_mask_has_none(mask: Mask | None) -> None:
    found = train(model_with(mask))
    assert found.counts == {"finding": 0, "expected": 0, "absorbed": 0}


@pytest.mark.parametrize("mask", COMPUTED, ids=lambda m: m.__name__)
def test_a_computed_infinity_that_serves_as_a_mask_is_absorbed(mask: Mask) -> None:
    found = train(model_with(mask))
    assert found.counts["finding"] == found.counts["expected"] == 0
    assert {e.module for e in found.absorbed} == {"0", "2"}
    kinds = {"logarithm": "infinite", "huge": "overflow"}
    assert {e.kind for e in found.absorbed} == {kinds[mask.__name__]}
    assert all(e.reached == () for e in found.absorbed)


def test_a_mask_beside_a_fault_is_not_blamed() -> None:
    """Both go into the same softmax; the overflow's infinity is positive."""

    def hot(scores: Tensor) -> Tensor:
        return filled(scores * 1e30)

    found = train(Attention(hot), scale=1.0, monitor=1)
    assert [e.op for e in found.findings][:1] == ["mul"]
    assert "constant" not in {e.kind for e in found.findings}


class Unmasked(nn.Module):
    """Some of its outputs are minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return filled(self.linear(x))


def one_step(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> NonfiniteReport:
    optimizer = SGD(model.parameters(), lr=1e-2)
    with fp_exceptions(model, optimizer) as found:
        loss(model(X)).backward()
        optimizer.step()
    return found


def test_a_constant_that_reaches_the_loss_is_a_finding() -> None:
    (e,) = one_step(Unmasked(), Tensor.mean).findings
    assert (e.kind, e.op, e.module_kind) == ("constant", "masked_fill", "Unmasked")
    assert e.reached == ("the model's output", "the loss")


def test_a_constant_in_the_output_alone_is_none() -> None:
    """Actions that are not allowed get minus infinity; the loss looks at the others."""
    target = torch.zeros(2 * LENGTH, dtype=torch.long)
    found = one_step(Unmasked(), lambda y: F.cross_entropy(y.flatten(0, 1), target))
    assert sum(found.counts.values()) == 0


# ---- infinities that come to nothing -------------------------------------------------------------


def found_in(compute: Callable[[Tensor], Tensor]) -> NonfiniteReport:
    """What is found of a function without a gradient, whose result is finite."""

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                gate = compute(x.half() * 1e4)
            assert bool(torch.isfinite(gate).all())
            return x * gate

    found = one_step(nn.Sequential(nn.Linear(WIDTH, WIDTH), Gate()), Tensor.sum)
    assert sum(found.counts.values()) == 1
    return found


@pytest.mark.parametrize(
    ("compute", "op", "kind"),
    [
        (lambda x: (x * 0).log().exp(), "log", "infinite"),  # in float64 too
        (lambda x: (x * 0 / 0).nan_to_num(1.0), "div", "invalid"),
    ],
    ids=["exact", "replaced"],
)
def test_what_comes_to_nothing_is_absorbed(
    compute: Callable[[Tensor], Tensor], op: str, kind: str
) -> None:
    (e,) = found_in(compute).absorbed
    assert (e.op, e.kind, e.module, e.reached) == (op, kind, "1", ())


def test_without_a_backward_pass_the_output_counts() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad(), fp_exceptions(model) as found:
        model[1].weight.fill_(3e38)
        model(X)
    (e,) = found.findings
    assert (e.op, e.module, e.reached) == ("addmm", "1", ("the model's output",))


def test_memory_that_nothing_was_written_to_is_not_looked_at() -> None:
    with fp_exceptions(nn.Linear(WIDTH, WIDTH)) as found:
        for _ in range(50):  # some of it holds what was freed
            torch.full((64,), math.nan)
            torch.empty(64).copy_(torch.ones(64)).sum()
            torch.empty_like(torch.ones(64))
            torch.ones(64).new_empty(64)
    assert sum(found.counts.values()) == 0


def test_writing_over_a_bad_number_mends_it() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with fp_exceptions(model, SGD(model.parameters(), lr=1e-3)) as found:
        bad = torch.ones(WIDTH) / torch.zeros(WIDTH)
        bad.copy_(torch.ones(WIDTH))
        (model(X) * bad).sum().backward()
    assert found.findings == []
    assert len(found.absorbed) == 1


# ---- tensors of other kinds ----------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e3, 1e30])
def test_a_sparse_gradient_that_overflows_is_named(scale: float) -> None:
    """Sparse tensors are not followed in float64; the op that overflows is named all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
    optimizer = SGD(model.parameters(), lr=0.0)
    with fp_exceptions(model, optimizer) as found:
        output = model(torch.tensor([1, 1, 3])).sum() * scale
        (output * 1e15).backward()
        optimizer.step()
    assert bool(found.findings) == (scale > 1e20)
    assert {e.kind for e in found.findings} <= {"overflow"}
