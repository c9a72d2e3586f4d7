"""The configurations behind a table: the baseline's whole, the others as what differs from it.

They come from other people's folders as well: a file is read as data (no YAML tags), up to a size,
and what is nested deeper than any configuration of mprun's is left as unreadable.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from mprun.compare.rows import Comparison
from mprun.report.cells import plain

LARGEST_BYTES = 256 * 1024
DEEPEST = 12
MOST_FIELDS = 2000
NOT_COMPARED = ("seed", "run.", "logger.")
"""Fields that differ between runs of one variant."""


class Change(NamedTuple):
    """A field that is not as the baseline's."""

    field: str
    baseline: str
    value: str


class Config(NamedTuple):
    """A variant's configuration: whole for the baseline, else as changes."""

    label: str
    path: str
    text: str
    changes: tuple[Change, ...]
    problem: str
    """Why it cannot be shown, or nothing."""


class _UnreadableError(Exception):
    pass


def configs(comparison: Comparison) -> list[Config]:
    """One for each variant: the configuration of its first run."""
    found: list[Config] = []
    base: dict[str, str] | None = None
    for index, variant in enumerate(comparison.variants):
        label = plain(variant.label)
        if not variant.runs:
            found.append(Config(label, "", "", (), "no run of it completed"))
            continue
        path = variant.runs[0].path / "config.yaml"
        try:
            text = _text(path)
            fields = dict(_fields(_parsed(text)))
        except _UnreadableError as error:
            found.append(Config(label, plain(str(path)), "", (), str(error)))
            continue
        if index == 0:
            base = fields
            found.append(Config(label, plain(str(path)), text, (), ""))
        elif base is None:
            found.append(Config(label, plain(str(path)), text, (), ""))
        else:
            found.append(Config(label, plain(str(path)), "", tuple(_changes(base, fields)), ""))
    return found


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise _UnreadableError(f"it is larger than {LARGEST_BYTES // 1024} KiB")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _UnreadableError(f"it cannot be read ({error.strerror})") from None
    except ValueError:
        raise _UnreadableError("it is no text") from None
    return "\n".join(c for c in map(_clean, text.splitlines()))


def _clean(line: str) -> str:
    indent = len(line) - len(line.lstrip(" "))
    return " " * indent + plain(line)


def _parsed(text: str) -> Any:
    try:
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _UnreadableError(f"it is no YAML ({plain(str(error), 80)})") from None


def _fields(config: Any) -> Iterator[tuple[str, str]]:
    """Dotted names and values, in order; a mapping that anchors make endless is refused."""
    if not isinstance(config, dict):
        raise _UnreadableError("it is no mapping")
    for count, field in enumerate(_walk(config, "", 0)):
        if count >= MOST_FIELDS:
            raise _UnreadableError(f"it has more than {MOST_FIELDS} fields")
        yield field


def _walk(value: Any, name: str, depth: int) -> Iterator[tuple[str, str]]:
    if depth > DEEPEST:
        raise _UnreadableError(f"it is nested more than {DEEPEST} deep")
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _walk(part, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, list) and value:
        for place, part in enumerate(value):
            yield from _walk(part, f"{name}[{place}]", depth + 1)
    else:
        yield plain(name, 120), _written(value)


def _written(value: Any) -> str:
    """A value as YAML has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else plain(str(value), 200)


def _changes(base: dict[str, str], other: dict[str, str]) -> Iterator[Change]:
    for field in dict.fromkeys((*base, *other)):
        before, after = base.get(field, ""), other.get(field, "")
        if before != after and not field.startswith(NOT_COMPARED):
            yield Change(field, before, after)
