"""What a checkpoint holds of each process: every source of random numbers continues."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mprun.train.checkpoint import restore_random_numbers, saved_random_numbers
from mprun.train.parallel.ranks import Ranks


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(3).tolist(), random.random, lambda: np.random.rand(3).tolist()],
    ids=["PyTorch", "Python", "NumPy"],
)
def test_random_numbers_continue_as_they_were_saved(draw: object) -> None:
    assert callable(draw)
    draw()
    state = saved_random_numbers(Ranks())
    expected = draw()
    assert draw() != expected
    restore_random_numbers(state, Ranks())
    assert draw() == expected
