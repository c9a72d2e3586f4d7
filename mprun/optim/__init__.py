"""Optimizers with parameters and state in 16 bits: drop-in `torch.optim.Optimizer`s.

Usable in anyone's own loop:

    from mprun.optim import AdamW

    model = model.to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-3)          # stochastic rounding
    ...
    loss.backward()
    optimizer.step()

A 16-bit parameter that moves by small steps stands still when it is rounded to nearest. These
optimizers compute a step in float32 and round it once, stochastically or with a remainder.
"""

from mprun.optim.base import LowPrecisionOptimizer
from mprun.optim.optimizers import SGD, AdamW, RMSprop
from mprun.precision.random_bits import name_parameters

__all__ = ["SGD", "AdamW", "LowPrecisionOptimizer", "RMSprop", "name_parameters"]
