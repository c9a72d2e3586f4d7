"""Casts of weights that one forward pass repeats, by reason; and that counting changes no bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mprun
from mprun.precision._torch import dispatch_modes
from mprun.watch.audit import KINDS
from mprun.watch.cast_counts import FIXES, CastCounts, DtypeRow, RepeatedCast, dtype_rows, totals

X = torch.randn(2, 8)


class Twice(nn.Module):
    """Two layers, of which the first is called `calls` times, each in a region of its own or not.

    Args:
        own_regions: whether each call enters autocast again.
    """

    def __init__(self, own_regions: bool = False, calls: int = 3) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)
        self.own_regions, self.calls = own_regions, calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            with torch.autocast("cpu", torch.bfloat16) if self.own_regions else nullcontext():
                x = self.shared(x)
        return self.head(x.float())  # type: ignore[no-any-return]


def counted(model: nn.Module, cache: bool = True, enabled: bool = True) -> CastCounts:
    with (
        CastCounts(model) as casts,
        torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=cache),
    ):
        model(X)
    return casts


def summary(casts: CastCounts) -> dict[str, tuple[int, str]]:
    return {cast.parameter: (cast.count, cast.reason) for cast in casts.repeated()}


def test_one_region_around_the_forward_pass_casts_each_weight_once() -> None:
    model = Twice()
    casts = counted(model)
    assert {key.dtype for key in casts._counts} == {torch.bfloat16}
    assert casts.repeated() == []
    assert mprun.audit(model, casts=casts).findings == ()


def test_regions_in_a_loop_cast_again() -> None:
    model = Twice(own_regions=True)
    with CastCounts(model) as casts:
        model(X)
    assert summary(casts) == {"shared.weight": (3, "region"), "shared.bias": (3, "region")}
    weight = casts.repeated()[0]
    assert weight == RepeatedCast("shared.weight", torch.bfloat16, 3, 2 * 64 * (4 + 2), "region")
    (finding,) = mprun.audit(model, casts=casts).findings
    assert (finding.kind, finding.module, finding.fix) == (
        "repeated_cast",
        "shared",
        FIXES["region"],
    )
    assert finding.kind in KINDS
    assert "2 parameters are cast to bfloat16 3 times in one forward pass" in finding.text


def test_without_the_cache_and_frozen() -> None:
    assert summary(counted(Twice(), cache=False))["shared.weight"] == (3, "cache")
    model = Twice()
    model.shared.requires_grad_(False)
    casts = counted(model)
    assert summary(casts) == {"shared.weight": (3, "frozen"), "shared.bias": (3, "frozen")}
    (finding,) = mprun.audit(model, casts=casts).findings
    assert (finding.module, finding.fix) == ("shared", FIXES["frozen"])


def test_views_are_counted_by_part() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Any:
            halves = [x @ part.t() for part in self.weight.chunk(2)]  # each part once
            return halves if self.training else [*halves, x @ self.weight[:4].t()]

    model = Views()
    assert counted(model).repeated() == []
    model.eval()
    cast = RepeatedCast("weight", torch.bfloat16, 2, 32 * 6, "view")
    assert counted(model).repeated() == [cast]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_finding_names_the_fewest_modules(frozen: bool) -> None:
    body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.LayerNorm(8))

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body.requires_grad_(not frozen), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            for _ in range(2):
                x = self.body(x)
            return self.head(x)

    model = Loop()
    found = [f.module for f in mprun.audit(model, casts=counted(model)).findings]
    assert found == (["body"] if frozen else [])


def test_counting_changes_no_bit_and_no_random_number() -> None:
    model = nn.Sequential(Twice(own_regions=True), nn.Dropout(0.5))

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(X)
        y.float().square().sum().backward()
        return [y.detach(), torch.rand(1), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]

    plain = step()
    with CastCounts(model):
        watched = step()
    assert all(map(torch.equal, plain, watched))


def test_compiled_code_stays_compiled() -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: (calls.append(1), graph(*args))[1]

    layer = nn.Linear(8, 8)
    model: Any = torch.compile(layer, backend=backend)
    with CastCounts(layer):
        model(X)
    model(X)
    assert len(calls) == 2


def test_only_the_next_call_is_counted() -> None:
    model = Twice(own_regions=True)
    casts = CastCounts(model)
    with casts.next_call([model]):
        for _ in range(3):
            model(X)
        with pytest.raises(RuntimeError, match="shapes"):
            model(X[:, :3])
    assert summary(casts)["shared.weight"] == (3, "region")
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not dispatch_modes()


# ---- rows by dtype and module --------------------------------------------------------------------


def layer() -> nn.Module:
    return nn.ModuleDict({"norm": nn.LayerNorm(4), "proj": nn.Linear(4, 4).bfloat16()})


def test_alike_parts_are_one_row() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(3))})
    assert dtype_rows(model, None) == (
        DtypeRow("parameters", "float32", "layers.*.norm", 3, 24),
        DtypeRow("parameters", "bfloat16", "layers.*.proj", 3, 60),
    )
    assert totals(dtype_rows(model, None)) == {"parameters": {"bfloat16": 60, "float32": 24}}


def test_gradients_and_state_are_those_of_the_module() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).bfloat16()})
    stranger = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([*model.parameters(), stranger])
    for p in (*model["b"].parameters(), stranger):
        p.grad = torch.ones_like(p)
    optimizer.step()
    rows = [(r.role, r.dtype, r.module, r.numbers) for r in dtype_rows(model, optimizer)]
    assert ("gradients", "bfloat16", "", 6) in rows
    assert ("optimizer state", "bfloat16", "b", 12) in rows
    assert ("optimizer state", "float32", "(not of this model)", 6) in rows


# ---- sums and buffers in 16 bits -----------------------------------------------------------------


class Averages(nn.Module):
    """Means over windows, as differences of a sum, and a buffer that a step may write."""

    def __init__(self, dtype: torch.dtype, writes: str = "") -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.writes, self.dtype = writes, dtype
        self.mean: Tensor
        self.register_buffer("mean", torch.ones(8, dtype=dtype))
        self.register_buffer("table", torch.ones(8, dtype=dtype))  # is only read

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach().mean((0, 1)).to(self.dtype) * 1e-3
        if self.writes == "in place":
            self.mean.mul_(0.999).add_(seen)
        elif self.writes == "anew":
            self.mean = self.mean * 0.999 + seen
        sums = x.to(self.dtype).cumsum(1)
        return self.inner((sums[:, 4:] - sums[:, :-4]).float() * self.table)  # type: ignore[no-any-return]


def in_16_bits(model: nn.Module, x: Tensor) -> list[tuple[str, str, str]]:
    with CastCounts(model) as casts:
        model(x)
    found = mprun.audit(model, casts=casts).findings
    return [(f.kind, f.module, f.text) for f in found if f.kind != "loaded_in_16_bits"]


@pytest.mark.parametrize("length", [6, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sum_in_16_bits_is_found_where_its_error_is_large(
    dtype: torch.dtype, length: int
) -> None:
    """By hand: the differences of the sum beside those of a sum in float64."""
    x = torch.rand(2, length, 8, generator=torch.Generator().manual_seed(0))
    low = x.to(dtype)
    got, exact = low.cumsum(1).double(), low.double().cumsum(1)
    error = ((got.diff(dim=1) - exact.diff(dim=1)).norm() / exact.diff(dim=1).norm()).item()
    found = in_16_bits(nn.Sequential(nn.Identity(), Averages(dtype)), x)
    if dtype is torch.float32 or error < 0.02:
        assert found == []
    else:
        [(kind, module, text)] = found
        assert (kind, module) == ("sum_in_16_bits", "1")
        assert f"off by {error:.1%} of what is summed" in text
    assert (error > 0.02) == (length == 512 and dtype is not torch.float32)


@pytest.mark.parametrize("writes", ["in place", "anew", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_buffer_in_16_bits_that_a_step_writes_is_found(dtype: torch.dtype, writes: str) -> None:
    model = nn.Sequential(Averages(dtype, writes))
    found = in_16_bits(model, torch.zeros(2, 6, 8))
    if dtype is torch.float32 or not writes:
        assert found == []
        return
    [(kind, module, text)] = found
    assert (kind, module) == ("buffer_in_16_bits", "0")
    assert "a step writes 0.mean (1 such)" in text
    least = {torch.bfloat16: 1.95, torch.float16: 0.24}[dtype]  # 2^-9 and 2^-12, over 0.001
    assert f"while it is less than {least:.0%} off" in text
    # what the text says, on numbers
    for goal, moves in ((1 + 0.9 * least, False), (1 + 4 * least, True)):
        after = torch.tensor(0.999 + 0.001 * goal, dtype=torch.float64)  # the average was 1
        assert (after.to(dtype).item() != 1) == moves
    assert kind in KINDS


def test_a_batch_norm_in_bfloat16_is_one_finding() -> None:
    """Its kernel writes to the buffers without counting it."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).bfloat16()
    [(kind, module, text)] = in_16_bits(model, torch.randn(4, 1, 8, 8).bfloat16())
    assert (kind, module) == ("buffer_in_16_bits", "1")
    assert "1.running_mean (2 such)" in text
