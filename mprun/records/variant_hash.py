"""The hash of a variant: runs with equal hashes differ in seed, paths and loggers alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def variant_config(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved configuration without seed, paths and loggers: what makes a variant."""
    config: dict[str, Any] = json.loads(json.dumps(resolved))
    for key in ("seed", "run", "logger"):
        config.pop(key, None)
    config.get("data", {}).pop("root", None)
    config.get("preset", {}).pop("name", None)  # what it sets stays
    for key in ("log_every", "checkpoint_every_steps"):
        config.get("train", {}).pop(key, None)
    if config.get("debug", {}).get("fp_exceptions") == "skip":  # it may drop steps
        config["debug"] = {"fp_exceptions": "skip"}
    else:
        config.pop("debug", None)
    for key in ("lower_file", "fp32_file", "promote_file", "strict", "verbose"):
        config.get("op_lists", {}).pop(key, None)  # the names in the files stay
    return config


def variant_hash(resolved: Mapping[str, Any]) -> str:
    """Twelve hex digits of what makes a variant.

    Runs with one hash differ in nothing a comparison should keep apart.
    """
    text = json.dumps(variant_config(resolved), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
