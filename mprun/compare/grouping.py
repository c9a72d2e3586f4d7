"""Runs by variant, each variant with a label.

A label is that of the runs. If two variants have the same, the fields that differ are added:
`bf16_mixed` trained with two learning rates becomes `bf16_mixed (train.lr=0.001)` and `bf16_mixed
(train.lr=0.002)`. Only then are configurations read, one for each of those variants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mprun.compare.comparison import Run
from mprun.compare.formatting import readable
from mprun.compare.measures import RunGroup, has_result
from mprun.records.run_config import UnreadableConfigError, read_config, variant_config, yaml_text

MOST_FIELDS = 3
"""How many fields a label names."""

LONGEST_VALUE = 24


def by_variant(runs: Sequence[Run]) -> list[RunGroup]:
    """Runs by variant, in the order of each variant's first run."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.summary.variant_hash, run.summary.execution), []).append(run)
    members = [sorted(group, key=lambda run: run.summary.seed) for group in groups.values()]
    several = len({run.summary.recipe for run in runs}) > 1
    labels = distinguish(
        [_name(group[0], several) for group in members],
        [group[0].summary.execution for group in members],
        [group[0].path for group in members],
    )
    return [
        RunGroup(
            label,
            tuple(run for run in group if has_result(run.summary)),
            tuple(run for run in group if not has_result(run.summary)),
        )
        for label, group in zip(labels, members, strict=True)
    ]


def _name(run: Run, several_recipes: bool) -> str:
    label = readable(run.summary.variant, 60)
    return f"{readable(run.summary.recipe, 60)} {label}" if several_recipes else label


def distinguish(
    names: Sequence[str], executions: Sequence[str], folders: Sequence[Path]
) -> list[str]:
    """A label for each variant, no two alike.

    Args:
        names: what the variants' runs are called.
        executions: native or emulated, for each.
        folders: a run's folder for each; its config.yaml is read if names are equal.
    """
    labels = list(names)
    for name in {x for x in names if names.count(x) > 1}:
        equal = [i for i, x in enumerate(names) if x == name]
        details = _differing([_fields(folders[i], executions[i]) for i in equal])
        for i, detail in zip(equal, details, strict=True):
            labels[i] = f"{name} ({detail})" if detail else name
    taken: set[str] = set()
    for i, label in enumerate(labels):
        number = 1
        while labels[i] in taken:  # its configuration cannot be read, or differs in more fields
            number += 1
            labels[i] = f"{label} #{number}"
        taken.add(labels[i])
    return labels


def _fields(folder: Path, execution: str) -> dict[str, str]:
    """The run's execution and the fields of its configuration that make a variant."""
    try:
        config = variant_config(read_config(folder)[1])
    except (UnreadableConfigError, ValueError, TypeError, AttributeError, RecursionError):
        config = {}  # a number makes the label unique
    return {**_flat(config), "execution": execution}  # the file may say "auto"


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    fields = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            fields.update(_flat(value, f"{prefix}{key}."))
        else:
            fields[f"{prefix}{key}"] = yaml_text(value)
    return fields


def _differing(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """`train.lr=0.002, batch.factor=2` for each row: the fields that are not the same in all."""
    keys = dict.fromkeys(key for row in rows for key in row)
    differing = [key for key in keys if len({row.get(key) for row in rows}) > 1]
    more = f", {len(differing) - MOST_FIELDS} more" if len(differing) > MOST_FIELDS else ""
    return [
        ", ".join(
            f"{k}={readable(row[k], LONGEST_VALUE)}" for k in differing[:MOST_FIELDS] if k in row
        )
        + more
        for row in rows
    ]
