"""The configurations of a comparison: the baseline's in full, for the others the differences.

They may come from other people's folders. A configuration that is nested more deeply, or has more
fields, than any of mprun's is reported as unreadable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from mprun.compare.comparison import Comparison
from mprun.records.run_config import UnreadableConfigError, read_config, yaml_text
from mprun.report.cells import plain

DEEPEST = 12
MOST_FIELDS = 2000
NOT_COMPARED = ("seed", "run.", "logger.")
"""Fields that differ between runs of one variant."""


class FieldChange(NamedTuple):
    """A field with another value than the baseline's."""

    field: str
    baseline: str
    value: str


class VariantConfig(NamedTuple):
    """A variant's configuration: the text of the baseline's, else the changes."""

    label: str
    path: str = ""
    text: str = ""
    changes: tuple[FieldChange, ...] = ()
    problem: str = ""
    """Why it cannot be shown, or nothing."""


def configs(comparison: Comparison) -> list[VariantConfig]:
    """One for each variant: the configuration of its first run."""
    configs = []
    base: dict[str, str] | None = None
    for index, variant in enumerate(comparison.variants):
        config = VariantConfig(plain(variant.label))
        if not variant.runs:
            configs.append(config._replace(problem="no run of it completed"))
            continue
        run = variant.runs[0].path
        config = config._replace(path=plain(str(run / "config.yaml")))
        try:
            text, content = read_config(run)
            fields = dict(_fields(content))
        except UnreadableConfigError as error:
            configs.append(config._replace(problem=str(error)))
            continue
        if index > 0 and base is not None:
            config = config._replace(changes=tuple(_changes(base, fields)))
        else:
            config = config._replace(text="\n".join(map(_printable, text.splitlines())))
        if index == 0:
            base = fields
        configs.append(config)
    return configs


def _printable(line: str) -> str:
    indent = len(line) - len(line.lstrip(" "))
    return " " * indent + plain(line)


def _fields(config: Any) -> Iterator[tuple[str, str]]:
    """Dotted names and values, in order.

    Raises:
        UnreadableConfigError: it is not a mapping, or anchors make it endless.
    """
    if not isinstance(config, dict):
        raise UnreadableConfigError("it is not a mapping")
    for count, field in enumerate(_walk(config, "", 0)):
        if count >= MOST_FIELDS:
            raise UnreadableConfigError(f"it has more than {MOST_FIELDS} fields")
        yield field


def _walk(value: Any, name: str, depth: int) -> Iterator[tuple[str, str]]:
    if depth > DEEPEST:
        raise UnreadableConfigError(f"it is nested more than {DEEPEST} deep")
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _walk(part, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, list) and value:
        for place, part in enumerate(value):
            yield from _walk(part, f"{name}[{place}]", depth + 1)
    else:
        yield plain(name, 120), plain(yaml_text(value), 200)


def _changes(base: dict[str, str], other: dict[str, str]) -> Iterator[FieldChange]:
    for field in dict.fromkeys((*base, *other)):
        before, after = base.get(field, ""), other.get(field, "")
        if before != after and not field.startswith(NOT_COMPARED):
            yield FieldChange(field, before, after)
