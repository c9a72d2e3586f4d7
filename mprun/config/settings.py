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
    """Label or hash of the variant the others are set against; null for fp32."""
    split: Split = Split.auto
    """Which samples the metric is of: auto, test, validation or train."""
    mix: list[Mix] = field(default_factory=list)
    """What may differ between runs: [recipes, data, hardware, code]; by default nothing."""
    fail_if: FailIf = FailIf.none
    """End with status 3 where a variant is worse, or not shown to be equivalent or better."""
    dir: str | None = None
    """Folder of report.html and the rest; null: the one folder compared, or comparison/ here."""
    report: bool = True
    """Whether files are written, or the table is only printed."""


class Objective(Enum):
    """What the advised mode is to need least of."""

    time = "time"
    memory = "memory"


@dataclass
class AdviseSettings:
    """How a mode is chosen."""

    objective: Objective = Objective.time
    """What is to be small: time (of a step) or memory (at its peak)."""
    max_steps: int = 500
    """Steps of a trial, where train.max_steps does not say."""
    screen: int = 2
    """Pairs after which a mode that was slower in every one is tried no more."""


@dataclass
class DoubleSettings:
    """How a doubled batch is judged."""

    until_oom: bool = False
    """Look for the largest batch that fits instead (CUDA)."""
    headroom: float = 0.1
    """Share taken off the largest batch found."""


@dataclass
class DoctorSettings:
    """How a machine is examined."""

    json: bool = False
    """Whether one JSON object is printed, and nothing else, instead of tables."""
    budget_s: float = 5.0
    """About how long rates are measured, in seconds; six rounds are made even beyond."""


@dataclass
class MemorySettings:
    """What `mprun memory` shows."""

    against: str | None = None
    """Precision mode the others are set against; null: the first of several, else fp32."""
    fits: str | None = None
    """Look for the largest train.batch_size whose peak fits in this much memory: 16GiB, 500MB."""
    depth: int | None = None
    """Modules are shown down to this depth, what is inside added to them; null for all."""
    picture: bool = True
    """Whether the pictures are drawn."""


@dataclass
class NumericsSettings:
    """Which steps are looked at, and what is asked of their numbers."""

    steps: int = 20
    """Steps looked at, evenly spread over the span."""
    warmup: int = 3
    """Steps before the first one that may be looked at."""
    span: int = 200
    """The last step that may be looked at; a shorter run's own last step where that comes first."""
    headroom: float = 2.0
    """How many times larger gradients may become before one overflows at the recommended scale."""
    needed_db: float = 20.0
    """Signal over noise, in dB, that numbers have to keep in a format for it to do."""
    try_scales: bool = False
    """Whether every power of two is tried as loss scale: some thirty passes more at each step."""
    top: int = 20
    """Rows of the table, the worst first; all are in numerics.json."""
    plots: bool = True
    """Whether the pictures are drawn."""


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
    advise: AdviseSettings = field(default_factory=AdviseSettings)
    """How a mode is chosen."""
    double: DoubleSettings = field(default_factory=DoubleSettings)
    """How a doubled batch is judged."""
    doctor: DoctorSettings = field(default_factory=DoctorSettings)
    """How a machine is examined."""
    memory: MemorySettings = field(default_factory=MemorySettings)
    """What `mprun memory` shows."""
    numerics: NumericsSettings = field(default_factory=NumericsSettings)
    """Which steps `mprun numerics` looks at, and what it asks of their numbers."""
    search_ops: SearchOpsSettings = field(default_factory=SearchOpsSettings)
    """How ops that must stay in float32 are searched."""
    seeds: int | None = None
    """Runs of each variant; null for 5, in advise and double 10."""
    first_seed: int = 0
    """The first seed; the others follow. Another one makes a study of fresh seeds."""


RANGES = {
    # 0.5 for half a point would find anything equivalent.
    "compare.margin": Range(0, 0.1, low_open=True),
    "compare.relative_margin": Range(0, 1, low_open=True),
    "advise.max_steps": COUNT,
    "advise.screen": COUNT,
    "double.headroom": Range(0, 1, high_open=True),
    "doctor.budget_s": Range(0, 600, low_open=True),
    "memory.depth": COUNT,
    "numerics.steps": COUNT,
    "numerics.warmup": NOT_NEGATIVE,
    "numerics.span": COUNT,
    "numerics.headroom": Range(1, 2**20),
    "numerics.needed_db": NOT_NEGATIVE,
    "numerics.top": COUNT,
    "search_ops.tolerance": POSITIVE,
    "search_ops.gradient_db": Range(-1000, 1000),
    "search_ops.batches": COUNT,
    "search_ops.warmup_steps": NOT_NEGATIVE,
    "search_ops.timed_steps": NOT_NEGATIVE,
    "search_ops.steps": NOT_NEGATIVE,
    "search_ops.margin": Range(0, 0.1, low_open=True),
    "search_ops.relative_margin": Range(0, 1, low_open=True),
    "seeds": COUNT,
    "first_seed": Range(0, 2**31),
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
    if found.key in RANGES:
        RANGES[found.key].check(found.key, value)
