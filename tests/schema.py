"""Checks that a record has every field of its type, and no other."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

import msgspec

from mprun.records.files import jsonable


def conforms(record: Any, kind: type) -> bool:
    """True where a record, or the JSON read of one, has the fields of `kind` with their types.

    Raises:
        msgspec.ValidationError: a value has another type, or a field without default is missing.
        AssertionError: a field is unknown, or one with a default is missing.
    """
    plain = jsonable(asdict(record) if is_dataclass(record) else record)  # type: ignore[arg-type]
    assert jsonable(asdict(msgspec.convert(plain, kind))) == plain
    return True
