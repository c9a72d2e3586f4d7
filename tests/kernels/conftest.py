"""Tests here use helpers of modules in tests/optim, which have a marker of their own."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "compiled: the C engine is compiled here")
