"""Ranges of numbers, which stand in the types of the schema's fields: `Annotated[int, Meta(ge=1)]`.

A range is written once, beside the field. OmegaConf, which reads the types too, takes `int` alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from msgspec import Meta

from mprun.errors import UsageError

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Number = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]
"""Part of a whole that is not the whole."""
WorldSize = Annotated[int, Meta(ge=1, le=2**20)]


@dataclass(frozen=True)
class Range:
    """An interval that a number must lie in; infinities and NaN never do."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    @classmethod
    def of(cls, meta: Meta) -> Range:
        """That of a type."""
        low = meta.ge if meta.gt is None else meta.gt
        high = meta.le if meta.lt is None else meta.lt
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        return cls(low, high, meta.gt is not None, meta.lt is not None)

    def check(self, key: str, value: float | None) -> None:
        """Raise `UsageError` unless `value` lies inside or is None."""
        if value is None:
            return
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        if not (math.isfinite(value) and above and below):
            raise UsageError(f"{key}={value}: legal is {self}")

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.low_open else f"{self.low:g} or more"
        if self.high == math.inf:
            return low
        return f"{low} and {'below' if self.high_open else 'at most'} {self.high:.10g}"


@cache
def ranges(schema: type) -> dict[str, Range]:
    """Key to range of each field below a dataclass whose type has one."""
    found: dict[str, Range] = {}
    bare, annotated = get_type_hints(schema), get_type_hints(schema, include_extras=True)
    for item in fields(schema):
        kind = bare[item.name]
        if is_dataclass(kind):
            below = ranges(kind)  # type: ignore[arg-type]
            found |= {f"{item.name}.{key}": value for key, value in below.items()}
        elif (meta := _meta(annotated[item.name])) is not None:
            found[item.name] = Range.of(meta)
    return found


def _meta(kind: Any) -> Meta | None:
    """The `Meta` of a type, or of a member of a union such as `Count | None`."""
    for arg in (*getattr(kind, "__metadata__", ()), *map(_meta, get_args(kind))):
        if isinstance(arg, Meta):
            return arg
    return None
