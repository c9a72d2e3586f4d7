"""Rates: what is timed is the op it says, in turn, with the switches of a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mprun.precision import accelerated as accelerated_once
from mprun.precision import rates
from mprun.precision.rates import (
    TRIED,
    TimedOp,
    Timer,
    alternate,
    in_threads,
    matmul,
    timer,
    warm,
)
from tests.each import each

CPU = torch.device("cpu")

accelerated = accelerated_once.__wrapped__
"""As a process measures it the first time."""


class Clock:
    """Stands still but for calls that take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(rates.time, "perf_counter", lambda: self.now)

    def takes(
        self, seconds: float, log: list[str] | None = None, name: str = ""
    ) -> Callable[[], None]:
        """A call that takes so long by this clock."""

        def call() -> None:
            self.now += seconds
            if log is not None:
                log.append(name)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# ---- the ops -------------------------------------------------------------------------------------


def test_the_backward_pass_gives_the_gradients_of_input_and_weight() -> None:
    op = TRIED[2]
    gradient, x, weight = (torch.randn(shape, dtype=torch.float64) for shape in op.shapes)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.nn.functional.conv2d(*leaves, padding=1).backward(gradient)
    dx, dw, db = op.function(gradient, x, weight)  # type: ignore[misc]
    assert torch.equal(dx, leaves[0].grad)
    assert torch.equal(dw, leaves[1].grad)
    assert not isinstance(db, torch.Tensor) or db.numel() == 0


def test_drawing_inputs_leaves_the_process_s_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    timer(matmul(8), torch.float32, CPU)
    assert torch.equal(torch.get_rng_state(), before)


# ---- timing --------------------------------------------------------------------------------------


@each(("call_s", "repeats"), [(0.0003, 4), (0.001, 1), (5.0, 1)])
def test_a_time_is_the_mean_of_calls_that_last_a_millisecond(
    clock: Clock, call_s: float, repeats: int
) -> None:
    made = warm(clock.takes(call_s), CPU)
    start = clock.now
    # The clock counts from 100 in steps as small as 0.3 ms: about 11 digits are left.
    assert made.time_s() == pytest.approx(call_s, rel=1e-9)
    assert made.repeats == repeats
    assert clock.now - start == pytest.approx(repeats * call_s, rel=1e-9)
    assert made.round_s == pytest.approx(repeats * call_s, rel=1e-9)


def test_the_first_call_is_not_taken_for_the_time_of_others(clock: Clock) -> None:
    log: list[str] = []
    fast = clock.takes(0.001, log, "call")

    def call() -> None:
        clock.now += 0 if log else 3.0  # compiles
        fast()

    assert warm(call, CPU).call_s == pytest.approx(0.001, rel=1e-9)
    assert len(log) == 2


def test_calls_take_turns_and_the_order_turns_round(clock: Clock) -> None:
    log: list[str] = []
    timers = [warm(clock.takes(s, log, name), CPU) for name, s in (("a", 2.0), ("b", 4.0))]
    log.clear()
    assert alternate(timers, 3) == [[2.0, 2.0, 2.0], [4.0, 4.0, 4.0]]
    assert log == ["a", "b", "b", "a", "a", "b"]


@each("tf32", [False, True])
def test_the_switches_are_those_of_a_run_and_are_put_back(tf32: bool) -> None:
    matmuls = torch.backends.cuda.matmul
    before = (matmuls.fp32_precision, matmuls.allow_bf16_reduced_precision_reduction)
    seen = set()
    warm(
        lambda: seen.add((matmuls.fp32_precision, matmuls.allow_bf16_reduced_precision_reduction)),
        CPU,
        tf32,
    )
    assert seen == {("tf32" if tf32 else "ieee", False)}
    assert (matmuls.fp32_precision, matmuls.allow_bf16_reduced_precision_reduction) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_is_timed() -> None:
    device = torch.device("cuda")
    (times,) = alternate([timer(matmul(1024), torch.bfloat16, device)], 3)
    assert all(1e-6 < t < 1 for t in times)  # 2 GFLOP: no GPU does 2,000 TFLOP/s, or 2 GFLOP/s
    assert accelerated(torch.float16, device)


def test_threads_are_put_back_on_every_way_out() -> None:
    before = torch.get_num_threads()
    with in_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError, match="planted"), in_threads(before + 1):
        raise RuntimeError("planted")
    assert torch.get_num_threads() == before


# ---- accelerated ---------------------------------------------------------------------------------


@each(
    ("factor", "tolerance", "expected"),
    [(0.5, 1.0, True), (1.0, 1.0, False), (3.0, 1.0, False), (3.0, 4.0, True), (5.0, 4.0, False)],
)
def test_accelerated_is_by_the_fastest_round(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    factor: float,
    tolerance: float,
    expected: bool,
) -> None:
    """By a clock made up bfloat16 takes `factor` times as long, and more in all rounds but one."""
    threads = set()

    def made(op: TimedOp, dtype: torch.dtype, device: torch.device, images: object) -> Timer:
        seconds = 1.0 if dtype == torch.float32 else factor
        calls: list[int] = []

        def call() -> None:
            threads.add(torch.get_num_threads())
            calls.append(1)
            clock.now += seconds * (1 if len(calls) == 5 else 1000)

        return warm(call, device)

    monkeypatch.setattr(rates, "timer", made)
    assert accelerated(torch.bfloat16, CPU, tolerance=tolerance) is expected
    assert threads == {1}
