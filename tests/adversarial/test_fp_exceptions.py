"""What `fp_exceptions` says of the hostile models: no false alarm, no miss, the right op."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.watch.nonfinite import FpException, NonfiniteReport, fp_exceptions
from tests.adversarial.models import CASES, MODES, loss_of, points
from tests.adversarial.oracle import BATCH
from tests.adversarial.seeds import SEEDS

STEPS = {"log_of_zero": 40}
"""Those of a case where the first one does not overflow: there the others have 10."""


class Place(NamedTuple):
    """Where an exception is."""

    kind: str
    op: str
    module: str
    phase: str


def place(e: FpException) -> Place:
    return Place(e.kind, e.op, e.module_kind, e.phase)


SQUARE = Place("overflow", "pow", "Fp16Hostile", "forward")
CAST = Place("overflow", "_to_copy", "Linear", "forward")
LOG = Place("infinite", "log", "", "other")
SLOPE = {"log_of_zero": Place("invalid", "div", "", "backward")}
"""The slope of a logarithm at 0 is 0/0 where the loss does not depend on it: NaN of its own."""
BLAMED = {
    ("fp16_hostile", "fp16_mixed"): SQUARE,
    ("fp16_hostile", "fp16_true"): SQUARE,
    ("outlier_beyond_fp16", "fp16_mixed"): CAST,
    ("outlier_beyond_fp16", "fp16_true"): Place("overflow", "_to_copy", "", "other"),
    ("log_of_zero", "fp16_mixed"): LOG,
    ("log_of_zero", "fp16_true"): LOG,
}
"""What fails in 16 bits by overflow. `bf16_hostile` fails by rounding: no exception at all."""


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    x: Tensor,
    loss: Callable[[Tensor], Tensor],
    low: torch.dtype | None = None,
) -> None:
    """A step of PyTorch's own, under autocast to `low`, or without."""
    optimizer.zero_grad()
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        output = model(x)
    scaler.scale(loss(output.float())).backward()
    scaler.step(optimizer)
    scaler.update()


def trained(case: str, mode: str, seed: int) -> NonfiniteReport:
    """What is found in some steps with PyTorch's own autocast and GradScaler."""
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if mode.startswith("bf16") else torch.float16
    mixed, true = mode.endswith("_mixed"), mode.endswith("_true")
    inputs, targets = points(STEPS.get(case, 10) * BATCH, seed, CASES[case].outlier)
    model = CASES[case].model().to(dtype if true else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    scaler = torch.amp.GradScaler("cpu", enabled=mode == "fp16_mixed")
    with fp_exceptions(model, optimizer) as found:
        for x, y in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
            take_step(
                *(model, optimizer, scaler, x.to(dtype) if true else x),
                lambda output, y=y: loss_of(case)(output, y),
                dtype if mixed else None,
            )
    return found


@pytest.mark.representative(
    "mask-fp16_mixed-0",
    "outlier_beyond_fp16-fp16_*-0",
    "log_of_zero-fp16_mixed-0",
    "log_of_zero-bf16_mixed-0",
    "log_of_zero-fp32-0",
)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["fp32", *MODES])
@pytest.mark.parametrize("case", CASES)
def test_what_overflows_is_named_and_nothing_else(case: str, mode: str, seed: int) -> None:
    found = trained(case, mode, seed)
    blamed = BLAMED.get((case, mode))
    places = [place(e) for e in found.findings]
    assert places[:1] == ([blamed] if blamed else [])
    assert set(places[1:]) <= {SLOPE.get(case)}
    assert blamed is None or mode in CASES[case].fails
    assert {e.phase for e in found.expected} <= {"backward"}
    assert not found.expected or mode == "fp16_mixed"


# ---- what was there before -----------------------------------------------------------------------


class Scaled(nn.Module):
    """Multiplies by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def spoiled(what: str, value: float, mode: str) -> NonfiniteReport:
    """A number that is bad before the first step, and four steps of AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), Scaled(), nn.Linear(16, 1)
    )
    x, y = torch.randn(64, 16), torch.randn(64, 1)
    named = {"x": x, "y": y, **dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        named[what].view(-1)[0] = value
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=mode == "fp16_mixed")
    low = torch.float16 if mode == "fp16_mixed" else None
    with fp_exceptions(model, optimizer) as found:
        for _ in range(4):
            take_step(model, optimizer, scaler, x, partial(F.mse_loss, target=y), low)
    return found


@pytest.mark.representative("*-inf-fp16_mixed", "*0.weight-nan-*", "x-*-nan-fp32")
@pytest.mark.parametrize("mode", ["fp32", "fp16_mixed"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("x", "the model's input"),
        ("y", "a tensor (target of mse_loss)"),
        ("0.weight", "parameter 0.weight"),
        ("2.bias", "parameter 2.bias"),
        ("4.weight", "parameter 4.weight"),
        ("3.scale", "buffer 3.scale"),
    ],
)
def test_what_was_bad_before_is_named_and_nothing_else(
    what: str, name: str, value: float, mode: str
) -> None:
    found = spoiled(what, value, mode)
    (e,) = found.findings
    assert (e.kind, e.outputs[0].name, e.step) == ("outside", name, 1)
    assert (e.outputs[0].inf, e.outputs[0].nan) == (int(math.isinf(value)), int(math.isnan(value)))
    holds = "1 NaN" if math.isnan(value) else "1 inf"
    assert e.text().startswith(f"outside: {name} holds {holds}, first read by ")
    assert found.expected == found.absorbed == []


# ---- overflows that come to a finite number ------------------------------------------------------


def negative_power(x: Tensor) -> Tensor:
    """The root mean square of the documentation's hunt, with the sign turned twice."""
    power = x * (-x)
    return x / (1e-6 - power.mean(-1, keepdim=True)).sqrt()


def power(x: Tensor) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt()


def in_place(x: Tensor) -> Tensor:
    square = x.clone()
    square *= x
    return x / square.mean(-1, keepdim=True).add_(1e-6).sqrt_()


def by_inverse(x: Tensor) -> Tensor:
    """1 / inf is 0 where a tiny number should be: wrong only by what is made of that."""
    return x * (1 / (30 * (x * x).sum(-1, keepdim=True))).sqrt()


def added_mask(x: Tensor) -> Tensor:
    mask = torch.ones_like(x).triu(1) * -1e9
    return (x / 100 + mask).softmax(-1)


def replaced_mask(x: Tensor) -> Tensor:
    mask = (torch.ones_like(x).triu(1) * -1e9).nan_to_num()
    return (x / 100 + mask).softmax(-1)


def small_share(x: Tensor) -> Tensor:
    """1 / inf is 0 where a tiny number should be, which the sum rounds away."""
    return 1 / (1 + x * x) + 0.01


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    negative_power,
    power,
    in_place,
    by_inverse,
    lambda x: torch.sigmoid(x * -3000),
    lambda x: torch.exp(-(x * x)),
    lambda x: torch.exp(-(x.clone().square_())),
    lambda x: torch.tanh(x * x),
    lambda x: (x * x).clamp(max=100),
    lambda x: (x * x * -300).relu(),
    small_share,
    added_mask,
    replaced_mask,
]
WRONG = FUNCTIONS[:4]
DIVIDES = [*WRONG, small_share]
"""What divides by an overflow is a finding: whether a later op makes up for it is not followed."""


class Applied(nn.Module):
    """A function in the middle of a model."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.function(x)
        self.given, self.made = x.detach(), made.detach()
        return made


@pytest.mark.parametrize("low", ["mixed", "true"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=range(len(FUNCTIONS)))
def test_an_overflow_is_a_finding_where_it_is_divided_by(
    function: Callable[[Tensor], Tensor], low: str
) -> None:
    """Each function whose finite result differs from float64's is among those."""
    torch.manual_seed(0)
    first, inner, last = nn.Linear(16, 16), Applied(function), nn.Linear(16, 4)
    with torch.no_grad():
        first.weight.mul_(300)
    model = nn.Sequential(first, inner, last)
    x = torch.randn(32, 16)
    if low == "true":
        model, x = model.half(), x.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with fp_exceptions(model, optimizer) as found:
        with torch.autocast("cpu", torch.float16, enabled=low == "mixed"):
            output = model(x)
        (1e-3 * output.float().square().mean()).backward()
        optimizer.step()
    exact = function(inner.given.double())
    assert bool(torch.isfinite(inner.made).all())
    assert inner.given.dtype == torch.float16
    error = (inner.made.double() - exact).abs().max() / exact.abs().max()
    # Rounding stays below 1 %: float16's is 0.05 %, a few times over.
    assert (error > 0.01) == (function in WRONG)
    if function not in DIVIDES:
        assert found.findings == []
        assert {e.kind for e in found.absorbed} == {"overflow"}
        return
    e, *later = found.findings
    assert (e.kind, e.module, e.phase) == ("overflow", "1", "forward")
    # the 0 that it became has an infinite slope under the root
    assert [(x.kind, x.phase) for x in later] == [("infinite", "backward")] * (
        function is by_inverse
    )
    assert e.op in ("mul", "mul_", "sum")  # the product or, where that is finite, the sum of it
    assert e.divided_by in ("div in 1, forward", "reciprocal in 1, forward")


# ---- the loss scale ------------------------------------------------------------------------------


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**60])
def test_a_nan_of_the_forward_pass_is_no_work_of_the_loss_scale(scale: float) -> None:
    """Roots of negative numbers: every step is skipped, whatever the scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Root(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with fp_exceptions(model, optimizer) as found:
        for _ in range(20):
            x = torch.ones(4, 16)
            take_step(model, optimizer, scaler, x, lambda o: o.square().mean(), torch.float16)
    assert scaler.get_scale() == scale / 2**20  # 20 of 20 skipped
    (e,) = found.findings
    assert place(e) == ("invalid", "sqrt", "Root", "forward")
    assert (e.count, found.counts["finding"]) == (20, 20)


def test_a_slope_that_is_infinite_is_no_work_of_the_loss_scale() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    with fp_exceptions(model, optimizer) as found:
        x = torch.ones(4, 16)
        take_step(model, optimizer, scaler, x, lambda o: (o + (0 * o).abs().sqrt()).sum())
    assert [e.phase for e in found.findings] == ["backward"]
    assert found.findings[0].kind == "infinite"


def test_a_scaled_loss_that_overflows_is_the_work_of_the_loss_scale() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    with fp_exceptions(model, optimizer) as found:
        take_step(model, optimizer, scaler, torch.ones(4, 16), lambda o: 1e6 * o.square().mean())
    assert found.findings == []
    assert place(found.expected[0]) == ("overflow", "mul", "", "other")
