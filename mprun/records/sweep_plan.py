"""The plan of a sweep, as `sweep.json` holds it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA_VERSION = 1


@dataclass(kw_only=True)
class SweepPlan:
    """The trials of a sweep."""

    schema_version: int
    command: str
    """The command that made it: sweep, advise or double."""
    variants: dict[str, list[str]]
    """Name to overrides."""
    seeds: list[int]
    of_trials: list[str]
    """Overrides of every trial."""
    config_dir: str | None
    not_tried: dict[str, str] = field(default_factory=dict)
    """Variants that are left out, to the reason."""
