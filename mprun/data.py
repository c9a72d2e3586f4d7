"""Samples for recipes, by their public name: `from mprun.data import Splits`; see `train/data/`."""

from mprun.train.data import *  # noqa: F403 - the same names
from mprun.train.data import __all__ as __all__
