"""Replicas of one model, each rounding its own copy, stay equal bit for bit; and so do shards.

Random bits are a function of seed, step, tensor and element, so replicas given the same averaged
gradients round alike and need not exchange their parameters. Shards of FSDP2 round as the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from mprun.optim import AdamW, mark_shard, name_parameters
from tests.optim import BRAIN, HALF, normal, same_bits

WORLD = 2
STEPS = 20

pytestmark = [
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_gloo_available()), reason="no gloo here"
    ),
    pytest.mark.usefixtures("kernels_of_the_installation"),
]


def build() -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(BRAIN)
    low = {"momentum_dtype": BRAIN, "variance_dtype": HALF}
    return model, AdamW(model.parameters(), lr=1e-3, seed=8, **low)


def batch(step: int) -> tuple[Tensor, Tensor]:
    return normal((32, 16), 2 * step, BRAIN), normal((32, 4), 2 * step + 1, BRAIN)


def replica(rank: int, rendezvous: str, folder: str) -> None:
    """One process: its half of every batch; saves what it saw and what came out."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD
    )
    try:
        model, optimizer = build()
        wrapped = DistributedDataParallel(model)
        seen, own = [], []
        for step in range(STEPS):
            x, y = (part.chunk(WORLD)[rank] for part in batch(step))
            optimizer.zero_grad()
            loss = (wrapped(x).float() - y.float()).square().mean()
            own.append(loss.item())
            loss.backward()
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            optimizer.step()
        kept = {
            "parameters": [p.detach() for p in model.parameters()],
            "state": [dict(optimizer.state[p]) for p in model.parameters()],
            "gradients": seen,
            "losses": own,
        }
        torch.save(kept, Path(folder) / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()


def results(function: Callable[..., None], folder: Path) -> list[Any]:
    """What each process of a group saved."""
    arguments = (str(folder / "meeting"), str(folder))
    start_processes(function, arguments, nprocs=WORLD, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.mark.usefixtures("forked")
def test_replicas_stay_equal_to_each_other_and_to_one_process(tmp_path: Path) -> None:
    a, b = results(replica, tmp_path)
    assert a["losses"] != b["losses"], "both had the same half of the batch"
    for name in ("parameters", "gradients"):
        pairs = zip(_flat(a[name]), _flat(b[name]), strict=True)
        assert all(same_bits(x, y) for x, y in pairs), name

    model, optimizer = build()
    start = [p.detach().clone() for p in model.parameters()]
    for gradients in a["gradients"]:
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        optimizer.step()
    for p, there, before in zip(model.parameters(), a["parameters"], start, strict=True):
        assert same_bits(p.detach(), there)
        assert not same_bits(p.detach(), before)
    for p, *others in zip(model.parameters(), a["state"], b["state"], strict=True):
        for state in others:
            assert all(same_bits(state[k], v) for k, v in optimizer.state[p].items())


def _flat(tensors: list[Tensor] | list[list[Tensor]]) -> list[Tensor]:
    return [y for x in tensors for y in ([x] if isinstance(x, Tensor) else x)]


# ---- shards ----


def uneven() -> nn.Sequential:
    """Of 5 rows one process gets 3 and the other 2; of one bias the other gets nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 1)).to(BRAIN)
    name_parameters(model)
    return model


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-2, seed=8, momentum_dtype=BRAIN, variance_dtype=HALF)


def local_shards(model: nn.Module, rank: int) -> list[nn.Parameter]:
    """This process's part of each sharded parameter, which has its memory."""
    shards = []
    for name, p in model.named_parameters():
        shard = nn.Parameter(p.to_local().detach())  # type: ignore[attr-defined]
        rows = -(-len(p) // WORLD)
        mark_shard(shard, name, min(rank * rows, len(p)) * p[0].numel())
        shards.append(shard)
    return shards


def sharding(rank: int, rendezvous: str, folder: str) -> None:
    """One process of FSDP2; saves the whole gradients of each step, and the parameters."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD
    )
    try:
        model: Any = uneven()
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        shards = local_shards(model, rank)
        optimizer, seen = adamw(shards), []
        for step in range(STEPS):
            x = normal((32, 16), 2 * step, BRAIN).chunk(WORLD)[rank]
            model.zero_grad()
            model(x).float().square().mean().backward()
            seen.append([p.grad.full_tensor() for p in model.parameters()])
            for p, shard in zip(model.parameters(), shards, strict=True):
                shard.grad = p.grad.to_local()
            optimizer.step()
        whole = [p.full_tensor().detach() for p in model.parameters()]
        sizes = [shard.numel() for shard in shards]
        saved = {"parameters": whole, "gradients": seen, "sizes": sizes}
        torch.save(saved, Path(folder) / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("forked")
def test_shards_of_fsdp2_are_the_parts_of_one_process(tmp_path: Path) -> None:
    a, b = results(sharding, tmp_path)
    assert (a["sizes"], b["sizes"]) == ([48, 3, 5, 1], [32, 2, 0, 0])
    model = uneven()
    optimizer = adamw(model.parameters())
    for gradients in a["gradients"]:
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        optimizer.step()
    for p, there, start in zip(
        model.parameters(), a["parameters"], uneven().parameters(), strict=True
    ):
        assert same_bits(p.detach(), there)
        assert not same_bits(p.detach(), start.detach())
