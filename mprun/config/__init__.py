"""The configuration: its schema, how it is composed from files and overrides, and its checks.

With `cli.py` this is the only part of mprun that knows Hydra; `build/` turns the `Config` made
here into plain typed objects. Nothing here imports torch, so a mistake is reported at once.
"""

from mprun.config.compose import Composed, compose
from mprun.config.schema import Config

__all__ = ["Composed", "Config", "compose"]
