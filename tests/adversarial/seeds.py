"""Which seeds the answers are tried on: one in every run of the tests, ten if exhaustive."""

from __future__ import annotations

from typing import Any

import pytest

SEEDS: list[Any] = [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 10))]
