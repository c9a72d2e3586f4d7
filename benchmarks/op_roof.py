"""The least time of each op of a training step beside its measured time, on a CPU.

    python -m benchmarks.op_roof [RECIPE ...] [--precision fp32] [--steps 40] [OVERRIDE=...]

    least time = max(FLOPs / best measured rate, bytes / best measured bandwidth)

Bytes are those of an op's tensors, read or written once each, as if none were in a cache: an op on
small tensors can be faster. The rate is the better one of MKL and oneDNN on a product of 1,024 x
1,024 x 1,024. Ops are timed one by one in a dispatch mode, in the step of `speed=auto` on one batch
with nothing else running; the time of the step itself is measured without that mode.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from mprun.config import compose
from mprun.precision._torch import DispatchMode, onednn_linear, tree_leaves
from mprun.precision.policy import torch_dtype
from mprun.train.assemble import build_parts, make_plan
from mprun.train.assemble.speed_trial import with_fastest
from mprun.train.loop import Limits, Trainer
from mprun.train.machine.conditions import steady_heap
from mprun.train.machine.machine import cpu_name

WARM_UP = 5


class Work(NamedTuple):
    """An op with the shapes of its tensors, and what it has to do."""

    name: str
    shapes: str
    flops: int
    bytes: int


class TimedOps(DispatchMode):
    """Times each op inside, by what it works on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.times_s: dict[Work, list[float]] = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        began = time.perf_counter()
        result = func(*args, **kwargs)
        took_s = time.perf_counter() - began
        self.times_s[_work(func, args, kwargs, result)].append(took_s)
        return result


def _work(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    tensors = {(x.data_ptr(), x.numel()): x.numel() * x.element_size() for x in [*read, *written]}
    count, is_view = sum(tensors.values()), all(x.data_ptr() in _places(read) for x in written)
    if func.overloadpacket is torch.ops.aten._fused_adamw_:
        count += 3 * sum(x.nbytes for x in args[0])  # parameters and moments are written, too
    elif is_view and not func._schema.is_mutable:
        count = 0
    name = func.overloadpacket.__name__
    if name == "_linear_pointwise":
        flops = 2 * args[0].numel() * args[1].shape[0]
    elif formula := flop_registry.get(func.overloadpacket):
        flops = formula(*args, **kwargs, out_val=result)
    else:
        flops = 0
    shapes = " ".join("x".join(map(str, x.shape)) for x in read[:2])
    return Work(name, shapes, flops, count)


def _places(tensors: list[Tensor]) -> set[int]:
    return {x.data_ptr() for x in tensors}


def best_gflops(dtype: torch.dtype) -> float:
    """The better rate of MKL's and oneDNN's product, in GFLOP/s."""
    x = torch.randn(1024, 1024).to(dtype)
    calls = [lambda: torch.mm(x, x.t())]
    calls += [lambda: onednn_linear(x, x, None)] if dtype == torch.float32 else []
    return 2 * 1024**3 / min(map(fastest_s, calls)) / 1e9


def best_gbytes_s() -> float:
    """The bandwidth of adding to 256 MiB in place, in GB/s."""
    x = torch.zeros(2**26)
    return 2 * x.nbytes / fastest_s(lambda: x.add_(1)) / 1e9


def fastest_s(call: Callable[[], object]) -> float:
    """The fastest of 20 calls."""
    times = []
    for _ in range(20):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def measure(recipe: str, precision: str, steps: int, overrides: list[str]) -> None:
    """Print the table of a recipe's step."""
    given = [f"recipe={recipe}", f"precision={precision}", "device=cpu", *overrides]
    plan = with_fastest(make_plan(compose([*given, "data.fallback=generated"]).config, ()))
    timed = TimedOps()
    with plan.backend_flags():
        gflops, gbytes_s = best_gflops(torch_dtype(plan.policy.compute_dtype)), best_gbytes_s()
        parts = build_parts(plan)
        trainer = Trainer(parts, Limits(None, None, None))
        batch = next(iter(parts.train.epoch(parts.order.draw()))).trained
        whole_s = []
        for n in range(WARM_UP + steps):
            began = time.perf_counter()
            trainer.optimizer_step(batch)
            whole_s.append(time.perf_counter() - began)
            if n < WARM_UP:
                continue
            with timed:
                trainer.optimizer_step(batch)
    step_ms = statistics.median(whole_s[WARM_UP:]) * 1e3
    rows = []
    for work, times_s in timed.times_s.items():
        calls = len(times_s) / steps
        products_ms, memory_ms = work.flops / gflops / 1e6, work.bytes / gbytes_s / 1e6
        bound = "products" if products_ms > memory_ms else "memory"
        least_ms = calls * max(products_ms, memory_ms)
        rows.append((calls * statistics.median(times_s) * 1e3, least_ms, bound, calls, work))
    rows.sort(key=lambda row: -row[0])
    flops = sum(calls * work.flops for *_, calls, work in rows)
    print(
        f"{recipe} {precision}, batch {plan.batch.effective}, {plan.speed}: {step_ms:.2f} ms "
        f"(median of {steps}), {flops / gflops / 1e4 / step_ms:.0f} % of the roof of products; "
        f"{gflops:.0f} GFLOP/s, {gbytes_s:.0f} GB/s, {torch.get_num_threads()} threads, "
        f"{cpu_name()}, torch {torch.__version__}"
    )
    print(f"{'ms':>7} {'least':>7} {'share':>6}  bound by  calls  op")
    for ms, least_ms, bound, calls, work in rows[:24]:
        print(
            f"{ms:7.3f} {least_ms:7.3f} {least_ms / ms:6.0%}  {bound:8} {calls:6.4g}  "
            f"{work.name} {work.shapes}"
        )
    least_ms, ops_ms = sum(row[1] for row in rows), sum(row[0] for row in rows)
    print(f"{ops_ms:7.3f} {least_ms:7.3f} {least_ms / ops_ms:6.0%}  all ops\n", flush=True)


def main() -> None:
    """A table for each recipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", default=[], metavar="RECIPE or OVERRIDE=...")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    steady_heap()
    overrides = [word for word in args.words if "=" in word]
    recipes = [word for word in args.words if "=" not in word]
    for recipe in recipes or ["fashion_mnist", "resnet"]:
        measure(recipe, args.precision, args.steps, overrides)


if __name__ == "__main__":
    main()
