"""How the processes of one command meet, get their jobs, and learn that one of them is lost.

All processes get the same command line. The first one carries the command out: it composes, plans,
keeps records, prints. Wherever the command trains, it announces a job, and the others carry out the
same job beside it (`train/run.py`). So every command works in several processes, studies too,
and only training is parallel.

A job ends in all processes, or in none. A loss that becomes NaN is the same number everywhere, so
all fail at the same step and are ready for the next job. A fault of one process (a kill, a full
disk) leaves the others inside an exchange: their connections break, and the command ends.

The processes leave notes for each other in torchrun's own store, which outlives them: why a process
failed, and the run's folder, from which the run can be resumed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist

from mprun.errors import MachineFailedError, first_line, text_of
from mprun.precision import devices
from mprun.records.files import Launch
from mprun.train.parallel.layouts import Layout, ReplicaLayout
from mprun.train.parallel.ranks import GroupRanks, PeerLostError, lost

# How long an exchange may take, PyTorch's default; a process that ends is noticed at once
PATIENCE = timedelta(minutes=30)
# How long a process that failed in a part of a job waits for the others to fail in it
GRACE_S = 5.0
NOTE_S = 2.0  # How long to wait for the notes of the processes that failed
POLL_S = 0.02  # The store has no wait that ends when a process dies, so it is asked again and again


class Coordinator:
    """One process: there is nobody to meet. With several, `GroupCoordinator`."""

    is_first = True

    def announce(self, job: Any, folder: Path | None = None) -> None:
        """The first process begins a job: the others get `job`.

        The error of a lost process names the folder, from which a run can be resumed.
        """

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, all processes do the same part of a job.

        It fails in all of them, and all can begin the next job; or the command ends, with a
        `PeerLostError` where another process is gone.
        """
        yield

    def finish(self) -> None:
        """The job is done in this process, and its exchanges are over."""

    def layout(self, kind: str, device: torch.device) -> Layout:
        """What this process holds of a model: none, ddp or fsdp2."""
        return Layout()

    def close(self) -> None:
        """The command has ended: the other processes end."""


class GroupCoordinator(Coordinator):
    """The processes that torchrun started; all of them construct it at the same time."""

    def __init__(self, launch: Launch) -> None:
        if launch.restarts:
            raise MachineFailedError(
                "torchrun started the processes again (--max-restarts), and mprun does not "
                "continue the run by itself; start it with run.resume=FOLDER"
            )
        self._rank, self._size = rank, size = launch.rank, launch.world_size
        self.is_first = rank == 0
        self._number = self._jobs = 0
        self._is_busy = False
        backend, here = "gloo", devices.accelerator()
        if here is not None and launch.local_rank < torch.accelerator.device_count():
            torch.accelerator.set_device_index(launch.local_rank)
            if (own_group := devices.backend(here).group) is not None:
                # gloo too: numbers and objects are exchanged on the CPU
                backend = f"cpu:gloo,{here.type}:{own_group}"
        store = _store(rank)
        self._notes = dist.PrefixStore("mprun", store)  # type: ignore[attr-defined]
        # PyTorch 2.14's FSDP2 calls functions that it has itself deprecated
        warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, r"torch\.distributed\.")
        try:
            dist.init_process_group(
                backend, timeout=PATIENCE, store=self._notes, rank=rank, world_size=size
            )
        except RuntimeError as error:
            raise MachineFailedError(
                f"process {rank} of {size} cannot connect to the others: {first_line(error)}"
            ) from None
        self._notes.set(f"process/{rank}", f"{gethostname()} {os.getpid()}")

    def announce(self, job: Any, folder: Path | None = None) -> None:
        if self._is_busy:  # the others are still in an exchange of the last job
            self._disconnect()
        self._is_busy = job is not None
        self._jobs += 1
        # the others look for this note before they enter an exchange, which ends after PATIENCE
        self._notes.set(f"job/{self._jobs}", "1")
        self._exchange(job)
        if folder is not None:
            self._notes.set("folder", str(folder.resolve()))

    def next_job(self) -> Any:
        """What the first process announces next; None where the command ends."""
        self._jobs += 1
        while self.is_connected and not self._notes.check([f"job/{self._jobs}"]):
            if self._is_gone(0):  # what it does alone may take longer than an exchange
                raise PeerLostError("the first process ended")
            time.sleep(POLL_S)
        return self._exchange(None)

    def finish(self) -> None:
        self._is_busy = False

    @property
    def is_connected(self) -> bool:
        """False once a part of a job has failed in this process alone."""
        return dist.is_initialized()

    def _exchange(self, job: Any) -> Any:
        if not self.is_connected:
            raise PeerLostError("the processes are no longer connected: one of them has ended")
        return GroupRanks(torch.device("cpu")).share(job)

    @contextmanager
    def together(self) -> Iterator[None]:
        self._number += 1
        try:
            yield
        except PeerLostError as error:
            raise self._with_reason(error) from None
        except BaseException as error:
            if (loss := lost(error)) is not None:
                raise self._with_reason(loss) from error
            self._leave(error)
            raise

    def _leave(self, error: BaseException) -> None:
        """A part failed here: if it failed everywhere, all go on, else the connections end."""
        first = first_line(error) if text_of(error).strip() else type(error).__name__
        self._notes.set(f"failed/{self._rank}", first)
        self._notes.set(f"end/{self._number}/{self._rank}", "1")
        if self._noted([f"end/{self._number}/{rank}" for rank in range(self._size)], GRACE_S):
            self._notes.delete_key(f"failed/{self._rank}")  # all failed: nothing to explain
            self._is_busy = False
        else:
            self._disconnect()

    def _noted(self, keys: list[str], patience_s: float) -> bool:
        """Whether the store has all notes, or gets them within so many seconds."""
        until = time.monotonic() + patience_s
        while not self._notes.check(keys):
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True

    def _with_reason(self, error: PeerLostError) -> PeerLostError:
        """The error with the process that is gone, and what it reported."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        reported = [
            f"process {n} of {self._size}: {self._notes.get(f'failed/{n}').decode()}"
            for n in others
            if self._noted([f"failed/{n}"], NOTE_S / self._size)  # all are asked in turn
        ]
        gone = [
            f"process {n} of {self._size} was killed, or crashed"
            for n in others
            if self._is_gone(n)
        ]
        # what a process reported says more than that it is gone, and both say more than neither
        what = [*reported, *gone, f"one of the {self._size} processes ended"][0]
        self._notes.set(f"failed/{self._rank}", f"{error}")
        if self._notes.check(["folder"]):
            what += f"; continue the run with run.resume={self._notes.get('folder').decode()}"
        return PeerLostError(what)

    def _is_gone(self, rank: int) -> bool:
        """Whether a process has ended, as far as can be seen: on this machine."""
        machine, number = self._notes.get(f"process/{rank}").decode().split()
        if machine != gethostname():
            return False
        try:
            state = Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        except OSError:  # it has ended; or nothing is known: macOS has no /proc
            return Path("/proc/self").exists()
        return state.split()[0] in "ZX"  # a zombie: its parent has not asked for its status

    def layout(self, kind: str, device: torch.device) -> Layout:
        if kind == "fsdp2":
            from mprun.train.parallel.shards import ShardLayout  # imports a second of PyTorch

            return ShardLayout(GroupRanks(device), device)
        return ReplicaLayout(GroupRanks(device))

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the command ends in any case; the others may be gone
            if self.is_first:
                self.announce(None)
        self._disconnect()

    def _disconnect(self) -> None:
        gc.collect()  # models in cycles hold the group, whose threads must end before Python does
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _store(rank: int) -> Any:
    """The store that all processes share: torchrun's, else the first process has it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # multi_tenant: a process that makes the store twice gets the one that it has
    return dist.TCPStore(host, port, is_master=hosts, multi_tenant=True)  # type: ignore[attr-defined]


_here: list[Coordinator] = [Coordinator()]


def coordinator_here() -> Coordinator:
    """That of this process; there is one for all of it, as of torch.distributed."""
    return _here[-1]


@contextmanager
def coordinator_of(launch: Launch) -> Iterator[GroupCoordinator]:
    """Inside, `coordinator_here()` is that of the processes that torchrun started."""
    coordinator = GroupCoordinator(launch)
    _here.append(coordinator)
    try:
        yield coordinator
    finally:
        _here.pop()
        coordinator.close()
