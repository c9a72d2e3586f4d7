"""Checkpoints: the state of a run between two steps, in one file.

A file is written whole or not at all (a temporary file, synced, then renamed). Reading someone
else's file runs no code (`load_torch_file`). The fields that decide how the run is assembled are
checked first (`SavedRun`); the assembled run's parts take the rest, or report that it does not fit.
"""

from __future__ import annotations

import contextlib
import io
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mprun.errors import MprunError, UsageError, first_line
from mprun.precision import devices
from mprun.precision.nested import map_tensors
from mprun.records.files import write_atomic
from mprun.records.reader import check_archive, converted
from mprun.records.run_record import SavedRun, Summary
from mprun.train.callbacks import Callback
from mprun.train.clock import Distribution, warmup_steps
from mprun.train.data.random_numbers import seed_all
from mprun.train.parallel.ranks import Ranks

FORMAT_VERSION = 1  # Of `last.pt`; a later one is refused, earlier ones are read
NAME = "last.pt"
# The keys that a resumed run needs. `journal` is the recorder's state.
PARTS = ("choices", "trainer", "journal")


# `weights_only` runs no code, but does not bound the work: a byte of a pickle makes an object of
# 200. A tensor takes about 150; a checkpoint of a model with 1,000 parameters half a million.
MAX_PICKLE_BYTES = 2**23
MAX_REPEATED_BYTES = 2**28  # An expanded tensor stores a value once; copying it stores all


class NotTensorsError(ValueError):
    """The file is no collection of tensors and plain values; the text is the reason."""


def load_torch_file(path: Path) -> Any:
    """The content of a file of `torch.save`, on the CPU.

    Raises:
        OSError: it cannot be read.
        DamagedArchiveError: it is no whole archive.
        NotTensorsError: it contains anything but tensors and plain values, or would become much
            larger in memory than it is.
        Exception: of any other kind, for a damaged file.
    """
    check_archive(path)  # the sizes in the zip, before anything is made of its content
    _check_pickles(path)
    with warnings.catch_warnings():  # of an archive of TorchScript, which it refuses
        warnings.simplefilter("ignore")
        content = torch.load(path, map_location="cpu", weights_only=True)
    _check_sizes(content)
    return content


def _check_pickles(path: Path) -> None:
    """Refuse pickles that are large, or that name the one function that makes large objects."""
    with zipfile.ZipFile(path) as archive:
        entries = [x for x in archive.infolist() if x.filename.endswith(".pkl")]
        content = b"".join(archive.read(entry) for entry in entries)
    if len(content) > MAX_PICKLE_BYTES:
        raise NotTensorsError(f"it has more than {MAX_PICKLE_BYTES:,} bytes beside its tensors")
    if b"bytearray" in content:  # allowed by `weights_only`, and `bytearray(n)` has any size
        raise NotTensorsError("it contains a bytearray")


def _check_sizes(content: Any) -> None:
    """Refuse tensors that stand for many more values than the file has."""
    seen: set[int] = set()
    repeated_bytes = 0
    waiting = [content]  # no recursion: the nesting may be deeper than Python's stack
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            strided = value.layout == torch.strided and not value.is_meta
            if strided:
                repeated_bytes += max(0, value.nbytes - value.untyped_storage().nbytes())
            if repeated_bytes > MAX_REPEATED_BYTES:
                raise NotTensorsError("tensors in it repeat few values many times")
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:  # it may hold itself
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value


class CheckpointMisfitError(UsageError):
    """A checkpoint does not fit the run that it was read for; the run's record is as it was."""


def path_in(run: Path) -> Path:
    """The path of a run's last checkpoint."""
    return run / "checkpoints" / NAME


def serialized(state: dict[str, Any]) -> bytes:
    """The content of a checkpoint's file: tensors, on the CPU, and plain values."""
    buffer = io.BytesIO()
    on_host = map_tensors(Tensor.cpu, state)  # as it may be resumed where that device is not
    torch.save({"format_version": FORMAT_VERSION, **on_host}, buffer)
    return buffer.getvalue()


def load(run: Path) -> dict[str, Any] | None:
    """The last checkpoint of `run`, on the CPU; None if none was written yet.

    Raises:
        UsageError: the file is damaged, or a later version of mprun wrote it.
    """
    path = path_in(run)
    if not path.exists():
        return None
    try:
        state = checked(load_torch_file(path), path)
    except MprunError:
        raise
    except Exception as error:  # unpickling a damaged file raises almost anything
        raise _no_checkpoint(path, error) from None
    known = converted(path, state, SavedRun)
    # each is right alone, and lines of the record would be lost or doubled
    if known.trainer.step != known.journal.steps:
        raise UsageError(
            f"{path} is damaged: trainer.step is {known.trainer.step}, and journal.steps is "
            f"{known.journal.steps}"
        )
    return state


def checked(content: Any, path: Path) -> dict[str, Any]:
    """The content of the file `path` as a checkpoint that a run can be resumed from.

    Raises:
        UsageError: it is no such checkpoint, or a later version of mprun wrote it.
    """
    try:
        state: dict[str, Any] = dict(content)
        later = state["format_version"] > FORMAT_VERSION
        missing = [] if later else [key for key in PARTS if key not in state]
    except Exception as error:  # the content can be of any type
        raise _no_checkpoint(path, error) from None
    if later:
        version = state["format_version"]
        raise UsageError(f"{path} has format {version}, this mprun reads up to {FORMAT_VERSION}")
    if missing:
        raise UsageError(f"{path} is not a checkpoint of mprun (it lacks {', '.join(missing)})")
    if "shards" in state:
        raise UsageError(
            f"{path}: an earlier mprun wrote this checkpoint of parallel=fsdp2 in shards, which "
            "this one does not read; legal is a checkpoint in one file: resume or export the run "
            "with the version that its summary.json names"
        )
    return state


def _no_checkpoint(path: Path, error: Exception) -> UsageError:
    reason = first_line(error) if str(error).strip() else type(error).__name__
    return UsageError(f"{path} is not a checkpoint of mprun ({reason})")


@contextlib.contextmanager
def restoring(run: Path) -> Iterator[None]:
    """Inside, the last checkpoint of `run` is loaded into the assembled run.

    Raises:
        CheckpointMisfitError: it does not fit.
    """
    try:
        yield
    except Exception as error:  # its content can be of any type
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = f"{kind}{' '.join(str(error).split())}"[:300]
        if isinstance(error, KeyError):
            reason = f"it lacks {error}"
        raise CheckpointMisfitError(f"{path_in(run)} does not fit this run: {reason}") from None


class Stateful(Protocol):
    """An object whose state is part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""


class Checkpointer(Callback):
    """Saves the state that the loop emits, with the states of `parts` and some facts beside it."""

    def __init__(self, run: Path, parts: Mapping[str, Stateful], facts: Mapping[str, Any]) -> None:
        self._run, self._parts, self._facts = run, parts, facts

    def on_checkpoint(self, state: dict[str, Any]) -> None:
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        write_atomic(path_in(self._run), serialized({"trainer": state, **parts, **self._facts}))


def run_facts(summary: Summary) -> dict[str, Any]:
    """The values of a summary that identify the run a checkpoint is from."""
    keys = ("recipe", "seed", "precision", "effective", "variant_hash", "mprun_version")
    return {key: value for key, value in asdict(summary).items() if key in keys}


def saved_random_numbers(ranks: Ranks) -> dict[str, Any]:
    """The states of the first process, as one process saves them, and of all as `processes`."""
    own = {
        "rng": torch.get_rng_state(),
        "host_rng": devices.host_random_states(),
        "device_rng": devices.random_states(devices.in_use()),
    }
    if ranks.size == 1:
        return own
    processes = ranks.gather(own)
    return {**processes[0], "processes": processes}


def restore_random_numbers(state: dict[str, Any], ranks: Ranks) -> None:
    """Continue the random numbers of this process."""
    own = state
    if ranks.rank:
        saved = state.get("processes", [])  # a run of one process has none
        if ranks.rank >= len(saved):  # a new process: begins from the first one's next number
            torch.set_rng_state(state["rng"])
            seed_process(int(torch.randint(2**31, ())), ranks)
            return
        own = saved[ranks.rank]
    torch.set_rng_state(own["rng"])
    devices.restore_host_random_states(own["host_rng"])
    devices.restore_random_states(own["device_rng"])


def seed_process(seed: int, ranks: Ranks) -> None:
    """Give each process but the first random numbers of its own: dropout drops other units."""
    if ranks.rank:
        # 2^32 / golden ratio: far from the seeds of other runs, which are 0, 1, 2, ...
        seed_all((seed + 0x9E3779B9 * ranks.rank) % 2**32)


class ProcessTimes:
    """The step times of each process, without what it waited for the others."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own, self._waits, self._steps = Distribution(), Distribution(), Distribution()
        self._seen = 0

    def add(self, step_s: float, waited_s: float) -> None:
        """One step: its seconds, and those of communication in it."""
        if self._ranks.size == 1:
            return
        self._seen += 1
        if self._seen > warmup_steps(self._seen):  # the same steps as in the record's step times
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
        waits = waits if self._ranks.sees_waits else None
        every = [ms for ms in self._ranks.gather(own) if ms is not None]
        return {
            "process_times": {
                "slowest_ms": max(every) if every else None,
                "fastest_ms": min(every) if every else None,
                "communication_share": waits / steps if waits is not None and steps else None,
            }
        }
