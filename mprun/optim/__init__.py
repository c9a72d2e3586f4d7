"""Optimizers with parameters and state in 16 or 8 bits: drop-in `torch.optim.Optimizer`s.

With rounding to nearest, a 16-bit parameter does not change by small updates. These optimizers
compute a step in float32 and round it once: stochastically, with a remainder, or to nearest. Others
get float32 masters by `MasterWeights`. `for_policy` makes the one that a precision mode needs.

How data goes through: `base.py` hands parameters, gradients and state to `engines.py`, which runs
their formula (`optimizers.py`) over all of them: in C, as a Triton kernel on a GPU, or eagerly.
"""

from mprun.optim.base import LowPrecisionOptimizer
from mprun.optim.masters import MasterWeights, float32_masters
from mprun.optim.optimizers import SGD, AdamW, RMSprop, for_policy
from mprun.precision.random_bits import mark_shard, name_parameters

__all__ = [
    "SGD",
    "AdamW",
    "LowPrecisionOptimizer",
    "MasterWeights",
    "RMSprop",
    "float32_masters",
    "for_policy",
    "mark_shard",
    "name_parameters",
]
