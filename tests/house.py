"""The figures of the house: lines, modules, rooms, arrows, circles, comments, lengths of functions.

    python -m tests.house

prints them beside the limits of docs/ARCHITECTURE.md, which tests/test_architecture.py checks.
A room is a folder at the top of `mprun/`; a loose module belongs to the room whose row names it. An
arrow is a pair of rooms of which one imports the other, wherever the import stands. A circle is a
set of rooms, or of files, that import each other; imports for type checking count.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mprun"
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
PRAGMAS = ("# noqa", "# type:", "# pragma")


@cache
def page() -> str:
    """The page of the architecture."""
    return PAGE.read_text(encoding="utf-8")


def table_rows(heading: str) -> list[list[str]]:
    """The cells of each row of the first table below a heading of the page."""
    text = page()[page().index(f"## {heading}\n") :]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert rows, f"no table below {heading!r}"
    return [
        [cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()[2:]
    ]


@cache
def rooms() -> dict[str, set[str]]:
    """Each room, from the top, to the rooms that it may import; the table of the page."""
    return {
        re.findall(r"[\w.]+", cells[0])[0]: set(re.findall(r"`([\w.]+)`", cells[2]))
        for cells in table_rows("Imports")
    }


@cache
def loose_modules() -> dict[str, str]:
    """Each loose module to the room whose row names it: `recipe` to `train`."""
    pairs = {}
    for cells in table_rows("Imports"):
        room, *loose = re.findall(r"`([\w.]+?)(?:\.py)?`", cells[0])
        pairs.update(dict.fromkeys(loose, room))
    return pairs


def limits() -> dict[str, int]:
    """Figure to its limit; the second table of the page."""
    return {cells[0]: int(cells[1].replace(",", "")) for cells in table_rows("Limits")}


@cache
def sources() -> dict[str, Path]:
    """Full module name to its file, of all modules of the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {module_name(path): path for path in paths}


def module_name(path: Path) -> str:
    """`mprun.train.loop` of its file; a package has its own name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> set[str]:
    """Full names of what a syntax tree imports, wherever: modules, and names in modules."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_modules(tree: ast.AST) -> set[str]:
    """The modules of mprun that a syntax tree imports; the package, with its version, is none."""
    known = sources()
    names = {name for name in imported(tree) if name.startswith("mprun.")}
    found = {name if name in known else name.rpartition(".")[0] for name in names}
    return {name for name in found if name in known} - {"mprun"}


def room_of(module: str) -> str:
    """The room of a module: the first folder of its name, or that of a loose module."""
    first = module.split(".")[1]
    return loose_modules().get(first, first)


@cache
def file_graph() -> dict[str, set[str]]:
    """Module to the modules that it imports; without the public names of the package."""
    skipped = {"mprun", "mprun.__main__"}
    return {
        name: own_modules(tree_of(path)) - {name}
        for name, path in sources().items()
        if name not in skipped
    }


@cache
def room_graph() -> dict[str, set[str]]:
    """Room to the rooms that it imports."""
    graph: dict[str, set[str]] = {}
    for name, needs in file_graph().items():
        room = room_of(name)
        graph.setdefault(room, set()).update({room_of(x) for x in needs} - {room})
    return graph


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A circle of a graph, its first node again at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def comments(text: str) -> Iterator[str]:
    """The comments of a source text, without those that only speak to tools."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(PRAGMAS):
            yield token.string


def function_lengths() -> list[int]:
    """Lines of each function, from `def` to its end."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in sources().values()
        for node in ast.walk(tree_of(path))
        if isinstance(node, kinds)
    ]


def line_count(folder: Path) -> int:
    """Lines of all Python files below a folder."""
    return sum(len(path.read_bytes().splitlines()) for path in folder.rglob("*.py"))


def figures() -> dict[str, int]:
    """All figures, under the names of the table of limits."""
    lengths = function_lengths()
    texts = [path.read_text(encoding="utf-8") for path in sources().values()]
    return {
        "folders at the top of mprun/": len([*PACKAGE.glob("*/__init__.py")]),
        "loose modules": len(
            {*PACKAGE.glob("*.py")} - {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}
        ),
        "arrows between rooms": sum(map(len, room_graph().values())),
        "lines in mprun/": line_count(PACKAGE),
        "modules in mprun/": len(sources()),
        "lines in tests/": line_count(ROOT / "tests"),
        "comments in mprun/, at least": sum(1 for text in texts for _ in comments(text)),
        "lines of a function, median": round(statistics.median(lengths)),
        "lines of a function, 90th percentile": round(statistics.quantiles(lengths, n=10)[-1]),
    }


def main() -> int:
    """Print each figure beside its limit; the exit status is 1 where one is passed."""
    passed = False
    for name, value in figures().items():
        limit = limits()[name]
        over = value < limit if name.endswith("at least") else value > limit
        passed |= over
        print(f"{name:40} {value:8,} {limit:8,}{'  PASSED' if over else ''}")
    for kind, graph in (("rooms", room_graph()), ("files", file_graph())):
        print(f"circle of {kind:30} {' > '.join(circle(graph)) or 'none'}")
        passed |= bool(circle(graph))
    return int(passed)


if __name__ == "__main__":
    sys.exit(main())
