"""The notebook of examples/, executed: `python -m tests.examples.notebook` writes its outputs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

PATH = Path(__file__).parents[2] / "examples" / "mprun_tour.ipynb"
TIMEOUT_S = 300
"""For a cell."""


def read() -> Any:
    """The notebook as it is committed."""
    return nbformat.read(PATH, as_version=4)


def executed(folder: Path) -> Any:
    """The notebook with the outputs of an execution in a folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    book = read()
    client = NotebookClient(book, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}})
    client.execute()
    for cell in code_cells(book):  # notes name files of this machine
        cell.outputs = [x for x in cell.outputs if x.output_type in ("execute_result", "stream")]
        cell.metadata = {}
    book.metadata = {"kernelspec": {**book.metadata.kernelspec}}
    return book


def code_cells(book: Any) -> list[Any]:
    """The cells that run."""
    return [cell for cell in book.cells if cell.cell_type == "code"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        nbformat.write(executed(Path(name)), PATH)
