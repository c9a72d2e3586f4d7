"""The report in a browser: no script error, nothing wider than the page, on a screen or a phone.

Where no Chromium is installed, these tests are skipped: continuous integration may have none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.study.report.browser import browser, measured
from tests.study.report.pages import FURTHER, KINDS, Pages

WIDTHS = (1280, 1000, 390)
needs_browser = pytest.mark.skipif(browser() is None, reason="no Chromium on the PATH")


def problems(results: list[dict[str, Any]]) -> list[str]:
    return [f"{found['page']}: {text}" for found in results for text in found["problems"]]


@needs_browser
@pytest.mark.parametrize(
    ("is_dark", "kinds"),
    [(False, sorted({*KINDS, *FURTHER} - {"two"})), (True, ["ten", "failures"])],
    ids=["light", "dark"],
)
def test_nothing_fails_and_nothing_is_wider_than_the_page(
    pages: Pages, is_dark: bool, kinds: list[str], tmp_path: Path
) -> None:
    """Every kind of report that `sweep`, `compare`, `advise` and `double` write."""
    *results, console = measured({kind: pages[kind] for kind in kinds}, WIDTHS, is_dark, tmp_path)
    assert len(results) == len(WIDTHS) * len(kinds)
    assert {found["width"] for found in results} == set(WIDTHS)
    assert {found["dark"] for found in results} == {is_dark}
    assert len({found["paper"] for found in results}) == 1
    assert min(found["elements"] for found in results) > 100
    assert problems([*results, console]) == []
