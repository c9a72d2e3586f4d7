"""What a checkpoint holds of each process: its random numbers, and the times of its steps."""

from __future__ import annotations

from typing import Any

import torch

from mprun import devices
from mprun.data.random_states import restore_states, saved_states, seed_all
from mprun.parallel.ranks import Ranks
from mprun.train.step_statistics import Distribution, warmup_steps


def saved_random_numbers(ranks: Ranks) -> dict[str, Any]:
    """The states of the first process, as one process saves them, and of all as `processes`."""
    own = {
        "rng": torch.get_rng_state(),
        "host_rng": saved_states(),
        "device_rng": devices.random_states(devices.in_use()),
    }
    if ranks.size == 1:
        return own
    processes = ranks.gather(own)
    return {**processes[0], "processes": processes}


def restore_random_numbers(state: dict[str, Any], ranks: Ranks) -> None:
    """Continue the random numbers of this process.

    A run that continues with more processes than it had has no states for the further ones: theirs
    begin from the first process's next number and their own.
    """
    own = state
    if ranks.rank:
        saved = state.get("processes", [])
        if ranks.rank >= len(saved):
            torch.set_rng_state(state["rng"])
            seed_process(int(torch.randint(2**31, ())), ranks)
            return
        own = saved[ranks.rank]
    torch.set_rng_state(own["rng"])
    if "host_rng" in own:  # older checkpoints have none
        restore_states(own["host_rng"])
    devices.restore_random_states(own.get("device_rng", {}))


def seed_process(seed: int, ranks: Ranks) -> None:
    """Give each process but the first random numbers of its own: dropout drops other units."""
    if ranks.rank:
        seed_all((seed + 0x9E3779B9 * ranks.rank) % 2**32)


class ProcessTimes:
    """The step times of each process, without what it waited for the others.

    Args:
        ranks: the processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own, self._waits, self._steps = Distribution(), Distribution(), Distribution()
        self._seen = 0

    def add(self, step_s: float, waited_s: float) -> None:
        """One step: its seconds, and those of communication in it."""
        if self._ranks.size == 1:
            return
        self._seen += 1
        if self._seen > warmup_steps(self._seen):
            self._own.add((step_s - waited_s) * 1e3)
            self._waits.add(waited_s * 1e3)
            self._steps.add(step_s * 1e3)

    def gathered(self) -> dict[str, Any]:
        """Milliseconds of the slowest and the fastest process, and the share of communication.

        It is `process_times` of a checkpoint; nothing for one process.
        """
        if self._ranks.size == 1:
            return {}
        own, waits, steps = (x.quantiles(0.5)[0] for x in (self._own, self._waits, self._steps))
        every = [ms for ms in self._ranks.gather(own) if ms is not None]
        return {
            "process_times": {
                "slowest_ms": max(every) if every else None,
                "fastest_ms": min(every) if every else None,
                "communication_share": waits / steps if waits is not None and steps else None,
            }
        }
