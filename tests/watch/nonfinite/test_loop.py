"""Loops of one's own: actions, scalers, compiled code, bits, and what is left behind."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from mprun import optim
from mprun.precision._torch import dispatch_modes
from mprun.watch.nonfinite import FpExceptionError, NonfiniteReport, StepOutcome, fp_exceptions
from mprun.watch.nonfinite.nonfinite_watcher import COMPILED
from mprun.watch.nonfinite.step_monitor import Response
from tests.watch.nonfinite import exception
from tests.watch.test_op_watcher import hooks

WIDTH = 8
X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


class Fragile(nn.Module):
    """Divides by a number that is 0 at the calls named."""

    def __init__(self, fails: set[int]) -> None:
        super().__init__()
        self.fails, self.calls = fails, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / torch.tensor(0.0 if self.calls in self.fails else 1.0)


def model_with(*fails: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        Fragile({*fails}),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, WIDTH),
    )


def step(model: nn.Module, optimizer: Optimizer, x: Tensor = X) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def same(a: Any, b: Any) -> bool:
    """Equal in every bit, a NaN with a NaN."""
    if isinstance(a, Tensor):
        return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: AdamW(p, lr=0.1),
    "adamw fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "low": lambda p: optim.AdamW(p, lr=0.1),
    "low kahan": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, rounding="kahan"),
}


# ---- halt ----------------------------------------------------------------------------------------


def test_halt_raises_at_the_end_of_the_step_and_names_it() -> None:
    model = model_with(2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with fp_exceptions(model, optimizer, action="halt") as found:
        step(model, optimizer)
        message = r"step 2: infinite: div in 2 \(Fragile\), forward"
        with pytest.raises(FpExceptionError, match=message) as e:
            step(model, optimizer)
    assert e.value.report is found
    assert e.value.exception == found.findings[0]
    assert isinstance(e.value, FloatingPointError)


# ---- skip ----------------------------------------------------------------------------------------


@pytest.mark.representative("adamw fused", "low kahan")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_a_dropped_step_all_goes_on_as_if_it_had_not_been(name: str) -> None:
    """Parameters, running statistics and the optimizer's state; the first step, too."""
    plain, dropping = model_with(), model_with(1, 4)
    with torch.random.fork_rng():
        optimizer = OPTIMIZERS[name](plain.parameters())
        for x in (X, X + 1, X + 3):
            step(plain, optimizer, x)
    other = OPTIMIZERS[name](dropping.parameters())
    with fp_exceptions(dropping, other, action="skip") as found:
        for x in (X + 2, X, X + 1, X + 2, X + 3):
            step(dropping, other, x)
    assert found.dropped_steps == 2
    assert same(state_of(plain, optimizer), state_of(dropping, other))


def test_skip_gives_up_after_some_dropped_steps_in_a_row() -> None:
    model = model_with(1, 3, 4, 5)
    optimizer = SGD(model.parameters(), lr=0.1)
    with fp_exceptions(model, optimizer, action="skip", halt_after=3) as found:
        for _ in range(4):
            step(model, optimizer)
        with pytest.raises(FpExceptionError, match="step 5: 3 steps in a row had exceptions"):
            step(model, optimizer)
    assert found.dropped_steps == 4


# ---- log -----------------------------------------------------------------------------------------


def test_log_reports_each_distinct_finding_once(caplog: pytest.LogCaptureFixture) -> None:
    model = model_with(2, 3)
    optimizer = SGD(model.parameters(), lr=0.0)
    with caplog.at_level(logging.WARNING, "mprun"), fp_exceptions(model, optimizer) as found:
        for _ in range(4):
            step(model, optimizer)
            for buffer in model.buffers():
                buffer.nan_to_num_(0.0, 0.0, 0.0)
            for p in model.parameters():
                p.data.nan_to_num_(1.0, 1.0, 1.0)
    told = [text for text in caplog.messages if "div in 2" in text]
    assert len(told) == 1
    assert told[0].startswith("step 2: infinite: div in 2 (Fragile), forward")
    (first,) = [e for e in found.findings if e.op == "div" and e.module == "2"]
    assert (first.step, first.last_step, first.count) == (2, 3, 2)


# ---- scalers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [False, True])
def test_a_scaler_s_skipped_steps_are_expected(low: bool) -> None:
    """mprun's optimizers are stepped by the scaler with a flag, PyTorch's are not."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    if low:
        model = model.half()
    kind: Any = optim.AdamW if low else AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    x = X.half() if low else X
    with fp_exceptions(model, optimizer, action="halt") as found:
        for _ in range(25):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=not low):
                output = model(x)
            scaler.scale(output.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    skipped = 24 - round(math.log2(scaler.get_scale()))
    assert skipped > 0
    steps = {e.step for e in found.expected} | {e.last_step for e in found.expected}
    assert (min(steps), max(s or 0 for s in steps)) == (1, skipped)
    assert found.findings == []
    assert found.expected[0].loss_scale == 2.0**24


def test_a_loss_inside_of_a_closure_is_looked_at() -> None:
    """LBFGS goes forward and backward several times inside of its step."""
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(X) * 0).log().mean()
        loss.backward()
        return loss

    with fp_exceptions(model, optimizer) as found:
        optimizer.step(closure)
    first = found.findings[0]
    assert (first.op, first.phase, first.kind) == ("log", "other", "infinite")
    assert "the loss" in first.reached


# ---- several optimizers --------------------------------------------------------------------------


class Pair(nn.ModuleDict):
    """A generator and a discriminator; the container itself is never called."""

    def __init__(self, *fails: int) -> None:
        torch.manual_seed(0)
        super().__init__(
            {
                "g": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
                "d": nn.Sequential(nn.Linear(WIDTH, 1), Fragile({*fails})),
            }
        )

    def optimizers(self) -> tuple[SGD, SGD]:
        return SGD(self["g"].parameters(), lr=0.1), SGD(self["d"].parameters(), lr=0.1)


def test_optimizers_that_step_together_end_one_step() -> None:
    model = model_with(2)
    halves = SGD(model[:2].parameters(), lr=0.1), AdamW(model[2:].parameters(), lr=0.1)
    with fp_exceptions(model, halves, action="skip") as found:
        for number in range(1, 4):
            before = [copy.deepcopy(x.state_dict()) for x in (model, *halves)]
            for optimizer in halves:
                optimizer.zero_grad()
            model(X).square().mean().backward()
            for optimizer in halves:
                optimizer.step()
            changed = not same(before, [x.state_dict() for x in (model, *halves)])
            assert changed == (number != 2)
    assert (found.dropped_steps, found.findings[0].step) == (1, 2)
    assert {e.phase for e in found.findings} == {"forward"}


def adversarial(model: Pair, optimizers: Any, rounds: int, d_turns: int = 1) -> None:
    """Rounds of turns: the discriminator's, then the generator's."""
    g, d = optimizers
    for _ in range(rounds):
        for _ in range(d_turns):
            d.zero_grad()
            (model["d"](X).mean() - model["d"](model["g"](X).detach()).mean()).backward()
            d.step()
        g.zero_grad()
        model["d"](model["g"](X)).mean().backward()
        g.step()


@pytest.mark.parametrize(
    ("call", "d_turns", "step"),
    [(1, 1, 1), (2, 1, 1), (3, 1, 2), (5, 1, 3), (6, 1, 4), (3, 2, 2), (5, 2, 3), (6, 2, 4)],
)
def test_of_optimizers_that_take_turns_each_turn_is_a_step(
    call: int, d_turns: int, step: int
) -> None:
    """The discriminator runs twice in its turn and once in the generator's."""
    model = Pair(call)
    optimizers = model.optimizers()
    with fp_exceptions(model, optimizers) as found:
        adversarial(model, optimizers, 2, d_turns)
    first = found.findings[0]
    assert (first.op, first.module, first.step) == ("div", "d.1", step)


def test_a_turn_is_dropped_and_the_other_optimizer_s_turn_is_not() -> None:
    """The discriminator's turn in the second round is the third step."""
    model, plain = Pair(4), Pair()
    optimizers, others = model.optimizers(), plain.optimizers()
    with fp_exceptions(model, optimizers, action="skip") as found:
        adversarial(model, optimizers, 2)
    assert (found.dropped_steps, found.findings[0].step) == (1, 3)
    adversarial(plain, others, 1)
    others[0].zero_grad()
    plain["d"](plain["g"](X)).mean().backward()
    others[0].step()
    assert same(model.state_dict(), plain.state_dict())


def test_a_backward_pass_between_two_optimizers_is_looked_at() -> None:
    """The second one's gradients are there only after the first one has stepped."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)])
    optimizers = [SGD(part.parameters(), lr=0.1) for part in model]
    with fp_exceptions(model, optimizers) as found:
        losses = [part(X).mean() for part in model]
        losses[0].backward()
        optimizers[0].step()
        (losses[1] + (0 * losses[1]).abs().sqrt()).backward()  # whose slope at 0 is infinite
        optimizers[1].step()
    assert {(e.step, e.phase) for e in found.findings} == {(1, "backward")}
    assert "gradient of 1.weight" in found.findings[0].reached
    assert "parameter 1.weight" in found.findings[0].reached


# ---- the optimizer's eps -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.Adam, AdamW, torch.optim.RMSprop])
def test_an_eps_that_is_0_in_the_parameter_s_dtype_is_named(kind: Any) -> None:
    """Squares of small gradients are 0 in float16, and so is 1e-8: a division by 0."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).half()
    optimizer = kind(model.parameters(), lr=1e-3, eps=1e-8)
    with fp_exceptions(model, optimizer) as found:
        (1e-4 * model(X.half()).float().mean()).backward()
        optimizer.step()
    assert {e.kind for e in found.findings} <= {"infinite", "invalid"}
    assert {e.module for e in found.findings} == {"0"}
    for e in found.findings:
        assert e.reason == "the optimizer's eps=1e-08 is 0 in float16"
        assert "eps=1e-08 is 0 in float16" in e.text()


def test_an_eps_that_the_dtype_holds_is_not_blamed() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).half()
    optimizer = AdamW(model.parameters(), lr=1e9, eps=1e-4)
    with fp_exceptions(model, optimizer) as found:
        model(X.half()).float().mean().backward()
        optimizer.step()
    assert {e.kind for e in found.findings} == {"overflow"}
    assert {e.reason for e in found.findings} == {None}


# ---- nothing else changes ------------------------------------------------------------------------


class Everything(nn.Module):
    """Dropout, running statistics, attention, recomputation, work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu_()
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.representative("dtype0-adamw fused", "dtype1-low", "dtype1-low kahan", "dtype2-sgd")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_are_those_without(dtype: torch.dtype, name: str) -> None:
    def trained(look: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Everything()
        optimizer = OPTIMIZERS[name](model.parameters())

        def loop() -> None:
            for _ in range(4):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    output = model(X)
                output.float().square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()

        if look:
            with fp_exceptions(model, optimizer, action="skip"):
                loop()
        else:
            loop()
        return {**state_of(model, optimizer), "rng": torch.get_rng_state()}

    assert same(trained(look=False), trained(look=True))


def test_an_error_inside_goes_through_and_nothing_is_left_behind() -> None:
    model = model_with(1)
    optimizer = SGD(model.parameters(), lr=0.1)
    kept: list[NonfiniteReport] = []

    def loop() -> None:
        with fp_exceptions(model, optimizer, action="halt") as found:
            kept.append(found)
            assert hooks(model, optimizer) > 0
            model(X).sum().backward()
            raise KeyError("the loop's own")

    with pytest.raises(KeyError, match="the loop's own"):
        loop()
    assert kept[0].findings[0].module_kind == "Fragile"
    assert hooks(model, optimizer) == 0
    assert dispatch_modes() == []


def test_what_is_kept_of_steps_does_not_grow() -> None:
    model = model_with(*range(1, 100))
    optimizer = SGD(model.parameters(), lr=0.0)
    with fp_exceptions(model, optimizer) as found:
        for _ in range(30):
            step(model, optimizer)
        (watch,) = dispatch_modes()
        assert len(watch.tracker._made) + len(watch._lines) < 3  # type: ignore[attr-defined]
    assert len(found.findings) < 20


# ---- compiled regions ----------------------------------------------------------------------------


def test_compiled_regions_run_op_by_op_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fragile({1}))
    model[1].compile(backend="eager")
    optimizer = SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "mprun"), fp_exceptions(model, optimizer) as found:
        step(model, optimizer)
    assert caplog.messages[0] == COMPILED
    assert (found.findings[0].op, found.findings[0].module) == ("div", "1")


def test_code_compiled_before_runs_op_by_op_too() -> None:
    def inverse(x: Tensor) -> Tensor:
        return 1 / x

    compiled = torch.compile(inverse, backend="aot_eager")
    compiled(torch.ones(3, requires_grad=True))
    model = nn.Linear(WIDTH, WIDTH)
    with fp_exceptions(model) as found:
        compiled(torch.zeros(3, requires_grad=True))
    assert [e.op for e in found.absorbed] == ["reciprocal"]


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "stop"}, "action='stop'; legal: log, halt, skip"),
        ({"halt_after": 0}, "halt_after=0; legal is 1 or more"),
        ({"optimizer": "sgd"}, "optimizer holds str; legal: an optimizer, several, or None"),
        ({"optimizer": [None]}, "optimizer holds NoneType; legal: an optimizer, several, or None"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    error = TypeError if "optimizer" in options else ValueError
    with pytest.raises(error, match=message), fp_exceptions(nn.Linear(1, 1), **options):
        pass


def test_a_response_counts_lost_steps_in_a_row() -> None:
    lost = StepOutcome(1, True, (exception(verdict="expected"),))
    response = Response("halt", halt_after=2)
    assert response.to(lost).stop_reason is None
    assert response.to(StepOutcome(2, False, ())).stop_reason is None
    assert response.to(lost).stop_reason is None
    reason = response.to(lost).stop_reason
    assert reason is not None
    assert reason.startswith("2 steps in a row overflowed and were skipped; the last one: overflow")
    assert Response("log", halt_after=1).to(lost).stop_reason is None


def test_one_of_two_that_a_scaler_skips() -> None:
    """Gradients of the second alone overflow: the scale is to blame, and nothing is found."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)])
    optimizers = [SGD(part.parameters(), lr=0.1) for part in model]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with fp_exceptions(model, optimizers, action="halt") as found:
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                first, second = (part(X).float().mean() for part in model)
            scaler.scale(1e-3 * first + 4 * second).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() < 2.0**20
    assert found.findings == []
    assert found.expected[0].phase == "backward"
    assert not [what for what in found.expected[0].reached if "0." in what]
