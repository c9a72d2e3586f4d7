"""The random numbers of data code: the same for every precision mode.

A data set that augments draws random numbers when a sample is read: PyTorch's, NumPy's or Python's.
A model draws from PyTorch's too (dropout), and how many it draws may depend on the mode. So each
batch is read with random numbers of its own (`seeded`), which depend on the run's seed, the epoch
and the number of the batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from mprun.precision import devices

NUMPY_SEEDS = 2**32  # it takes no larger ones


def seed_all(seed: int) -> None:
    """Seed PyTorch's, Python's and NumPy's random numbers."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % NUMPY_SEEDS)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers drawn inside on the CPU depend on `seed` alone; all are restored."""
    python, numpy_, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        # not torch.manual_seed, which also seeds accelerators, whose states are not restored here
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % NUMPY_SEEDS)
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_)
        random.setstate(python)


@contextmanager
def untouched() -> Iterator[None]:
    """All random numbers, also those of accelerators, are as before at the end."""
    host = devices.host_random_states()
    try:
        with devices.random_numbers_kept(devices.in_use()):
            yield
    finally:
        devices.restore_host_random_states(host)
