"""The step time of a record is that of a stopwatch in the loop, or null with the reason.

Each forward and each backward pass of a layer waits, by a clock that the test sets and, in the
exhaustive tests, by the machine's: there is much more to time than the hooks take, on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mprun
from mprun.records.run_record import read_lines, read_summary
from tests.run.clock import Clock

ITERATIONS = 14  # 2 steps are looked at, and 3 are warm-up
SIZE = 8
TOLERANCE = 0.1


class Wait(torch.autograd.Function):
    """The identity, which takes 5 ms in each pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        time.sleep(0.005)
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(0.005)
        return grad.clone()


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Wait.apply(super().forward(x))  # type: ignore[no-any-return]


def net() -> nn.Sequential:
    return nn.Sequential(Slow(4, 4), Slow(4, 4))


class Watch:
    """A stopwatch that a loop starts and stops."""

    def __init__(self) -> None:
        self.times_ms: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.times_ms.append((time.perf_counter() - began) * 1e3)


def batches() -> Iterator[Tensor]:
    for _ in range(ITERATIONS):
        time.sleep(0.002)  # waits for data
        yield torch.randn(SIZE, 4, requires_grad=True)


Models = list[nn.Module]
Optimizers = list[torch.optim.Optimizer]
Loop = Callable[[Models, Optimizers, Watch], None]


def simple(
    call: Callable[[nn.Module, Tensor], Tensor], after: Callable[[nn.Module], None] = lambda _: None
) -> Loop:
    """A loop that calls its model in this way."""

    def loop(models: Models, optimizers: Optimizers, watch: Watch) -> None:
        for x in batches():
            with watch.step():
                call(models[0], x).square().mean().backward()
                optimizers[0].step()
                optimizers[0].zero_grad()
            after(models[0])

    return loop


def accumulated(models: Models, optimizers: Optimizers, watch: Watch) -> None:
    for x in batches():
        with watch.step():
            for part in x.detach().chunk(2):
                models[0](part).mean().backward()
            optimizers[0].step()


def scaled(models: Models, optimizers: Optimizers, watch: Watch) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for x in batches():
        with watch.step(), torch.autocast("cpu", torch.float16):
            scaler.scale(models[0](x).float().square().mean()).backward()
            scaler.step(optimizers[0])
            scaler.update()


def closures(models: Models, optimizers: Optimizers, watch: Watch) -> None:
    for x in batches():

        def closure(x: Tensor = x) -> Tensor:
            loss: Tensor = models[0](x).square().mean()
            loss.backward()
            return loss

        with watch.step():
            optimizers[0].step(closure)  # type: ignore[arg-type]


def functional(models: Models, optimizers: Optimizers, watch: Watch) -> None:
    """Gradients of each sample, by `torch.func`."""
    model = models[0]

    def loss(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).square().mean()  # type: ignore[no-any-return]

    for x in batches():
        with watch.step():
            parameters = {name: p.detach() for name, p in model.named_parameters()}
            each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x.detach())
            for name, p in model.named_parameters():
                p.grad = each[name].mean(0)
            optimizers[0].step()


def two_models(models: Models, optimizers: Optimizers, watch: Watch) -> None:
    a, b = models
    for x in batches():
        with watch.step():
            b(a(x)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()


def adversarial(every: int, first: int = 0) -> Loop:
    """The first model trains in each iteration, the second one in some."""

    def loop(models: Models, optimizers: Optimizers, watch: Watch) -> None:
        critic, maker = models
        data, n = batches(), 0
        while n < ITERATIONS - every:
            with watch.step():
                for _ in range(first if first and not n else every):
                    x, n = next(data), n + 1
                    (critic(x) - critic(maker(x).detach())).mean().backward()
                    optimizers[0].step()
                    optimizers[0].zero_grad()
                critic(maker(x)).mean().backward()
                optimizers[1].step()
                optimizers[1].zero_grad()

    return loop


def validated(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.randn(3, 4))
    model.train()


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)  # type: ignore[no-any-return]


def recomputed(reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, x: checkpoint(model, x, use_reentrant=reentrant)  # type: ignore[no-any-return]


def recomputed_parts(model: nn.Module, x: Tensor) -> Tensor:
    for part in model.children():
        x = checkpoint(part, x, use_reentrant=True)
    return x


# Loop, samples of a step, and the batch of the record where that counts something else
LOOPS: dict[str, tuple[Loop, int]] = {
    "plain": (simple(lambda model, x: model(x)), SIZE),
    "accumulation": (accumulated, SIZE),
    "autocast": (simple(autocast), SIZE),
    "scaler": (scaled, SIZE),
    "closure": (closures, SIZE),
    "reentrant": (simple(recomputed(True)), SIZE),
    "not_reentrant": (simple(recomputed(False)), SIZE),
    "reentrant_parts": (simple(recomputed_parts), SIZE),
    "func": (functional, 0),
    "two_models": (two_models, SIZE),
    "one_to_one": (adversarial(1), 3 * SIZE),
    "two_to_one": (adversarial(2), 5 * SIZE),
    "two_to_one_from_the_first": (adversarial(2, first=1), 5 * SIZE),
    "validation": (simple(lambda model, x: model(x), validated), SIZE),
}
SEVERAL = ("two_models", "one_to_one", "two_to_one", "two_to_one_from_the_first")


def observed(name: str, loop: Loop, out: Path) -> tuple[Any, float]:
    """The observation, and the median of the stopwatch in ms."""
    models: Models = [net(), net()] if name in SEVERAL else [net()]
    model: nn.Module = nn.ModuleList(models) if name in SEVERAL else models[0]
    if name == "reentrant_parts":
        models = [model := nn.ModuleList(model.children())]
    optimizers: Optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
    watch = Watch()
    with mprun.observe(model, optimizers, out) as run:
        loop(models, optimizers, watch)
    assert run.summary.steps == len(watch.times_ms)
    return run, median(watch.times_ms[-run.summary.step_time_ms.n :])


CASES = [(name, real) for real in (False, True) for name in LOOPS]


@pytest.mark.representative(*(f"{name}-set" for name in LOOPS))
@pytest.mark.parametrize(
    ("name", "real"), CASES, ids=[f"{n}-{'real' if real else 'set'}" for n, real in CASES]
)
def test_the_record_has_the_time_of_a_stopwatch(
    name: str, real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not real:
        clock = Clock(1e-6)  # a reading is a microsecond
        monkeypatch.setattr("time.perf_counter", clock)
        monkeypatch.setattr("time.sleep", clock.sleep)
    loop, samples = LOOPS[name]
    for attempt in range(1 + real):  # once more, where the machine was busy
        run, expected = observed(name, loop, tmp_path / str(attempt))
        got = run.summary.step_time_ms.median
        print(f"{name:26} record {got:.2f} ms, stopwatch {expected:.2f} ms")
        if got == pytest.approx(expected, rel=TOLERANCE):
            break
    summary = read_summary(run.out)
    assert summary.step_time_ms.median == got == pytest.approx(expected, rel=TOLERANCE)
    assert summary.batch_size == samples
    if name == "validation":
        assert "no throughput: each step follows an evaluation" in str(run)
    elif name == "func":
        assert "no throughput: no call of the model shows how many" in str(run)
    else:
        assert summary.data_time_ms.median == pytest.approx(2, abs=0.2 if not real else 20)
    wait = summary.data_time_ms.median
    expects = samples and wait and samples / (got + wait) * 1e3
    assert summary.samples_per_second == (pytest.approx(expects) if expects else None)


def test_a_step_whose_begin_is_not_seen_has_no_time(tmp_path: Path) -> None:
    """A call of `forward` passes by the hooks: the optimizer's step alone would be timed."""
    run, _ = observed("plain", simple(lambda model, x: model.forward(x)), tmp_path / "run")
    reason = f"the first ones are not timed, {ITERATIONS} had no call that is seen (call the model"
    assert reason in str(run)
    summary = read_summary(tmp_path / "run")
    assert any(reason in text for text in summary.warnings)
    assert summary.step_time_ms.median is summary.samples_per_second is None
    assert summary.data_time_ms.median is summary.time_budget_s is None
    steps = [x for x in read_lines(tmp_path / "run") if x["kind"] == "step"]
    assert {x["step_time_ms"] for x in steps} == {x["data_time_ms"] for x in steps} == {None}
