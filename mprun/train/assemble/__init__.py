"""The composition root: from a checked configuration to the objects a run is made of.

`make_plan` chooses, checks and loads; `build_parts` makes the objects. A user's mistakes that show
only here (a recipe's own fields, a device or data that are not available) raise `UsageError` before
any folder is made.
"""

from mprun.train.assemble.parts import (
    build_arithmetic,
    build_caster,
    build_loss_scale,
    build_parts,
    build_run,
)
from mprun.train.assemble.plan import Plan, make_plan
from mprun.train.assemble.planned_memory import footprint, same_step, step_memory, with_batch_size
from mprun.train.assemble.recipe_loading import DataCache, load_shapes, recipe_of, source_of

__all__ = [
    "DataCache",
    "Plan",
    "build_arithmetic",
    "build_caster",
    "build_loss_scale",
    "build_parts",
    "build_run",
    "footprint",
    "load_shapes",
    "make_plan",
    "recipe_of",
    "same_step",
    "source_of",
    "step_memory",
    "with_batch_size",
]
