"""What the processes of a run exchange beside gradients: numbers, decisions and objects.

Every decision that one process can take alone (a signal, the end of the time) has to be taken by
all of them at the same step, or one of them waits for ever.

A process that ends breaks its connections, and the others' next exchange fails at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mprun.errors import MachineFailedError, text_of

T = TypeVar("T")

# PyTorch has no type for it: there is only the text of a `RuntimeError`.
# What errors of gloo and NCCL say if another process is gone
LOST = ("closed by peer", "reset by peer", "closed by remote", "broken pipe", "socket", "timed out")


class PeerLostError(MachineFailedError):
    """Another process of the run ended; what was recorded stays."""


class Ranks:
    """One process, which agrees with itself. With several, `GroupRanks`."""

    rank = 0  # The number of this process
    size = 1  # How many there are
    waited_s = 0.0
    """Seconds that this process has spent on communication, waits for others included."""
    sees_waits = True
    """Whether `waited_s` is all of it: a GPU communicates beside the host, which does not wait."""

    @property
    def is_first(self) -> bool:
        """Whether this process keeps the record."""
        return self.rank == 0

    def totals(self, values: list[float]) -> list[float]:
        """The sums of numbers over processes, in float64."""
        return values

    def any(self, flag: bool) -> bool:
        """Whether any process has set its flag; all processes get the same answer."""
        return flag

    def barrier(self) -> None:
        """Wait until all processes are here."""

    def gather(self, value: T) -> list[T]:
        """The objects of all processes, by their numbers."""
        return [value]

    def share(self, value: T) -> T:
        """The first process's object."""
        return value

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to add up a tensor over processes, in place; what is returned waits for it."""
        return lambda: None

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest of a tensor's values over processes, element by element."""
        return tensor


class GroupRanks(Ranks):
    """The processes of torch.distributed's default group, which is initialized."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.sees_waits = device.type == "cpu"

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Inside, time counts as communication, and the loss of a process is a `PeerLostError`."""
        began = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise lost(error) or error from error
        finally:
            self.waited_s += time.perf_counter() - began

    def totals(self, values: list[float]) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64)  # counts of samples stay exact
        with self.communicating():
            dist.all_reduce(numbers)
        return numbers.tolist()

    def any(self, flag: bool) -> bool:
        return self.totals([float(flag)]) != [0.0]

    def barrier(self) -> None:
        self.totals([0.0])  # `dist.barrier` would use NCCL on a GPU, and name no lost process

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with self.communicating():
            dist.all_gather_object(values, value)
        return values

    def share(self, value: T) -> T:
        values = [value]
        with self.communicating():
            # the CPU: on a GPU it would go through NCCL, and the host would wait for the device
            dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        with self.communicating():
            work: Any = dist.all_reduce(tensor, async_op=True)

        def wait() -> None:
            with self.communicating():
                work.wait()

        return wait

    def largest(self, tensor: Tensor) -> Tensor:
        result = tensor.clone()  # all_reduce writes in place, and the argument is the caller's
        with self.communicating():
            dist.all_reduce(result, dist.ReduceOp.MAX)
        return result


def lost(error: BaseException) -> PeerLostError | None:
    """What an error of torch.distributed says if another process is gone; else None."""
    if isinstance(error, PeerLostError):
        return error
    text = " ".join(text_of(error).lower().split())  # gloo breaks its lines
    if not isinstance(error, RuntimeError) or not any(word in text for word in LOST):
        return None
    return PeerLostError("another process of the run ended")
