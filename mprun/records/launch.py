"""What torchrun tells each process that it starts: the process's number, and how many there are.

    torchrun --nproc-per-node=2 -m mprun recipe=mnist parallel=ddp

A process that torchrun did not start is alone: number 0 of 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# What torch.distributed reads; torchrun sets all of them
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """One process among those that were started together."""

    rank: int = 0  # The process's number; the first process, 0, keeps the record
    world_size: int = 1  # How many processes there are, on all machines
    local_rank: int = 0  # Its number on its machine: the GPU that it uses
    restarts: int = 0  # How often torchrun has started all processes again after a failure

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.world_size == 1

    @property
    def is_first(self) -> bool:
        """Whether it is the process that keeps the record and prints."""
        return self.rank == 0


def launch_of(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch that the environment describes; one process where torchrun set nothing."""
    if not all(environment.get(name) for name in NEEDED):
        return Launch()
    try:
        return Launch(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except ValueError:  # another program's variables
        return Launch()
