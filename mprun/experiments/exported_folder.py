"""A run's model, made by its recipe, that writes itself into a folder (`save_pretrained`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mprun.assemble import recipe_of
from mprun.config import compose
from mprun.config.recipe_file import as_text, quoted
from mprun.train.init_from import write_pretrained
from mprun.train.user_code import model_of


def write_folder(run: Path, weights: Mapping[str, Tensor], target: Path, trust: bool) -> None:
    """Let the model of a run write its weights into a folder.

    Args:
        run: the run's folder.
        weights: of its last checkpoint.
        target: a new or empty folder.
        trust: whether code that lies in the run's folder may run.

    Raises:
        UsageError: the recipe cannot be loaded, or its model cannot write itself.
    """
    given = [f"run.resume={quoted(as_text(str(run)))}", f"run.trust={str(trust).lower()}"]
    recipe = recipe_of(compose(given).config, None if trust else run)
    write_pretrained(model_of(recipe), weights, target)
