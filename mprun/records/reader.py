"""Reading mprun's JSON files: every file is checked against the types of this package.

Files come from anyone's disk: they may be cut off, edited by hand, or written by another version.
Unknown fields are ignored, since later versions add some. Fields with a default may be missing,
since earlier versions did not write them. Everything else must be there, with its type.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from mprun.errors import UsageError

T = TypeVar("T")

LARGEST = 1e100
"""No figure of a run is near it. Above 1e154 a square is infinite in float64."""


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
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    version = _decoded(path, data, _Version).schema_version
    if version > newest:
        raise UsageError(f"{path} has schema_version {version}, this mprun reads up to {newest}")
    value = _decoded(path, data, kind)
    if (name := _out_of_range(value)) is not None:
        raise UsageError(f"{path} is damaged: {name} is out of range")
    return value


def _decoded(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"{path} is damaged: it is nested too deeply") from None


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
