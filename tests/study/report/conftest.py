"""Pages are made once."""

import pytest

from tests.study.report.pages import Pages


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(tmp_path_factory.mktemp("runs"))
