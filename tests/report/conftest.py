"""A report draws all of its plots here; pages are made once."""

import pytest

from tests.report.pages import Pages


@pytest.fixture(autouse=True)
def one_plot() -> None:
    """Not one alone."""


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(tmp_path_factory.mktemp("runs"))
