"""The configuration: its schema, how it is composed from files and overrides, and its checks.

Only this package uses Hydra. `assemble/` turns a `Config` into plain typed objects. Nothing here
imports torch, so a mistake is reported at once.
"""

from mprun.config.compose import Composed, compose
from mprun.config.schema import Config

__all__ = ["Composed", "Config", "compose"]
