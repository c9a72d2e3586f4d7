"""The composition root: from a checked configuration to the objects a run is made of.

`plan` chooses, checks and loads; `build_parts` makes the objects. Everything a user can still get
wrong here (a recipe's own fields, a device that is not there, data that cannot be had) raises
`UsageError` before any folder is made.
"""

from mprun.build.exceptions import build_exceptions
from mprun.build.footprint import footprint, step_memory, with_batch_size
from mprun.build.numerics import look, steps_to_look_at
from mprun.build.optimizer import build_optimizer
from mprun.build.parts import build_parts
from mprun.build.plan import Plan, plan
from mprun.build.precision import (
    build_arithmetic,
    build_caster,
    build_loss_scale,
    build_precision,
)
from mprun.build.recipe import DataCache, load_recipe, load_shapes
from mprun.build.trace import trace_step

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
    "look",
    "plan",
    "step_memory",
    "steps_to_look_at",
    "trace_step",
    "with_batch_size",
]
