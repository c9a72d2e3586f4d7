"""The notebook runs, shows a verdict, and its committed outputs have the form of today's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.notebook import PATH, code_cells, executed, read

MOST_CELLS, MOST_BYTES = 15, 200_000


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook, executed in an empty folder; a cell that raises is an error."""
    return executed(tmp_path_factory.mktemp("notebook"))


def outputs(book: Any) -> str:
    """All text of the outputs."""
    shown = [output for cell in code_cells(book) for output in cell.outputs]
    return "\n".join(x.get("text") or "".join(map(str, x.data.values())) for x in shown)


def form(book: Any) -> list[Any]:
    """What does not depend on the machine: kinds of outputs, headings, first cells, pictures."""
    rows = []
    for cell in code_cells(book):
        for output in cell.outputs:
            html = output.get("data", {}).get("text/html", "")
            firsts = re.findall(r"<tr><t[hd][^>]*>([^<]*)", html)
            heads = [re.sub(r"\d.* %", "", x) for x in re.findall(r"<th[^>]*>(.*?)</th>", html)]
            rows.append((output.output_type, firsts, heads, html.count("<figure>")))
    return rows


def test_it_goes_from_a_model_to_a_verdict(book: Any) -> None:
    text = outputs(book)
    assert re.search(r"^bf16_mixed: (equivalent|better|worse|inconclusive)", text, re.MULTILINE)
    assert "hardware: cpu, " in text
    assert text.count("<figure>") >= 4


def test_the_committed_outputs_are_of_this_code(book: Any) -> None:
    committed = read()
    assert form(committed) == form(book), "run python -m tests.examples.notebook"
    assert "hardware: cpu, " in outputs(committed)
    assert [cell.source for cell in committed.cells] == [cell.source for cell in book.cells]


def test_it_is_short_and_names_no_folder_of_a_machine() -> None:
    content = PATH.read_text(encoding="utf-8")
    assert len(read().cells) <= MOST_CELLS
    assert len(content) <= MOST_BYTES
    assert not re.search(r"/(home|tmp|work|root)/", content)


def test_its_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", "".join(cell.source for cell in read().cells))
    assert targets
    assert [x for x in targets if not (Path(PATH).parent / x).exists()] == []
