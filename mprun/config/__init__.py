"""The configuration: its schema, how it is composed from files and overrides, and its checks.

The only room that knows Hydra. Nothing here imports torch, so a mistake is reported at once. Doors:
`compose` (overrides become a checked `Config`), `schema.py` (every field with its range),
`settings.py` (what commands take beside a run's fields), `reference.py` (the fields for help and
docs).

How data goes through: Hydra merges the files of `conf/`, those of `--config-dir` and the overrides;
the result is checked against the schema and becomes a typed `Config`. `train/assemble` turns it
into a plan, and the plan into objects that take plain typed parameters.
"""

from mprun.config.compose import Composed, compose
from mprun.config.schema import Config

__all__ = ["Composed", "Config", "compose"]
