"""Shards of FSDP2, each with an optimizer of its own, train as the whole, bit for bit.

Random bits are a function of seed, step, tensor and element, so processes need not agree on them.
`tests/train/parallel` has replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes

from mprun.optim import AdamW, mark_shard, name_parameters
from tests.optim import BRAIN, HALF, normal, same_bits

WORLD = 2
STEPS = 20

pytestmark = [
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_gloo_available()), reason="no gloo here"
    ),
]


def results(function: Callable[..., None], folder: Path) -> list[Any]:
    """What each process of a group saved."""
    arguments = (str(folder / "meeting"), str(folder))
    start_processes(function, arguments, nprocs=WORLD, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


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
