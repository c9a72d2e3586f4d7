"""The report's page: valid, whole in itself, and deaf to what records try to say."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mprun.records.run_config import UnreadableConfigError, config_fields, read_config
from mprun.study.compare.comparison import Advice, Skipped
from mprun.study.report import cells
from tests.each import each
from tests.study.report.compared import HOSTILE, comparison
from tests.study.report.pages import KINDS, made

VOID = {"meta", "link", "br", "hr", "img", "input"}
ADDRESSES = ("src", "href", "xlink:href", "action", "data", "poster", "srcset", "formaction")


class StrictParser(HTMLParser):
    """Collects what a page is made of, and complains about what is not closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.comments: list[str] = []
        self.cells_of_rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._seen(tag, attrs)
        if tag == "tr":
            self.cells_of_rows.append([])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._seen(tag, attrs)
        assert "svg" in self.open, f"<{tag}/> outside of a drawing"

    def _seen(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in <{tag}>"
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th") and self.cells_of_rows:
            self.cells_of_rows[-1].append(data.strip())

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"a declaration: {data}")


def parsed(text: str) -> StrictParser:
    parser = StrictParser()
    parser.feed(text)
    parser.close()
    assert parser.open == [], "not closed"
    return parser


@pytest.mark.representative("hostile")
@pytest.mark.parametrize("kind", KINDS)
def test_the_page_is_valid_and_needs_nothing_beside_itself(
    pages: dict[str, str], kind: str
) -> None:
    found = parsed(pages[kind])
    assert pages[kind].startswith("<!doctype html>")
    assert not {"script", "link", "img", "iframe", "object", "embed", "form"} & set(found.tags)
    assert len(found.ids) == len(set(found.ids)), "an id twice"
    assert "" not in found.ids
    for tag, name, value in found.attributes:
        assert not name.startswith("on"), f"{name} on <{tag}>"
        if name in ADDRESSES:
            assert value.startswith("#"), f"{tag} {name}={value}"
            assert value[1:] in found.ids
        for target in re.findall(r"url\(([^)]*)\)", value):
            assert target.startswith("#")
            assert target[1:] in found.ids
        if name == "aria-labelledby":
            assert value in found.ids
    style = "".join(re.findall(r"<style>(.*?)</style>", pages[kind], re.DOTALL))
    assert "url(" not in style
    assert "@import" not in style
    assert found.comments == []


@pytest.mark.representative("ten", "losses", "hostile")
@pytest.mark.parametrize("kind", KINDS)
def test_drawings_are_xml_with_a_title(pages: dict[str, str], kind: str) -> None:
    drawings = re.findall(r"<svg .*?</svg>", pages[kind], re.DOTALL)
    assert drawings
    for text in drawings:
        root = ElementTree.fromstring(text)
        assert root.get("class") == "plot"
        assert root.get("role") == "img"
        assert root[0].tag.endswith("title")
        assert root.get("aria-labelledby") == root[0].get("id")


def test_the_table_has_the_cells_and_the_headings(pages: dict[str, str]) -> None:
    found, compared = parsed(pages["ten"]), comparison(10)
    rows = [row for row in found.cells_of_rows if row]
    headings = [cell[0] for cell in cells.headings(compared)]
    assert rows[0] == [h.replace(" %", "\u00a0%") for h in headings]
    text = " ".join(found.texts)
    for row in cells.rows(compared):
        assert all(part in text for cell in row[1:] for part in cell)
    scopes = [(tag, value) for tag, name, value in found.attributes if name == "scope"]
    assert scopes.count(("th", "row")) >= 10
    assert len([t for t in found.tags if t == "th"]) == len(scopes)


def test_what_a_record_holds_stays_text(pages: dict[str, str]) -> None:
    text = pages["hostile"]
    assert "<script" not in text.lower()
    found = parsed(text)
    shown, everything = cells.plain(HOSTILE), "".join(found.texts)
    compared = ("fp32", "bf16_mixed", "half_sr")
    assert all(f"{shown}{label}" in everything for label in compared)
    for place in (
        f"on {shown}, against",  # the data
        f"Machine{shown}{shown}",  # the hardware and the code
        f"Better: {shown}",  # a reason
        f"seed 0: {shown}",  # an error
        f"{shown} in {shown}: {shown}",  # a substitution
    ):
        assert place in re.sub(r"\n", "", everything), place
    assert "{{ 7*7 }}" in "".join(found.texts)
    assert "49" not in "".join(t for t in found.texts if "alert" in t)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)


def test_the_advice_is_the_answer_and_stays_text(tmp_path: Path) -> None:
    advice = Advice(HOSTILE, HOSTILE, {"a": HOSTILE, "b": "slower"}, {"c": HOSTILE}, (HOSTILE,))
    text = made(replace(comparison(2, tmp_path), advice=advice), [])
    assert "<script" not in text.lower()
    everything = "".join(parsed(text).texts)
    shown = cells.plain(HOSTILE)
    for line in (f"take {shown}: {shown}", f"not a: {shown}", "not b: slower", f"note: {shown}"):
        assert line in everything
    assert "No variant was shown" not in everything
    assert "times as fast as fp32" not in everything.partition("not b: slower")[0]


def test_skipped_folders_failures_and_notes_are_listed(tmp_path: Path) -> None:
    found = comparison(2, tmp_path)
    run = found.variants[1].runs[0]
    run.summary.error = "no space left on <device>"
    variants = (found.variants[0], replace(found.variants[1], failed=(run,)))
    skipped = tuple(Skipped(Path(f"out/{i}"), "still running") for i in range(40))
    text = "".join(parsed(made(replace(found, variants=variants, skipped=skipped), [])).texts)
    assert "40 folders skipped" in text
    assert "out/39: still running" in text
    assert "1 run failed:" in text
    assert "bf16_mixed, seed 0: no space left on <device>" in text
    assert "A note." in text


def test_a_variant_of_which_no_run_completed_is_shown(tmp_path: Path) -> None:
    found = comparison(2, tmp_path)
    gone = replace(found.variants[1], runs=(), failed=found.variants[1].runs)
    left = replace(found, variants=(found.variants[0], gone))
    text = "".join(parsed(made(left, ["difference", "loss"])).texts)
    assert "0 of 3" in text


# ---- configurations ------------------------------------------------------------------------------


@each(
    ("text", "problem"),
    [
        ("a: [1, 2\n", "it is not valid YAML"),
        ("- 1\n", "it is not a mapping"),
        ("a: " + "x" * 300_000, "it is larger than 256 KiB"),
        ("\udcff", "it is not valid YAML (line 1: not text (UTF-8))"),
        (None, "it cannot be read (No such file or directory)"),
    ],
)
def test_a_configuration_that_cannot_be_read_says_why(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UnreadableConfigError, match=re.escape(problem)):
        config_fields(read_config(tmp_path))
