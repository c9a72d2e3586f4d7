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


@needs_browser
def test_what_is_wrong_with_a_page_is_noticed(tmp_path: Path) -> None:
    wide = '<p style="width: 500px">wide</p>'
    bodies = {
        "wide": wide,
        "scrolls in its box": f'<div style="overflow-x: auto">{wide}</div>',
        "table": '<div class="wide" style="overflow-x: auto"><table class="cards"><tr>'
        '<td style="min-width: 500px">a cell</td></tr></table></div>',
        "left": '<p style="margin-left: -20px">left</p>',
        "script": "<script>nothing()</script>",
        "image": '<img src="data:image/png;base64,x">',
        "asks": "<script>alert(1)</script>",
        "plot": '<svg class="plot" width="40"><text x="30">a label</text></svg>',
        "small": '<svg class="plot" width="40"><text font-size="8">a</text></svg>',
        "console": '<script>console.error("something")</script>',
    }
    pages = {
        name: f"<!doctype html><html><head></head><body>{body}</body></html>"
        for name, body in bodies.items()
    }
    texts = problems(measured(pages, (390,), False, tmp_path))
    for name, text in (
        ("wide", "the page scrolls: 5"),
        ("wide", "<p class="),
        ("table", "a table is cut off: 5"),
        ("left", "<p class="),
        ("script", "nothing is not defined"),
        ("image", "not loaded: IMG"),
        ("asks", "alert()"),
        ("plot", "cut off in a plot: a label"),
        ("small", "8.0 px in a plot: a"),
        ("console", "something"),
    ):
        assert [x for x in texts if x.startswith(name) and text in x], (name, texts)
    assert not [x for x in texts if x.startswith("scrolls in its box")]
