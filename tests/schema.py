"""Checks values read from JSON against the TypedDicts of `mprun.records.run_record`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict


def conforms(value: Any, kind: Any) -> bool:
    """True where `value` is a `kind`: every key there, none unknown, every type right.

    Raises:
        AssertionError: it is not; the message has a line per defect, with its path.
    """
    defects = list(_defects(value, kind, "$"))
    if defects:
        raise AssertionError("\n".join(defects))
    return True


def _defects(value: Any, kind: Any, path: str) -> Iterator[str]:
    origin, parts = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        yield from _fields(value, get_type_hints(kind), path)
    elif origin in (Union, UnionType):
        if all(any(_defects(value, part, path)) for part in parts):
            yield f"{path}: {value!r} is none of {kind}"
    elif origin is list and isinstance(value, list):
        for i, item in enumerate(value):
            yield from _defects(item, parts[0], f"{path}[{i}]")
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from _defects(item, parts[1], f"{path}.{key}")
    elif not (value in parts if origin is Literal else _is_scalar(value, kind)):
        yield f"{path}: {value!r} is no {kind}"


def _fields(value: Any, kinds: dict[str, Any], path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path}: {value!r} is no object"
        return
    yield from (f"{path}.{key}: missing" for key in kinds.keys() - value.keys())
    yield from (f"{path}.{key}: unknown" for key in value.keys() - kinds.keys())
    for key in kinds.keys() & value.keys():
        yield from _defects(value[key], kinds[key], f"{path}.{key}")


def _is_scalar(value: Any, kind: Any) -> bool:
    """JSON's types, where a whole number is a float too, but a boolean is no number."""
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return kind in (bool, int, str, NoneType) and type(value) is kind
