"""Whether a value read from JSON has the shape of a TypedDict: summaries come from anyone's disk.

Fields that are not known are left alone: later versions of mprun may add some. A type is turned
into a function once, since hundreds of summaries are checked for one table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

Check = Callable[[Any], "str | None"]
"""From a value to its first defect, `data.train_samples is missing`, or None."""

LARGEST = 1e100
"""No figure of a run comes near; beyond, its square would be infinite (NaN is not below it)."""


def defect(value: Any, kind: Any) -> str | None:
    """What is wrong with `value` as a `kind`, for example "seed is 'x'"; None where nothing is."""
    found = _check(kind)(value)
    return found and found.lstrip(". ")


@cache
def _check(kind: Any) -> Check:
    origin, parts = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        fields = {k: _check(v) for k, v in get_type_hints(kind).items()}
        return _of_fields(fields, kind.__required_keys__)
    if origin in (Union, UnionType):
        return _of_any([_check(part) for part in parts])
    if origin is list:
        return _of_items(list, _check(parts[0]))
    if origin is dict:
        return _of_items(dict, _check(parts[1]))
    if origin is Literal:
        return _if(lambda value: isinstance(value, str) and value in parts)
    if kind in (int, float):
        kinds = (int, float) if kind is float else (int,)  # a boolean is neither
        return _if(lambda value: type(value) in kinds and abs(value) < LARGEST)
    assert kind in (bool, str, NoneType), f"{kind} is no type of JSON"
    return _if(lambda value: type(value) is kind)


def _if(holds: Callable[[Any], bool]) -> Check:
    return lambda value: None if holds(value) else f" is {str(value)[:40]!r}"


def _of_any(checks: list[Check]) -> Check:
    def check(value: Any) -> str | None:
        found = None
        for one in checks:
            found = one(value)
            if found is None:
                return None
        return found

    return check


def _of_fields(checks: dict[str, Check], required: Collection[str]) -> Check:
    def check(value: Any) -> str | None:
        if type(value) is not dict:
            return f" is {str(value)[:40]!r}"
        for key, one in checks.items():
            if key not in value:
                if key in required:
                    return f".{key} is missing"
                continue
            found = one(value[key])
            if found is not None:
                return f".{key}{found}"
        return None

    return check


def _of_items(container: type[list[Any]] | type[dict[str, Any]], one: Check) -> Check:
    def check(value: Any) -> str | None:
        if type(value) is not container:
            return f" is {str(value)[:40]!r}"
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found = one(item)
            if found is not None:
                return f".{key}{found}"
        return None

    return check
