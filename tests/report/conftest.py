"""A report draws all of its plots here."""

import pytest


@pytest.fixture(autouse=True)
def one_plot() -> None:
    """Not one alone."""
