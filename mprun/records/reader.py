"""Reading files: the one place where mprun opens a file that somebody else may have written.

Files come from anyone's disk: they may be cut off, edited by hand, written by another version, or
no file at all. A pipe waits for ever for a writer, and a device such as /dev/zero never ends. So
only regular files are opened, and none is read beyond a size that no file of its kind has.

JSON is checked against the types of this package. Unknown fields are ignored, since later versions
add some. Fields with a default may be missing, since earlier versions did not write them.
Everything else must be there, with its type.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from mprun.errors import UsageError

T = TypeVar("T")

LARGEST = 1e100
"""No figure of a run is near it. Above 1e154 a square is infinite in float64."""
LARGEST_JSON_BYTES = 256 * 2**20
LARGEST_LINE_BYTES = 2**20
"""Of metrics.jsonl, whose lines have about 200 bytes; the file may be of any length."""


# ---- bytes ---------------------------------------------------------------------------------------


def open_regular(path: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file for reading, also through a link.

    Args:
        path: the file.
        most_bytes: a larger file is refused; None for any size.

    Raises:
        OSError: it cannot be opened, is no regular file, or is too large; `strerror` has the
            reason.
    """
    descriptor = os.open(os.fspath(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if most_bytes is not None and status.st_size > most_bytes:
            raise OSError(errno.EINVAL, f"it is larger than {_size(most_bytes)}", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as `open_regular` does.
    """
    with open_regular(path, most_bytes) as file:
        return file.read(most_bytes)


def _size(number: int) -> str:
    return f"{number // 2**20} MiB" if number >= 2**20 else f"{number // 1024} KiB"


# ---- JSON ----------------------------------------------------------------------------------------


class _Version(msgspec.Struct):
    schema_version: int


def read_json(path: Path, kind: type[T], newest: int) -> T:
    """The content of a JSON file as a dataclass.

    Args:
        path: the file.
        kind: the dataclass.
        newest: the latest `schema_version` that can be read.

    Raises:
        FileNotFoundError: there is no file.
        UsageError: it cannot be read, is damaged, or a later version of mprun wrote it.
    """
    try:
        data = read_bytes(path, LARGEST_JSON_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    version = _decoded(path, data, _Version).schema_version
    if version > newest:
        raise UsageError(f"{path} has schema_version {version}, this mprun reads up to {newest}")
    return _in_range(path, _decoded(path, data, kind))


def read_json_lines(path: Path, having: bytes = b"") -> Iterator[dict[str, Any]]:
    """The lines of a file of JSON objects, one after the other.

    A last line without a line feed is left out: a crash cut it short.

    Args:
        path: the file.
        having: only lines with these bytes are parsed; parsing takes most of the time.

    Raises:
        FileNotFoundError: there is no file.
        UsageError: it cannot be read, or a line is damaged.
    """
    try:
        with open_regular(path) as file:
            number = 1
            while (line := file.readline(LARGEST_LINE_BYTES)).endswith(b"\n"):
                if having in line:
                    yield _decoded(path, line, dict[str, Any], f"line {number}: ")
                number += 1
            if len(line) == LARGEST_LINE_BYTES:
                size = _size(LARGEST_LINE_BYTES)
                raise UsageError(f"{path} is damaged: line {number} is longer than {size}")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def converted(path: object, value: object, kind: type[T], place: str = "") -> T:
    """Plain values, for example of a checkpoint, as a type of this package.

    Args:
        path: the file.
        value: what was read.
        kind: the type it must have.
        place: where it stands in the file, as the beginning of a message.

    Raises:
        UsageError: it does not have that type.
    """
    try:
        return _in_range(path, msgspec.convert(value, kind), place)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is damaged: {place}{error}") from None
    except RecursionError:
        raise UsageError(f"{path} is damaged: {place}it is nested too deeply") from None


def _decoded(path: Path, data: bytes, kind: type[T], place: str = "") -> T:
    try:
        text = data.decode()  # msgspec does not look at the bytes of fields that it skips
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        reason = str(error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not place:
            raise UsageError(f"{path} is not valid JSON: {error}") from None
        reason = f"not valid JSON ({error})"
    except RecursionError:
        reason = "it is nested too deeply"
    raise UsageError(f"{path} is damaged: {place}{reason}")


def _in_range(path: object, value: T, place: str = "") -> T:
    if (name := _out_of_range(value)) is not None:
        raise UsageError(f"{path} is damaged: {place}{name} is out of range")
    return value


def _out_of_range(value: object, name: str = "") -> str | None:
    """The first figure inside `value` that is too large to compute with, or None."""
    if isinstance(value, int | float):
        return name if math.isfinite(value) and abs(value) > LARGEST else None
    items: list[tuple[str, object]] = []
    if is_dataclass(value):
        items = [(f"{name}.{f.name}".lstrip("."), getattr(value, f.name)) for f in fields(value)]
    elif isinstance(value, dict):
        items = [(f"{name}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    return next((x for key, item in items if (x := _out_of_range(item, key)) is not None), None)
