"""A command in several processes: the first one carries it out, the others train beside it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.errors import EXIT_FAILED, EXIT_OK, MprunError, printable
from mprun.parallel.launch import Launch, launch_of

if TYPE_CHECKING:
    from mprun.parallel.coordinator import GroupCoordinator


def in_all_processes(command: Callable[[], int]) -> int:
    """The exit status of `command`, carried out with the other processes that torchrun started."""
    launch = launch_of()
    if launch.world_size == 1:
        return command()
    # torch reads it once: DDP's and gloo's hints to programmers go to standard error
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from mprun.parallel.coordinator import coordinator_of

    try:
        with coordinator_of(
            launch.rank, launch.world_size, launch.local_rank, launch.restarts
        ) as coordinator:
            return command() if launch.is_first else _follow(coordinator, launch)
    except MprunError as error:
        print(f"mprun: {printable(str(error))}", file=sys.stderr)
        return error.status


@contextmanager
def _silent() -> Iterator[None]:
    """Inside, nothing is printed: the first process prints the same."""
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        yield


def _follow(coordinator: GroupCoordinator, launch: Launch) -> int:
    from mprun.parallel.ranks import PeerLostError
    from mprun.run import follow
    from mprun.train.signals import SignalReceivedError, StopSignals

    warnings.simplefilter("ignore")  # the first process shows them
    with StopSignals(patient=True) as stop:
        try:
            while (job := coordinator.next_job()) is not None:
                with _silent():
                    follow(job, stop, coordinator)
        except PeerLostError as error:
            if launch.rank == 1 and coordinator.is_connected:  # the first process cannot say it
                print(f"mprun: {error}", file=sys.stderr)
            return EXIT_FAILED
        except SignalReceivedError:
            return stop.exit_status
    return EXIT_OK
