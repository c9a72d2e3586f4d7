"""What a variant is called: its runs' own label, and where labels meet, what sets them apart.

`bf16_mixed` trained with two learning rates becomes `bf16_mixed (train.lr=0.001)` and `bf16_mixed
(train.lr=0.002)`. Only then are configurations read, one for each of those variants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mprun.compare.load import readable
from mprun.records.run_config import UnreadableConfigError, read_config
from mprun.records.variant_hash import variant_config

MOST_FIELDS = 3
"""How many fields a label names."""

LONGEST_VALUE = 24


def distinguish(
    names: Sequence[str], executions: Sequence[str], folders: Sequence[Path]
) -> list[str]:
    """A label for each variant, no two alike.

    Args:
        names: what the variants' runs are called.
        executions: native or emulated, for each.
        folders: a run's folder for each, whose config.yaml is read where names meet.
    """
    labels = list(names)
    for name in {x for x in names if names.count(x) > 1}:
        meeting = [i for i, x in enumerate(names) if x == name]
        details = _differing([_fields(folders[i], executions[i]) for i in meeting])
        for i, detail in zip(meeting, details, strict=True):
            labels[i] = f"{name} ({detail})" if detail else name
    taken: set[str] = set()
    for i, label in enumerate(labels):
        number = 1
        while labels[i] in taken:  # no configuration to be read, or too much in it
            number += 1
            labels[i] = f"{label} #{number}"
        taken.add(labels[i])
    return labels


def _fields(folder: Path, execution: str) -> dict[str, str]:
    """The run's execution and the fields of its configuration that make a variant."""
    try:
        config = variant_config(read_config(folder)[1])
    except (UnreadableConfigError, ValueError, TypeError, AttributeError, RecursionError):
        config = {}  # the record is whole without it, and the label can do without, too
    return {**_flat(config), "execution": execution}  # which "auto" in the file does not tell


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = _written(value)
    return found


def _written(value: Any) -> str:
    """A value as a user would type it."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _differing(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """`train.lr=0.002, batch.factor=2` for each row: the fields that are not the same in all."""
    keys = dict.fromkeys(key for row in rows for key in row)
    told = [key for key in keys if len({row.get(key) for row in rows}) > 1]
    more = f", {len(told) - MOST_FIELDS} more" if len(told) > MOST_FIELDS else ""
    return [
        ", ".join(f"{k}={readable(row[k], LONGEST_VALUE)}" for k in told[:MOST_FIELDS] if k in row)
        + more
        for row in rows
    ]
