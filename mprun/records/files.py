"""Writing files and making folders. No torch.

Files are replaced whole: written under a temporary name, synced, renamed. A reader, or a crash,
sees the old content or the new one, never a part of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from mprun.errors import UsageError


def jsonable(value: Any) -> Any:
    """`value` with the floats JSON cannot write as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {k: jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return value


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace `path` by `content` as JSON text.

    Raises:
        OSError: as `write_atomic` does.
    """
    text = json.dumps(jsonable(content), indent=1, allow_nan=False)
    write_atomic(path, f"{text}\n".encode())


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: a temporary file beside it, synced, then renamed.

    Raises:
        OSError: the disk is full or the folder cannot be written; `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def dated_folder() -> Path:
    """Make a folder under outputs/, named by date and time, that belongs to this process alone.

    Every name that mprun chooses itself comes from here. `mkdir` fails where the name exists, in
    one step of the file system: of processes that begin in the same second each gets a folder of
    its own, the later ones with -2, -3, ... at the end.

    Raises:
        UsageError: it cannot be made.
    """
    now = datetime.now()
    day, clock = Path("outputs") / now.strftime("%Y-%m-%d"), now.strftime("%H-%M-%S")
    for n in itertools.count(1):
        folder = day / (clock if n == 1 else f"{clock}-{n}")
        try:
            day.mkdir(parents=True, exist_ok=True)
            if _is_made(folder):
                return folder
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be made ({error.strerror}); start mprun in a folder that can be "
                "written"
            ) from None
    raise AssertionError("counting does not end")


def _is_made(folder: Path) -> bool:
    """Make `folder`; False where the name is taken, or its parent was removed just now."""
    try:
        folder.mkdir()
    except (FileExistsError, FileNotFoundError):
        return False
    return True


@contextlib.contextmanager
def dated_folder_if_used() -> Iterator[Path]:
    """A folder from `dated_folder`, removed at the end if nothing was put into it."""
    folder = dated_folder()
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # one that holds something stays
            for path in (folder, *list(folder.parents)[:2]):
                path.rmdir()


def new_folder(wanted: str | None) -> Path:
    """The folder `run.dir` names, or one with the date, made; for commands that leave no run.

    Raises:
        UsageError: it cannot be written, or holds something already.
    """
    if wanted is None:
        return dated_folder()
    folder = Path(wanted)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = next(folder.iterdir(), None)
    except OSError as error:
        raise UsageError(f"run.dir={folder} cannot be written ({error.strerror})") from None
    if taken is not None:
        raise UsageError(f"run.dir={folder} holds {taken.name} already; choose another folder")
    return folder
