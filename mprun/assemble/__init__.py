"""The composition root: from a checked configuration to the objects a run is made of.

`plan` chooses, checks and loads; `build_parts` makes the objects. Everything a user can still get
wrong here (a recipe's own fields, a device that is not there, data that cannot be had) raises
`UsageError` before any folder is made.
"""

from mprun.assemble.fp_exceptions import build_exceptions
from mprun.assemble.optimizer import build_optimizer
from mprun.assemble.parts import build_parts
from mprun.assemble.plan import Plan, plan
from mprun.assemble.planned_memory import footprint, step_memory, with_batch_size
from mprun.assemble.precision_parts import (
    build_arithmetic,
    build_caster,
    build_loss_scale,
    build_precision,
)
from mprun.assemble.recipe_loading import DataCache, load_recipe, load_shapes

__all__ = [
    "DataCache",
    "Plan",
    "build_arithmetic",
    "build_caster",
    "build_exceptions",
    "build_loss_scale",
    "build_optimizer",
    "build_parts",
    "build_precision",
    "footprint",
    "load_recipe",
    "load_shapes",
    "plan",
    "step_memory",
    "with_batch_size",
]
