"""The result of a measurement, and the one way to show it.

A function that measures returns a `Result`, and `show` puts it on the terminal and writes
its files. In Python it is also JSON, CSV, Markdown, and HTML in a notebook. So a command is three
steps: parse the arguments, measure (`mprun.inspect`), show. No torch.
"""

from __future__ import annotations

import json
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from mprun.errors import EXIT_OK, RunFailedError
from mprun.records.console import (
    JobProgress,
    ReportPart,
    print_line,
    print_table,
    print_text,
    stderr_console,
    stdout_console,
)
from mprun.records.console.fitted_table import FittedTable, markdown_text, without_controls
from mprun.records.files import jsonable, write_atomic, write_files

TRACEBACK = "traceback.txt"
PICTURE_PX = 760  # The width of a picture in a notebook


@dataclass(frozen=True, repr=False)
class Result:
    """What `run`, `compare` and `check` return; `print(mprun.run("recipe=my.py"))` shows it."""

    record: Any
    """All of it, for programs: a dataclass, a msgspec Struct, or plain values."""
    parts: Sequence[FittedTable | str] = ()
    """What the terminal shows, in this order: the sentence that answers first, then tables and
    notes."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Name to content of each file that the command writes."""
    warnings: Sequence[str] = ()
    """Lines for standard error."""
    status: int = EXIT_OK
    """The exit status of the command."""
    folder: Path | None = None
    """The folder of the run that it is of."""
    draw: Callable[[], Mapping[str, str]] = dict
    """Draws what a notebook shows below: SVGs by their captions; nothing by default."""

    @property
    def json(self) -> str:
        """The record as indented JSON; floats that are not finite are strings."""
        content = jsonable(msgspec.to_builtins(self.record, enc_hook=str))
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    @property
    def tables(self) -> list[FittedTable]:
        """The tables among the parts; each has `csv`, `markdown` and `html`."""
        return [part for part in self.parts if isinstance(part, FittedTable)]

    @property
    def csv(self) -> str:
        """The first table as CSV, with the cells that are shown; empty if there is none."""
        return next((table.csv for table in self.tables), "")

    @property
    def markdown(self) -> str:
        """All sentences and tables as Markdown."""
        blocks = []
        for part in self.parts:
            if isinstance(part, str):
                blocks.append(markdown_text(without_controls(part)).strip().replace("\n", "  \n"))
            else:
                blocks += [f"**{markdown_text(part.title)}**" if part.title else "", part.markdown]
                blocks.append(markdown_text(part.caption))
        return "\n\n".join(filter(None, blocks)) + "\n"

    def _repr_html_(self) -> str:
        """All sentences, tables and pictures as HTML, for a notebook."""
        blocks = []
        for part in self.parts:
            blocks += [part.html] if isinstance(part, FittedTable) else []
            text = escape(without_controls(part if isinstance(part, str) else part.caption))
            blocks += [f"<p>{text}</p>".replace("\n", "<br>")] if text else []
        drawn = [("", x) for name, x in self.files.items() if name.endswith(".svg")]
        blocks += [_picture(*x) for x in (*drawn, *self.draw().items())]
        return "\n".join(blocks)

    def __str__(self) -> str:
        """All sentences and tables, as in a pipe."""
        return "\n".join(without_controls(x) if isinstance(x, str) else str(x) for x in self.parts)

    __repr__ = __str__


def _picture(caption: str, svg: str | bytes) -> str:
    """A drawing with a caption."""
    # an image, not the SVG's elements: their ids and styles would be those of the whole notebook
    data = b64encode(svg.encode() if isinstance(svg, str) else svg).decode()
    image = f'<img width="{PICTURE_PX}" alt="" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def show(result: Result, folder: Path | None = None) -> int:
    """Show a result, write its files into a folder, if there is one, and name them; exit status."""
    for part in result.parts:
        if isinstance(part, str):
            print_text(stdout_console(), part)
        else:
            print_table(stdout_console(), part)
    if folder is not None and result.files:
        names = write_files(folder, result.files)
        print_line(stdout_console(), f"written: {folder}/{', '.join(names)}")
    for warning in result.warnings:
        print_line(stderr_console(), warning)
    return result.status


@contextmanager
def measuring(folder: Path | None = None) -> Iterator[ReportPart]:
    """Inside, a command measures: its progress is shown on standard error.

    The traceback of an error in the user's code is written into the folder, if there is one, and
    the `RunFailedError` names the file.
    """
    try:
        with JobProgress(stderr_console()) as progress:
            yield progress.begin
    except RunFailedError as error:
        if error.__cause__ is None or folder is None:
            raise
        text = "".join(traceback.format_exception(error.__cause__))
        try:
            write_atomic(folder / TRACEBACK, text.encode(errors="replace"))
            where = f"the traceback is in {folder / TRACEBACK}"
        except OSError:
            where = "its traceback could not be written"
        raise RunFailedError(f"{error} ({where})") from None
