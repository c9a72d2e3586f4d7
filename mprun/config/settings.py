"""What the commands around runs are told: `compare.margin=0.01`, `seeds=5`.

Not part of a run's configuration: a run is the same whoever started it, and its variant must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.config.compose import parse
from mprun.config.reference import Field, walk
from mprun.config.validate import COUNT, NOT_NEGATIVE, POSITIVE, Range
from mprun.errors import UsageError, hint


class FailIf(Enum):
    """Which verdict on any variant makes `mprun compare` end with status 3."""

    none = "none"
    worse = "worse"
    not_equivalent = "not_equivalent"


class Split(Enum):
    """Which samples a metric is of; auto: test, else validation, else training."""

    auto = "auto"
    test = "test"
    validation = "validation"
    train = "train"


class Mix(Enum):
    """What runs of one comparison may differ in besides the variant."""

    recipes = "recipes"
    data = "data"
    hardware = "hardware"
    code = "code"


@dataclass
class CompareSettings:
    """How runs are compared."""

    margin: float = 0.005
    """Differences of accuracy inside plus and minus this do not matter (0.005 is half a point)."""
    relative_margin: float = 0.02
    """The same for losses, as a share of the baseline's."""
    baseline: str | None = None
    """Label of the variant the others are set against; null for fp32."""
    split: Split = Split.auto
    """Which samples the metric is of: auto, test, validation or train."""
    mix: list[Mix] = field(default_factory=list)
    """What may differ between runs: [recipes, data, hardware, code]; by default nothing."""
    fail_if: FailIf = FailIf.none
    """End with status 3 where a variant is worse, or not shown to be equivalent or better."""
    dir: str | None = None
    """Folder of report.html and the rest; null: the folder compared, or the current one."""
    report: bool = True
    """Whether files are written, or the table is only printed."""


@dataclass
class SearchOpsSettings:
    """How ops that must stay in float32 are searched, and what is tolerated of the others."""

    tolerance: float = 0.01
    """Relative difference of the loss from float32's that is tolerated."""
    gradient_db: float | None = 20.0
    """Least SQNR of any parameter's gradient against float32's, in dB; null: the loss alone."""
    batches: int = 4
    """Batches of validation data that are measured on."""
    warmup_steps: int = 20
    """Steps trained in float32 before; 0 measures the weights as they begin."""
    always: list[str] = field(default_factory=list)
    """Ops that stay in float32 whatever is measured: [softmax, log]."""
    modules: bool = True
    """Whether modules are measured, and suggested where they are the better answer."""
    timed_steps: int = 10
    """Forward and backward passes timed of each op and module, in turn; 0 for no times."""
    steps: int = 100
    """Optimizer steps of each training of the proof; 0 for no proof."""
    margin: float = 0.005
    """Differences of the proof's accuracies inside plus and minus this do not matter."""
    relative_margin: float = 0.02
    """The same for losses, as a share of float32's."""


@dataclass
class Settings:
    """Everything that is said to a command and not to a run."""

    compare: CompareSettings = field(default_factory=CompareSettings)
    """How runs are compared."""
    search_ops: SearchOpsSettings = field(default_factory=SearchOpsSettings)
    """How ops that must stay in float32 are searched."""
    seeds: int = 5
    """Runs of each variant: seeds 0, 1, ... below this."""


RANGES = {
    "compare.margin": POSITIVE,
    "compare.relative_margin": POSITIVE,
    "search_ops.tolerance": POSITIVE,
    "search_ops.gradient_db": Range(-1000, 1000),
    "search_ops.batches": COUNT,
    "search_ops.warmup_steps": NOT_NEGATIVE,
    "search_ops.timed_steps": NOT_NEGATIVE,
    "search_ops.steps": NOT_NEGATIVE,
    "search_ops.margin": POSITIVE,
    "search_ops.relative_margin": POSITIVE,
    "seeds": COUNT,
}


def fields(sections: Sequence[str] = ()) -> dict[str, Field]:
    """Key to field, for those whose first part is in `sections`; all without any."""
    found = {f.key: f for f in walk(Settings)}
    return {k: f for k, f in found.items() if not sections or k.partition(".")[0] in sections}


def take(words: Sequence[str], *sections: str) -> tuple[Settings, list[str]]:
    """The settings among `words`, and the words that are left.

    Args:
        words: overrides, `name=value`.
        sections: first parts of the keys this command knows, for example "compare", "seeds".

    Raises:
        UsageError: a setting that is not known, or a value that is not legal.
    """
    settings, rest = OmegaConf.structured(Settings), []
    known = fields(sections)
    for word in words:
        if word.lstrip("+").partition("=")[0].partition(".")[0] not in sections:
            rest.append(word)
            continue
        override = parse(word)
        key, value = override.key_or_group, override.value()
        if key not in known:
            raise UsageError(
                f"'{word}': there is no field '{key}'{hint(key, known)}; legal: {', '.join(known)}"
            )
        _set(settings, known[key], value, word)
    return cast(Settings, OmegaConf.to_object(settings)), rest


def _set(settings: Any, found: Field, value: Any, word: str) -> None:
    try:
        OmegaConf.update(settings, found.key, value)
    except (OmegaConfBaseException, ValueError):
        near = hint(str(value), found.choices)
        raise UsageError(f"'{word}': {found.key} is {found.legal}{near}") from None
    allowed: Range | None = RANGES.get(found.key)
    if allowed is not None and value is not None and not allowed.holds(value):
        raise UsageError(f"{word}: legal is {allowed}")
