"""The documentation as a site: `make site` in strict mode, its links, and what it says once."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import mprun
from mprun.cli.main import COMMANDS
from mprun.config.reference import GROUPS, leaves
from mprun.inspect.check.check_result import kinds

pytest.importorskip("material")
ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
DOORS = {
    "advise": "tutorials/first_run",
    "numerics": "tutorials/a_nan",
    "check": "how-to/check",
}
"""The commands on the first page, and where each leads."""
MOST_WORDS = 20_590


class Html(HTMLParser):
    """What a page has: its anchors, where its links lead, what a browser loads with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = {""}, set[str](), set[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self.anchors.add(of.get("id", ""))
        if tag == "a":
            self.anchors.add(of.get("name", ""))
            self.links.add(of.get("href", ""))
        elif tag == "link" and of.get("rel") in ("canonical", "next", "prev"):
            self.links.add(of["href"])
        else:
            self.loaded |= {of[name] for name in ("src", "href", "srcset") if name in of}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make site` builds it."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "SITE_URL": "", "SOURCE_URL": ""}
    env["PYTHONWARNINGS"] = "ignore::DeprecationWarning"  # of matplotlib, which calls pyparsing
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr + done.stdout
    assert not done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    """The pages by their paths, without the one that answers for missing ones."""
    return {path: Html(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_links_and_anchors_lead_somewhere_and_nothing_is_loaded_from_elsewhere(
    pages: dict[Path, Html],
) -> None:
    wrong = []
    for path, page in pages.items():
        for link in page.links | page.loaded:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                is_read = link in page.links or url.scheme == "data"
                wrong += [] if is_read else [f"{path.name} loads {link}"]
                continue
            goal = (path.parent / unquote(url.path)).resolve() if url.path else path
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.is_file() or (goal in pages and url.fragment not in pages[goal].anchors):
                wrong.append(f"{path.name}: {link}")
    assert wrong == []


def test_lists_are_lists(site: Path) -> None:
    """GitHub takes a list behind a line of text, MkDocs only one behind an empty line."""
    wrong = [
        f"{path.name}: {text[:80]}"
        for path in site.rglob("*.html")
        for text in re.findall(r"<p>(.*?)</p>", path.read_text(encoding="utf-8"), re.DOTALL)
        if re.search(r"\n(- |\d\. |```|\|.*\|)", text)
    ]
    assert wrong == []


def test_every_page_is_on_the_site_once(pages: dict[Path, Html], site: Path) -> None:
    expected = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in DOCS[1:]}
    made = {Path(name) for name in ("reference/commands.html", "example_report.html")}
    assert {path.relative_to(site) for path in pages} == expected | made


def test_the_first_page_asks_answers_and_has_three_doors(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert "Does the accuracy survive?" in text
    assert "half_sr keeps the accuracy" in html.unescape(text)  # as README.md shows it
    _, _, cards = text.partition('class="grid cards"')
    cards, _, rest = cards.partition("From the repository")
    for command, page in DOORS.items():
        assert f"mprun {command} recipe=my_model.py" in cards
        assert f'href="{page}.html"' in cards
    assert cards.count("<li>") == len(DOORS)
    assert "make run" in rest
    assert "make run" not in text.partition("<h1")[2].partition("grid cards")[0]


def test_the_reference_has_every_field_command_and_public_name(site: Path) -> None:
    def text(name: str) -> str:
        return (site / "reference" / name).read_text(encoding="utf-8")

    fields, commands, names = map(text, ("configuration.html", "commands.html", "python.html"))
    keys = {*leaves()} - {f"{group}.name" for group in GROUPS}
    assert [key for key in keys if f"<code>{key}" not in fields] == []
    assert [kind for kind in kinds() if f'id="{kind}"' not in text("check.html")] == []
    assert [c.name for c in COMMANDS if f'id="{c.name}"' not in commands] == []
    public = [f"mprun.{name}" for name in mprun.__all__ if name[0] != "_"]
    for package in (mprun.metrics, mprun.numerics, mprun.optim):
        public += [f"{package.__name__}.{name}" for name in package.__all__]
    assert [name for name in public if f'id="{name}"' not in names] == []


def test_the_docs_stay_short() -> None:
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in DOCS) <= MOST_WORDS


def test_no_paragraph_stands_twice() -> None:
    paragraphs = Counter(
        " ".join(text.split())
        for path in DOCS
        for text in re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
        if len(text.split()) > 15
    )
    assert [text for text, times in paragraphs.items() if times > 1] == []
