"""Rows of text as Markdown, CSV and HTML: one way for results and for comparisons."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from html import escape

FORMULA = ("=", "+", "-", "@")
"""A cell that begins with one is a formula in a spreadsheet, which can start programs."""
NUMBER = re.compile(r"[-+](\d+\.?\d*(e[-+]?\d+)?|inf|nan)", re.IGNORECASE)

Rows = Sequence[Sequence[str]]
"""Rows of cells, the headings first; lines of a cell after the first are secondary."""


def markdown_text(text: str) -> str:
    """Text escaped for Markdown, and for the HTML in it."""
    escaped = re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", text)
    return escaped.replace("&", "&amp;")


def markdown_table(rows: Rows, is_right: Sequence[bool]) -> str:
    """A table of Markdown, without a line end; the columns with `is_right` are aligned so."""
    lines = [f"| {' | '.join(markdown_text(one_line(x)) for x in row)} |" for row in rows]
    lines.insert(1, f"|{'|'.join('---:' if right else '---' for right in is_right)}|")
    return "\n".join(lines)


def one_line(cell: str) -> str:
    """A cell in one line: `12.50 (11.25 to 14.75)`."""
    first, *others = cell.split("\n")
    return f"{first} ({' '.join(others)})" if others else first


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """CSV; texts that a spreadsheet would compute begin with a quotation mark."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([*map(_shown, row)] for row in rows)
    return out.getvalue()


def _shown(cell: object) -> object:
    is_formula = isinstance(cell, str) and cell.startswith(FORMULA) and not NUMBER.fullmatch(cell)
    return f"'{cell}" if is_formula else cell


def html_table(rows: Rows, is_right: Sequence[bool], title: str) -> str:
    """A table of HTML without style sheet or script; everything in it is escaped."""
    lines = []
    for tag, row in zip(["th", *["td"] * len(rows)], rows, strict=False):
        texts = [escape(cell).replace("\n", "<br>") for cell in row]
        sides = ["right" if right else "left" for right in is_right]
        cells = zip(sides, texts, strict=True)
        lines.append("".join(f'<{tag} style="text-align:{x}">{y}</{tag}>' for x, y in cells))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n<caption>{escape(title)}</caption>\n{body}\n</table>"
