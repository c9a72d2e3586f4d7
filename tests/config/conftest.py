"""Tests of the composition itself."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def composed_once() -> None:
    """Here every configuration is composed by Hydra anew."""
