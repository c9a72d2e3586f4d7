"""Writing files and making folders, and which process does it. No torch.

A file is replaced as a whole, so readers see the old content or the new one, never a part of it,
even after a crash. Of the processes that torchrun starts together the first one keeps the record
(`Launch`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from mprun.errors import RunFailedError, UsageError


def jsonable(value: Any) -> Any:
    """`value` with the floats JSON cannot write as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {k: jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return value


def json_text(record: object) -> str:
    """A dataclass of finite floats as indented JSON text, many times faster than Python's."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1).decode()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace `path` by `content` as JSON text; raises as `write_atomic` does."""
    text = json.dumps(jsonable(content), indent=1, allow_nan=False)
    write_atomic(path, f"{text}\n".encode())


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: a temporary file beside it, synced, then renamed.

    A link at `path` is replaced, not followed. Where the disk is full or the folder cannot be
    written, `path` is unchanged and an `OSError` raised.
    """
    draft = _draft(path, data)
    try:
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _draft(path: Path, data: bytes) -> Path:
    """Write `data`, synced, to a file beside `path` that has the name `.NAME.*.tmp`."""
    # a name that cannot be guessed, of no file that exists: a link laid there would lead elsewhere
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    file = draft.open("xb")
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else a power failure may leave the new name of an empty file
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft


def write_new(path: Path, data: bytes) -> None:
    """As `write_atomic`, or `FileExistsError`: of processes that begin at once, one wins."""
    draft = _draft(path, data)
    try:
        os.link(draft, path)  # unlike a rename it fails if there is such a file
    finally:
        draft.unlink()


def remove_leftovers(folder: Path, age_s: float = 0.0) -> None:
    """Remove temporary files of processes that were killed while they wrote.

    Those younger than `age_s` are left alone: another process may write them now.
    """
    newest = time.time() - age_s
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if not age_s or path.lstat().st_mtime < newest:
                path.unlink()


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Raise `UsageError` if one of these names in a folder, maybe another person's, is a link.

    The folder may be a link itself, since the user named it. Names that do not exist are ignored.
    """
    for path in (folder / name for name in names):
        if path.is_symlink():
            raise UsageError(
                f"{path} is a link, and a record is not read or written through links: they may "
                "lead out of its folder; put what it leads to in its place"
            )


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> list[str]:
    """Write the files of a command's result into a folder; their names, such as `part/a.txt`.

    Raises `RunFailedError` if one cannot be written; those before it are whole.
    """
    for name, content in files.items():
        # replace: names of files may have bytes that are no UTF-8
        data = content.encode(errors="replace") if isinstance(content, str) else content
        try:
            (folder / name).parent.mkdir(exist_ok=True)
            write_atomic(folder / name, data)
        except OSError as error:
            raise RunFailedError(
                f"{folder / name} cannot be written ({error.strerror}); make room, or name another "
                "folder with run.dir=FOLDER, and run the command again"
            ) from None
    return list(files)


def dated_folder() -> Path:
    """Make a folder under outputs/, named by date and time, that belongs to this process alone.

    Of processes that begin in the same second the later ones get names that end in -2, -3, ...
    Raises `UsageError` if it cannot be made.
    """
    now = datetime.now()
    day, clock = Path("outputs") / now.strftime("%Y-%m-%d"), now.strftime("%H-%M-%S")
    for n in itertools.count(1):
        folder = day / (clock if n == 1 else f"{clock}-{n}")
        try:
            day.mkdir(parents=True, exist_ok=True)
            # mkdir fails if the name exists, in one step; or if the parent was removed meanwhile
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                folder.mkdir()
                return folder
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be made ({error.strerror}); start mprun in a writable folder"
            ) from None
    raise AssertionError("counting does not end")


@contextlib.contextmanager
def dated_folder_if_used() -> Iterator[Path]:
    """A folder from `dated_folder`, removed at the end if nothing was put into it."""
    folder = dated_folder()
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # a folder with files stays
            for path in (folder, *list(folder.parents)[:2]):
                path.rmdir()


def new_folder(wanted: str | None) -> Path:
    """Make the folder of `run.dir`, empty or new, or a dated one, for commands without a run."""
    if wanted is None:
        return dated_folder()
    folder = Path(wanted)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = next(folder.iterdir(), None)
    except OSError as error:
        raise UsageError(f"run.dir={folder} cannot be written ({error.strerror})") from None
    if taken is not None:
        raise UsageError(f"run.dir={folder} already contains {taken.name}; choose another folder")
    return folder


# ---- which process writes ------------------------------------------------------------------------

# What torch.distributed reads; torchrun sets all of them
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """One process among those that were started together."""

    rank: int = 0  # The process's number; the first process, 0, keeps the record
    world_size: int = 1  # How many processes there are, on all machines
    local_rank: int = 0  # Its number on its machine: the GPU that it uses
    restarts: int = 0  # How often torchrun has started all processes again after a failure


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
