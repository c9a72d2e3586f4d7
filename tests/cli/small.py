"""Overrides of small runs, and what lies in the current folder."""

from __future__ import annotations

from pathlib import Path

MNIST = [
    *("recipe=mnist", "recipe.model.units=16", "data.source=generated", "device=cpu"),
    *("data.train_limit=64", "data.eval_limit=16", "train.batch_size=16"),
]
LINEAR = [
    *("recipe=linear", "recipe.model.in_features=16", "recipe.model.out_features=8"),
    *("recipe.model.samples=8", "train.batch_size=8", "device=cpu"),
]


def made() -> list[str]:
    """What lies in the current folder, at any depth."""
    return sorted(str(path) for path in Path().rglob("*"))
