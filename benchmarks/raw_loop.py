"""mprun's loop against a raw PyTorch loop: step time on each recipe, overhead on an empty model.

    python -m benchmarks.raw_loop [--scale X] [--heap both|"as it is"|steady] [--cases NAME ...]

Both loops run the same model, optimizer and batches in one process, taking turns block by block, so
that a machine whose speed drifts drifts for both. The figure is the ratio of mprun's median step
time to the raw loop's, with a 95 % bootstrap interval over blocks; a step's time here is the whole
loop's wall time divided by its steps, logging and metrics included. `speed=plain` on both sides,
except in bf16_true: there mprun's compiled optimizer steps against PyTorch's default one.

A case fails if the interval's upper end is above 1.03 and mprun adds more than 20 microseconds.

Each heap (`benchmarks.alternate`) has a process of its own, which measures everything: the heap as
it is, which users have without asking, and one that keeps its memory, where no page fault hides the
loops' difference.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.alternate import BLOCKS, HEAPS, Ratio, compared, heap_environment
from mprun.config import compose
from mprun.optim.engines import fastest
from mprun.precision import backend_flags, devices
from mprun.precision.nested import map_tensors, to_dtype
from mprun.precision.policy import torch_dtype
from mprun.recipe import Recipe
from mprun.train.assemble import Plan, build_parts, make_plan
from mprun.train.assemble.optimizer import build_schedule, class_of
from mprun.train.assemble.parts import batch_form
from mprun.train.data import DataRequest, Splits, TensorSet
from mprun.train.loop import Limits, StopRequestedError, Trainer, TrainingComponents
from mprun.train.machine.machine import cpu_name, usable_cores


@dataclass(frozen=True)
class Empty(Recipe):
    """A model of one number: what is left of a step is the loop."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def data(self, request: DataRequest) -> Splits:
        part = TensorSet(torch.zeros(64, 1), torch.zeros(64, 1))
        return Splits("empty", "generated", part, part.first(0), part.first(0), shuffle=False)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (output - batch[1]).mean()


class Case(NamedTuple):
    """What both loops train."""

    overrides: tuple[str, ...]
    steps: int
    """Steps of a block."""
    blocks: int = BLOCKS


CASES = {
    "linear": Case(("recipe=linear",), 40),
    "mnist": Case(("recipe=mnist",), 2),
    "mnist 128": Case(("recipe=mnist", "train.batch_size=128"), 40),
    "fashion_mnist": Case(("recipe=fashion_mnist",), 8),
    "fashion_mnist 256": Case(("recipe=fashion_mnist", "train.batch_size=256"), 1, 40),
    "resnet": Case(("recipe=resnet",), 2, 40),
    "torchvision_model": Case(("recipe=torchvision_model",), 2, 40),
    "char_gpt": Case(("recipe=char_gpt",), 4, 60),
    "transformer": Case(("recipe=transformer",), 4, 60),
}
PRECISIONS = ("fp32", "bf16_mixed", "fp16_mixed", "bf16_true")
SLOW = "fp16_mixed"
"""On CPUs without such units a step of the larger recipes takes seconds; `linear` is measured."""
MAX_RATIO, MAX_US = 1.03, 20.0
"""Of the interval's upper end; or of what mprun adds to a step."""


def raw_optimizer(plan: Plan, model: nn.Module, **more: Any) -> Optimizer:
    """PyTorch's, with the values of the configuration and no other choice than `more`."""
    config = plan.config.train.optimizer
    options: dict[str, Any] = {"lr": plan.lr, "weight_decay": config.weight_decay}
    if config.name == "adamw":
        options |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
    else:
        options["momentum"] = config.momentum
    if config.name == "rmsprop":
        options |= {"alpha": config.alpha, "eps": config.eps}
    return class_of(config)(model.parameters(), **options, **more)


def _rows(index: Tensor, x: Tensor) -> Tensor:
    return x[index]


def raw_blocks(plan: Plan, steps: int) -> Iterator[float]:
    """Seconds per step of a raw loop, block after block."""
    recipe, data, form = plan.recipe, plan.splits.train, batch_form(plan)
    assert isinstance(data, TensorSet)
    model, device = build_parts(plan).model, plan.device
    kernels = {name: True for name in ("foreach", "fused") if plan.speed.optimizer_impl == name}
    optimizer, clip_norm = raw_optimizer(plan, model, **kernels), plan.config.train.clip_norm
    schedule = build_schedule(plan.config.train, recipe, optimizer, plan.planned_steps)
    autocast = plan.policy.casting == "autocast"
    dtype = torch_dtype(plan.policy.compute_dtype) if autocast else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=plan.policy.name == "fp16_mixed")
    size, shuffle = plan.batch.effective, plan.splits.shuffle
    order = torch.Generator().manual_seed(plan.config.seed)

    samples = map_tensors(lambda x: x.to(device), data.content)

    def batches() -> Iterator[Any]:
        while not shuffle:  # one batch of all samples
            yield samples
        while True:
            permutation = torch.randperm(len(data), generator=order).to(device)
            for index in permutation.split(size):
                if len(index) == size:
                    yield map_tensors(partial(_rows, index), samples)

    source = batches()
    while True:
        start = time.perf_counter()
        for _ in range(steps):
            content = form.prepared(next(source))
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype, enabled=autocast):
                output = recipe.forward(model, form.convert(content))
            loss = recipe.loss(to_dtype(output, torch.float32), content)
            scaler.scale(loss).backward()
            if clip_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            scaler.step(optimizer)
            scaler.update()
            schedule.step(None)
        devices.synchronize(device)
        yield (time.perf_counter() - start) / steps


def of_full_batches(plan: Plan) -> Plan:
    """The plan without a last smaller batch and without validation."""
    splits = plan.splits
    assert isinstance(splits.train, TensorSet)
    full = len(splits.train) // plan.batch.effective * plan.batch.effective
    none = splits.validation.first(0)
    return replace(plan, splits=replace(splits, train=splits.train.first(full), validation=none))


def mprun_blocks(plan: Plan, steps: int) -> Iterator[float]:
    """Seconds per step of mprun's loop, block after block, each a training of its own.

    For comparing mprun with itself: both sides begin and end a training as often.
    """
    trainer, done = Trainer(build_parts(of_full_batches(plan)), Limits(None, None, None)), 0
    while True:
        done += steps
        trainer.limit(Limits(None, done, None))
        start = time.perf_counter()
        trainer.fit()
        yield (time.perf_counter() - start) / steps


def planned(case: Case, precision: str, device: str = "cpu") -> Plan:
    """The plan of a case, without the choices of `speed=auto` that change a raw loop too."""
    given = [*case.overrides, f"precision={precision}", "speed=plain", f"device={device}"]
    plan = make_plan(compose([*given, "data.fallback=generated"]).config, ())
    if plan.speed.optimizer_impl == "eager":
        engine = fastest(plan.device, plan.config.train.optimizer.name)
        plan = replace(plan, speed=replace(plan.speed, optimizer_impl=engine))
    if plan.speed.optimizer_impl == "foreach" and plan.config.train.optimizer.name == "adamw":
        plan = replace(plan, speed=replace(plan.speed, optimizer_impl="fused"))
    return plan


def in_turns(parts: TrainingComponents, raw: Iterator[float], steps: int, blocks: int) -> Ratio:
    """Alternate blocks of mprun's loop and of a raw one; ratio of medians with its interval.

    The raw loop takes its turns between two steps of mprun's, which is entered once: to begin and
    end a training for each block would count as steps.
    """
    raw_s, own_s = list[float](), list[float]()
    done, began = 0, 0.0

    def between_steps() -> bool:
        nonlocal done, began
        done += 1
        if done % steps == 0:
            devices.synchronize(parts.train.device)
            own_s.append((time.perf_counter() - began) / steps)
            raw_s.append(next(raw))
            began = time.perf_counter()
        return len(raw_s) > blocks

    trainer = Trainer(parts, Limits(None, None, None), stop=between_steps)
    with contextlib.suppress(StopRequestedError):
        trainer.fit()
    return compared(raw_s[1:], own_s[1:])


def compare(plan: Plan, steps: int, blocks: int = BLOCKS) -> dict[str, float]:
    """Alternate blocks of both loops of a plan."""
    parts = build_parts(of_full_batches(plan))
    comparison = in_turns(parts, raw_blocks(plan, steps), steps, blocks)
    return {
        "raw_ms": comparison.base_ms,
        "mprun_ms": comparison.other_ms,
        "ratio": comparison.ratio,
        "low": comparison.low,
        "high": comparison.high,
    }


def is_slower(row: dict[str, float]) -> bool:
    """Whether mprun adds more than is allowed."""
    added_us = (row["mprun_ms"] - row["raw_ms"]) * 1e3
    return row["high"] > MAX_RATIO and added_us > MAX_US


def measure(heap: str, scale: float, names: Iterable[str]) -> bool:
    """Print a line per case and, last, one JSON line; whether no case is slower."""
    rows = {}
    print(
        f"{date.today()}  {cpu_name()}, {usable_cores()} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; {BLOCKS} alternating blocks (slow cases: 40 to 60); "
        f"heap {heap}"
    )
    for name, precision in itertools.product(names, PRECISIONS):
        if precision == SLOW and name != "linear":
            continue
        case = CASES[name]
        plan = planned(case, precision)
        with backend_flags(plan.policy):
            row = compare(plan, max(1, int(case.steps * scale)), case.blocks)
        rows[f"{name} {precision}"] = row
        print(
            f"{name:17} {precision:11} raw {row['raw_ms']:8.3f} ms  "
            f"mprun {row['mprun_ms']:8.3f} ms  "
            f"ratio {row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
            + ("  slower" if is_slower(row) else ""),
            flush=True,
        )
    linear = make_plan(compose(["recipe=linear", "speed=plain", "device=cpu"]).config, ())
    empty = Empty()
    plan = replace(linear, recipe=empty, splits=empty.data(DataRequest()))
    row = compare(plan, max(1, int(2000 * scale)))
    overhead_us = (row["mprun_ms"] - row["raw_ms"]) * 1e3
    rows["empty"] = {**row, "overhead_us": overhead_us}
    print(
        f"empty model: raw {row['raw_ms'] * 1e3:.1f} us, mprun {row['mprun_ms'] * 1e3:.1f} us, "
        f"host overhead {overhead_us:.1f} us per step"
    )
    print(json.dumps({"heap": heap, **rows}), flush=True)
    return not any(map(is_slower, rows.values()))


def main() -> None:
    """Measure under each heap, in a process of its own, because glibc reads its settings once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the steps per block")
    parser.add_argument("--heap", choices=("both", *HEAPS), default="both")
    parser.add_argument("--here", action="store_true", help="in this process; glibc was told")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    if args.here:
        sys.exit(not measure(args.heap, args.scale, args.cases))
    failed = False
    for heap in HEAPS if args.heap == "both" else (args.heap,):
        module = [sys.executable, "-m", "benchmarks.raw_loop", "--here"]
        options = ["--heap", heap, "--scale", str(args.scale), "--cases", *args.cases]
        done = subprocess.run([*module, *options], env=heap_environment(heap), check=False)
        failed |= done.returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
