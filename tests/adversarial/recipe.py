"""The hostile models as a recipe of commands."""

from __future__ import annotations

from pathlib import Path

FLOAT32_IS_EXACT = ("dead_relu", "decay_only")
"""Cases whose zero gradients float32 gets exactly: products with 0."""
WORDS = ("--config-dir=conf", "recipe=hostile", "device=cpu")


def write_recipe(folder: Path) -> None:
    """Make `recipe=hostile` known in a folder: trained as in `oracle.py`, but for the seed."""
    configs = folder / "conf/recipe"
    configs.mkdir(parents=True)
    (configs / "hostile.yaml").write_text(
        "# @package _global_\n# A hostile model\n"
        "recipe: {name: hostile, target: tests.adversarial.models.Hostile, model: {case: tied}}\n"
        "train: {epochs: 25, batch_size: 64, eval_batch_size: 64, lr: 0.01, "
        "optimizer: {name: adamw}}\n",
        encoding="utf-8",
    )
