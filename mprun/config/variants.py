"""Which variants overrides stand for: every mode, or every combination of what is listed.

`precision=fp32,bf16_mixed op_lists=none,hmp` are four combinations, one of which cannot be: op
lists have no meaning in float32. A combination that cannot be is left out, and said; a value that
can be in none at all is a mistake. A combination that differs from an earlier one only in fields
without effect is that variant once more, and left out too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mprun.config.compose import compose, parse
from mprun.config.multirun import combinations
from mprun.config.reference import GROUPS, aliases, options
from mprun.config.validate import without_inert
from mprun.errors import UsageError

BASELINE = "fp32"
NEUTRAL = ("none", "base")
"""Options that change nothing, and stand in no name."""
NOT_HERE = ("run.dir", "run.resume", "seed")


@dataclass(frozen=True)
class Variants:
    """What a study runs, and what it does not."""

    words: dict[str, tuple[str, ...]]
    """A variant's name to its overrides."""
    left_out: dict[str, str]
    """A combination's name to why it cannot be, or which other one it is."""


def modes(config_dir: Path | None = None) -> list[str]:
    """Every precision mode, the user's own among them, float32 first."""
    own = () if config_dir is None else (config_dir / "precision").glob("*.yaml")
    found = {*options("precision"), *(path.stem for path in own)} - {*aliases("precision")}
    return sorted(found, key=lambda name: (name != BASELINE, name))


def variants(words: Sequence[str], config_dir: Path | None = None) -> Variants:
    """The variants that overrides stand for.

    Args:
        words: overrides; without `precision`, every mode is meant.
        config_dir: a further folder of configs, or None.

    Raises:
        UsageError: an override that is wrong in every combination, or in the only one.
    """
    parsed = [parse(word) for word in words]
    for override in parsed:
        if override.key_or_group in NOT_HERE:
            raise UsageError(
                f"'{override.input_line}': a study names seeds and folders itself; "
                "seeds=5 runs seeds 0 to 4"
            )
    named = any(o.key_or_group == "precision" for o in parsed)
    if not named:
        parsed = [parse(f"precision={','.join(modes(config_dir))}"), *parsed]
    varied = [i for i, o in enumerate(parsed) if o.is_sweep_override()]
    varied = varied or [i for i, o in enumerate(parsed) if o.key_or_group == "precision"]
    found: dict[str, tuple[str, ...]] = {}
    left_out: dict[str, str] = {}
    failed: list[tuple[tuple[str, ...], UsageError]] = []
    names: dict[str, str] = {}
    repeated: set[str] = set()
    for combination in combinations(parsed):
        name = _name(combination, varied)
        try:
            composed = compose([*combination, "seed=0"], config_dir)
        except UsageError as error:
            failed.append((combination, error))
            left_out[name] = str(error)
        else:
            effect = json.dumps(without_inert(composed.config, composed.resolved), sort_keys=True)
            if (first := names.setdefault(effect, name)) == name:
                found[name] = combination
            else:
                left_out[name] = "; ".join([f"the same as {first}", *composed.warnings])
                repeated.update(combination)
    used = {word for combination in found.values() for word in combination} | repeated
    for combination, refusal in failed:
        exempt = combination[:1] if not named else ()
        if not used.issuperset(set(combination) - set(exempt)):
            raise refusal
    return Variants(found, left_out)


def _name(combination: Sequence[str], varied: Sequence[int]) -> str:
    """A combination's name: what varies, groups by their option alone."""
    parts = []
    for i in varied:
        key, _, value = combination[i].partition("=")
        if key in GROUPS and value in NEUTRAL:
            continue
        parts.append(value if key in GROUPS else f"{key.lstrip('+')}={value}")
    precision = [w.partition("=")[2] for w in combination if w.startswith("precision=")]
    return "+".join(parts) or precision[-1]
