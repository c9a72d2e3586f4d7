"""The variants of a study: every mode, or every combination of the listed values.

`precision=fp32,bf16_mixed op_lists=none,hmp` are four combinations, and one is invalid: op lists
have no meaning in float32. Invalid combinations are left out and reported. A value that is invalid
in every combination is an error. A combination that differs from an earlier one only in fields
without effect is the same variant, so it is left out too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mprun.config.compose import compose, parse
from mprun.config.multirun import combinations
from mprun.config.recipe_file import named_file
from mprun.config.reference import GROUPS, options
from mprun.config.validate import without_inert
from mprun.errors import UsageError

BASELINE = "fp32"
NEUTRAL = ("none", "base")
"""Options that change nothing. They are not part of a name."""
EVERY = "all"
"""`precision=all` lists every mode."""
SET_BY_STUDY = ("run.dir", "run.resume", "seed")


@dataclass(frozen=True)
class Variants:
    """The variants of a study."""

    overrides: dict[str, tuple[str, ...]]
    """By name."""
    left_out: dict[str, str] = field(default_factory=dict)
    """The reason why a combination is invalid, or which variant it repeats; by name."""


def modes(config_dir: Path | None = None) -> list[str]:
    """Every precision mode, those in `config_dir` included, float32 first."""
    own = () if config_dir is None else (config_dir / "precision").glob("*.yaml")
    names = {*options("precision"), *(path.stem for path in own)}
    return sorted(names, key=lambda name: (name != BASELINE, name))


def with_every_mode(overrides: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """The overrides with `precision=all` as a list of every mode, unless a mode has that name."""
    names = modes(config_dir)
    listed = text = f"precision={EVERY}"
    if EVERY not in names:
        listed = f"precision={','.join(names)}"
    return [listed if override == text else override for override in overrides]


def variants(overrides: Sequence[str], config_dir: Path | None = None) -> Variants:
    """The variants of a study with these overrides; without `precision`, every mode is included.

    Raises:
        UsageError: an override is invalid in every combination, or in the only one.
    """
    parsed = [parse(text) for text in with_every_mode(overrides, config_dir)]
    for override in parsed:
        if override.key_or_group in SET_BY_STUDY:
            raise UsageError(
                f"'{override.input_line}': a study sets seeds and folders itself; "
                "seeds=5 runs seeds 0 to 4"
            )
    has_precision = any(o.key_or_group == "precision" for o in parsed)
    if not has_precision:
        parsed = [parse(f"precision={','.join(modes(config_dir))}"), *parsed]
    varied = [i for i, o in enumerate(parsed) if o.is_sweep_override()]
    varied = varied or [i for i, o in enumerate(parsed) if o.key_or_group == "precision"]
    valid: dict[str, tuple[str, ...]] = {}
    left_out: dict[str, str] = {}
    errors: list[tuple[tuple[str, ...], UsageError]] = []
    names: dict[str, str] = {}  # configuration without inert fields, to the first variant's name
    accepted: set[str] = set()  # overrides that are valid in some combination
    for combination in combinations(parsed):
        name = _name(combination, varied)
        try:
            composed = compose([*combination, "seed=0"], config_dir)
        except UsageError as error:
            errors.append((combination, error))
            left_out[name] = str(error)
            continue
        accepted.update(combination)
        effect = json.dumps(without_inert(composed.config, composed.resolved), sort_keys=True)
        if (first := names.setdefault(effect, name)) == name:
            valid[name] = combination
        else:
            left_out[name] = "; ".join([f"the same as {first}", *composed.warnings])
    for combination, refusal in errors:
        checked = combination if has_precision else combination[1:]
        if not accepted.issuperset(checked):
            raise refusal
    return Variants(valid, left_out)


def _name(combination: Sequence[str], varied: Sequence[int]) -> str:
    """A combination's name: what varies, groups by their option alone."""
    parts = []
    for i in varied:
        key, _, value = combination[i].partition("=")
        if key in GROUPS and value in NEUTRAL:
            continue
        value = _recipe_name(value) if key == "recipe" else value
        parts.append(value if key in GROUPS else f"{key.lstrip('+')}={value}")
    precision = [x.partition("=")[2] for x in combination if x.startswith("precision=")]
    return "+".join(parts) or precision[-1]


def _recipe_name(value: str) -> str:
    """The name of a recipe, the stem of one that is a file."""
    file = named_file(value.strip("'\""))
    return value if file is None else file.name + (f":{file.kind}" if file.kind else "")
