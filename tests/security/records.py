"""Run folders of strangers, with code in them that leaves a mark when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mprun.config import compose

MARK = "code-ran"
RECIPE = f"""
import sys
from dataclasses import dataclass
from pathlib import Path
from mprun.recipes.linear import Linear

Path("{MARK}").touch()
print("the code runs", file=sys.stderr)


@dataclass(frozen=True)
class Net(Linear):
    pass
"""


def has_run() -> bool:
    """Whether the code of `RECIPE` ran in the current folder."""
    return Path(MARK).exists()


def write_recipe(path: Path) -> None:
    """The module of a recipe that leaves a mark when it is imported."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RECIPE, encoding="utf-8")


def write_config(folder: Path, **fields: Any) -> None:
    """The recorded configuration of a short run of `linear`; `recipe__name` for nested fields."""
    small = ["recipe.model.in_features=4", "recipe.model.out_features=2", "recipe.model.samples=8"]
    config: Any = compose(["recipe=linear", "train.max_steps=1", "device=cpu", *small]).resolved
    for key, value in fields.items():
        *path, last = key.split("__")
        place = config
        for part in path:
            place = place[part]
        place[last] = value
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
