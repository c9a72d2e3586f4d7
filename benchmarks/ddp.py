"""`parallel=ddp` against a raw loop with DistributedDataParallel, in two processes.

    python -m benchmarks.ddp [--link loopback|1gbit] [--cases NAME ...] [--blocks N]

Two processes of one thread, each on a core of its own, with glibc's heap steady. Both loops train
the same model with the same optimizer in the same processes and take turns, block by block, as in
`benchmarks.raw_loop`; the raw loop is what PyTorch's tutorial has (DDP with its defaults, float32).
The figure is the ratio of the medians of the whole loop's time per step, in process 0.

`--link 1gbit` puts the processes into two network namespaces and joins them by a link of 1 Gbit/s
(`ip netns` and `tc`, as root). The bandwidth is measured with an all-reduce.

Another checkout of mprun is measured with PYTHONPATH=FOLDER, from any other folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.alternate import HEAPS
from benchmarks.raw_loop import in_turns, of_full_batches, raw_optimizer
from mprun.config.compose import compose
from mprun.precision import backend_flags
from mprun.precision.nested import map_tensors, to_dtype
from mprun.records.files import launch_of
from mprun.train.assemble import Plan, build_parts, make_plan
from mprun.train.assemble.optimizer import build_schedule
from mprun.train.assemble.parts import batch_form
from mprun.train.data import TensorSet
from mprun.train.machine.machine import cpu_name
from mprun.train.parallel.coordinator import coordinator_of

CASES = {
    "mnist 128": (("recipe=mnist", "train.batch_size=128"), 20),
    "fashion_mnist": (("recipe=fashion_mnist",), 4),
    "resnet": (("recipe=resnet",), 1),
    "char_gpt": (("recipe=char_gpt",), 2),
}
"""Overrides, and the steps of a block."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = "29611"
SENT_BYTES = 25 * 2**20
"""Of the all-reduce that measures the link."""


def rows(index: Tensor, x: Tensor) -> Tensor:
    """The samples of an index."""
    return x[index]


def raw_blocks(plan: Plan, steps: int, rank: int, size: int) -> Iterator[float]:
    """Seconds per step of a raw loop with DistributedDataParallel, block after block."""
    recipe, data, form = plan.recipe, plan.splits.train, batch_form(plan)
    assert isinstance(data, TensorSet)
    model = build_parts(plan).model
    clip_norm = plan.config.train.clip_norm
    fused = {"fused": True} if plan.speed.optimizer_impl == "fused" else {}
    optimizer = raw_optimizer(plan, model, **fused)
    replica = DistributedDataParallel(model)
    schedule = build_schedule(plan.config.train, recipe, optimizer, plan.planned_steps)
    order = torch.Generator().manual_seed(plan.config.seed)
    micro = plan.batch.effective // size

    def batches() -> Iterator[Any]:
        while True:
            permutation = torch.randperm(len(data), generator=order)
            for index in permutation.split(micro * size):
                if len(index) == micro * size:
                    yield map_tensors(partial(rows, index[rank::size]), data.content)

    source = batches()
    while True:
        start = time.perf_counter()
        for _ in range(steps):
            content = form.prepared(next(source))
            optimizer.zero_grad()
            output = recipe.forward(replica, form.convert(content))
            loss = recipe.loss(to_dtype(output, torch.float32), content)
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            schedule.step(None)
        yield (time.perf_counter() - start) / steps


def all_reduce_ms() -> float:
    """The median time of an all-reduce of `SENT_BYTES`."""
    x, times = torch.zeros(SENT_BYTES // 4), []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def child(case: str, blocks: int) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    launch = launch_of()
    overrides, steps = CASES[case]
    given = [*overrides, "precision=fp32", "parallel=ddp", "device=cpu", "data.fallback=generated"]
    with coordinator_of(launch) as coordinator:
        plan = of_full_batches(make_plan(compose(given).config, ()))
        plan = replace(plan, speed=replace(plan.speed, compile=False))
        with backend_flags(plan.policy):
            raw = raw_blocks(plan, steps, launch.rank, launch.world_size)
            parts = build_parts(plan, layout=coordinator.layout("ddp", torch.device("cpu")))
            row = in_turns(parts, raw, steps, blocks)._asdict()
            row["all_reduce_ms"] = all_reduce_ms()
            row["parameters"] = sum(p.numel() for p in parts.model.parameters())
        if launch.rank == 0:
            print(json.dumps(row), flush=True)
        coordinator.finish()


@contextlib.contextmanager
def link(kind: str) -> Iterator[list[list[str]]]:
    """The beginnings of the two processes' commands."""
    if kind == "loopback":
        yield [[], []]
        return
    run = partial(subprocess.run, check=True)
    names = ["mprun-a", "mprun-b"]
    try:
        for name in names:
            run(["ip", "netns", "add", name])
        run(["ip", "link", "add", "mprun-a", "type", "veth", "peer", "name", "mprun-b"])
        for name, address in zip(names, ADDRESSES, strict=True):
            run(["ip", "link", "set", name, "netns", name])
            inside = ["ip", "netns", "exec", name]
            run([*inside, "ip", "addr", "add", f"{address}/24", "dev", name])
            run([*inside, "ip", "link", "set", name, "up"])
            run([*inside, "ip", "link", "set", "lo", "up"])
            limit = ["rate", "1gbit", "burst", "256kb", "latency", "50ms"]
            run([*inside, "tc", "qdisc", "add", "dev", name, "root", "tbf", *limit])
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--link", choices=("loopback", "1gbit"), default="loopback")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--child", help="the case of one of the two processes")
    args = parser.parse_args()
    if args.child:
        child(args.child, args.blocks)
        return
    print(
        f"{date.today()}  {cpu_name()}, 2 processes of 1 thread, gloo, torch {torch.__version__}; "
        f"{args.blocks} alternating blocks; link {args.link}"
    )
    for case in args.cases:
        with link(args.link) as begin:
            host = "127.0.0.1" if args.link == "loopback" else ADDRESSES[0]
            shared = {**os.environ, **HEAPS["steady"], "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
            shared |= {"MASTER_ADDR": host, "MASTER_PORT": PORT}
            started = []
            for rank in range(2):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if args.link != "loopback":
                    own["GLOO_SOCKET_IFNAME"] = ("mprun-a", "mprun-b")[rank]
                command = [*begin[rank], "taskset", "-c", str(rank), sys.executable, "-m"]
                command += ["benchmarks.ddp", "--child", case, "--blocks", str(args.blocks)]
                started.append(
                    subprocess.Popen(command, env=shared | own, stdout=subprocess.PIPE, text=True)
                )
            out = [process.communicate()[0] for process in started]
        row = json.loads(out[0])
        print(
            f"{case:14} {row['parameters'] / 1e6:5.2f} M parameters, all-reduce of 25 MiB "
            f"{row['all_reduce_ms']:6.1f} ms: raw {row['base_ms']:8.3f} ms  "
            f"mprun {row['other_ms']:8.3f} ms  "
            f"ratio {row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]",
            flush=True,
        )


if __name__ == "__main__":
    main()
