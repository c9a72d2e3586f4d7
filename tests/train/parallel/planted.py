"""mprun with something planted in one of its processes, by variables of the environment.

PLANTED="kill 1 5"   SIGKILL before process 1 takes step 5
PLANTED="raise 1 5"  an exception there, and NaN a loss that is NaN
PLANTED="wait 1 5"   process 1 makes the file `reached`, then waits for a signal
DIGESTS=FOLDER       each process writes SHA-256 of its parameters and moments after training
FOOTPRINT=real       the memory of a step is counted as usual: otherwise it is not, which saves time
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import mprun.train.run
from mprun.cli.main import main
from mprun.train.loop import Trainer
from mprun.train.signals import StopSignals
from tests.waiting import wait_for


def plant() -> None:
    """Patch the trainer of this process."""
    what, rank, step = os.environ.get("PLANTED", "none 0 0").split()
    if what != "none" and os.environ.get("RANK", "0") == rank:
        _at_step(int(step), getattr(sys.modules[__name__], f"_{what}"))
    if what == "wait":
        _heard_signals()
    if os.environ.get("FOOTPRINT") != "real":
        mprun.train.run.footprint = lambda *_: ({}, None)  # type: ignore[attr-defined]
    if folder := os.environ.get("DIGESTS"):
        _with_digests(Path(folder))


def _at_step(number: int, act: Callable[[], None]) -> None:
    plain = Trainer.optimizer_step

    def step(self: Trainer, batch: Any, *rest: Any) -> Any:
        is_real = self.parts.layout.ranks.size > 1  # the footprint's one step is alone
        is_real &= not isinstance(next(self.parts.model.parameters()), FakeTensor)
        if is_real and self.step + 1 >= number:
            act()
        return plain(self, batch, *rest)

    Trainer.optimizer_step = step  # type: ignore[method-assign]


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ZeroDivisionError("planted fault")


_heard: list[int] = []


def _heard_signals() -> None:
    plain = StopSignals._handle

    def handle(self: StopSignals, number: int, frame: FrameType | None) -> None:
        _heard.append(number)
        plain(self, number, frame)

    StopSignals._handle = handle  # type: ignore[method-assign]


def _wait() -> None:
    Path("reached").touch()
    wait_for(lambda: bool(_heard))


def _with_digests(folder: Path) -> None:
    plain = Trainer.fit

    def fit(self: Trainer) -> None:
        plain(self)
        rank = self.parts.layout.ranks.rank
        (folder / f"digest-{rank}").write_text(digest(self), encoding="utf-8")

    Trainer.fit = fit  # type: ignore[method-assign]


def digest(trainer: Trainer) -> str:
    """SHA-256 of the parameters, buffers and optimizer state that this process holds."""
    found = hashlib.sha256()
    held: list[Any] = [trainer.parts.model.state_dict(), trainer.parts.optimizer.state_dict()]
    while held:
        value = held.pop()
        if isinstance(value, Tensor):
            local = value.detach().contiguous().reshape(-1)
            found.update(local.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            held += [value[key] for key in sorted(value, key=str)]
        elif isinstance(value, list | tuple):
            held += value
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


def carry_out(words: Sequence[str]) -> int:
    """Carry a command out with what is planted."""
    plant()
    return main(list(words))


def call(function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Save what a function returns in a gloo group, as `result-RANK.pt`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        result = function(*arguments)
        torch.save(result, f"result-{os.environ['RANK']}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    plant()
    sys.exit(main())
