"""Optimizers that keep low-precision parameters and state: drop-in `torch.optim.Optimizer`s.

Usable in anyone's own loop:

    from mprun.optim import AdamW

    model = model.to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-3)          # stochastic rounding
    ...
    loss.backward()
    optimizer.step()

They import torch, `mprun.precision`'s rounding and the compiled kernels, and nothing else of mprun.
"""

from mprun.optim.adamw import AdamW
from mprun.optim.base import LowPrecisionOptimizer
from mprun.optim.rmsprop import RMSprop
from mprun.optim.sgd import SGD
from mprun.precision.random_bits import name_parameters

__all__ = ["SGD", "AdamW", "LowPrecisionOptimizer", "RMSprop", "name_parameters"]
