"""Rows of text as Markdown, CSV and HTML: one way for results and for comparisons."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from html import escape

FORMULA = ("=", "+", "-", "@")
"""A cell that begins with one is a formula in a spreadsheet, which can start programs."""

Rows = Sequence[Sequence[str]]
"""Rows of cells, the headings first; lines of a cell after the first are secondary."""


def markdown_text(text: str) -> str:
    """Text escaped for Markdown, and for the HTML in it."""
    escaped = re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", text)
    return escaped.replace("&", "&amp;")


def markdown_table(rows: Rows, is_right: Sequence[bool]) -> str:
    """A table of Markdown, without a line end.

    Args:
        rows: with the headings.
        is_right: for each column, whether it is aligned at the right.
    """
    lines = [f"| {' | '.join(markdown_text(one_line(x)) for x in row)} |" for row in rows]
    lines.insert(1, f"|{'|'.join('---:' if right else '---' for right in is_right)}|")
    return "\n".join(lines)


def one_line(cell: str) -> str:
    """A cell in one line: `12.50 (11.25 to 14.75)`."""
    first, *others = cell.split("\n")
    rest = " ".join(others)
    return f"{first} ({rest})" if rest else first


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """CSV; texts that a spreadsheet would compute begin with a quotation mark."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([_shown(x) if isinstance(x, str) else x for x in row] for row in rows)
    return out.getvalue()


def _shown(text: str) -> str:
    return f"'{text}" if text.startswith(FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def html_table(rows: Rows, is_right: Sequence[bool], title: str) -> str:
    """A table of HTML without style sheet or script; everything in it is escaped."""
    head, *body = [
        "".join(
            f'<{tag} style="text-align:{"right" if right else "left"}">'
            f"{escape(cell).replace(chr(10), '<br>')}</{tag}>"
            for cell, right in zip(row, is_right, strict=True)
        )
        for row, tag in zip(rows, ["th", *["td"] * (len(rows) - 1)], strict=True)
    ]
    lines = "\n".join(f"<tr>{row}</tr>" for row in body)
    return (
        f"<table>\n<caption>{escape(title)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{lines}\n</tbody>\n</table>"
    )
