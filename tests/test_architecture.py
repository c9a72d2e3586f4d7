"""The architecture: the map in docs/ARCHITECTURE.md is the tree, and imports follow its table."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mprun"
PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
SOURCES = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "__init__.py", PACKAGE / "__main__.py"})
WITHOUT_TORCH = {"records", "compare", "report", "results", "config", "console", "errors", "cli"}
MAX_LOOSE_MODULES = 6
OF_EACH_TRAINER = {"class MprunCallback"}
"""The same thing for several trainers: its module names which."""


def import_table() -> dict[str, set[str]]:
    """Package to the packages it may import, from the table on the page."""
    rows = re.findall(r"^\| `([^|]+)` \| (.*?) ?\|", PAGE, re.MULTILINE)
    table: dict[str, set[str]] = {}
    for names, allowed in rows:
        for name in re.findall(r"[\w.]+", names):
            table[name] = set(re.findall(r"`([\w.]+)`", allowed))
    return table


TABLE = import_table()
EVERYWHERE = TABLE["all"]


def package_of(path: Path) -> str:
    """The package of a module below `mprun/`, or the name of a loose module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(source: str) -> set[str]:
    """Full names of the modules that a source text imports, wherever in the text."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "mprun":
            names |= {f"mprun.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def forbidden(package: str, source: str) -> set[str]:
    """What a module of a package imports and may not."""
    names = imported(source)
    own = {name.split(".")[1] for name in names if name.startswith("mprun.")}
    allowed = TABLE[package] | EVERYWHERE | {package, "__version__", "NEWEST_TORCH", "release"}
    if package not in WITHOUT_TORCH:
        allowed |= {"_torch", "devices"}
    wrong = own - allowed
    roots = {name.split(".")[0] for name in names}
    if package in WITHOUT_TORCH - {"cli"}:  # commands import torch when they run
        wrong |= roots & {"torch", "torchvision"}
    if package != "config":
        wrong |= roots & {"hydra"}
    return wrong


def test_imports_follow_the_table() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in SOURCES
        if (found := forbidden(package_of(path), path.read_text(encoding="utf-8")))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("precision", "from mprun.train.loop import Trainer"),
        ("precision", "def late():\n    from mprun import numerics"),
        ("train", "import mprun.run"),
        ("compare", "import torch"),
        ("report", "from mprun.precision._torch import op_name"),
        ("assemble", "from hydra import compose"),
    ],
)
def test_a_forbidden_import_is_noticed(package: str, source: str) -> None:
    assert forbidden(package, source)


def test_the_table_has_a_row_for_every_package_and_no_cycle() -> None:
    packages = {package_of(path) for path in SOURCES}
    assert packages == set(TABLE) - {"all"}
    assert set().union(*TABLE.values()) <= packages
    order: list[str] = []
    rest = dict(TABLE)
    del rest["all"]
    while rest:
        free = [name for name, needs in rest.items() if needs <= set(order)]
        assert free, f"a cycle among {sorted(rest)}"
        order += free
        for name in free:
            del rest[name]


def test_the_map_is_the_tree() -> None:
    start = PAGE.index("mprun/\n", PAGE.index("## The map"))
    lines = PAGE[start : PAGE.index("```", start)].splitlines()[1:]
    shown = {m[1] for line in lines if (m := re.match(r"  ([\w.]+/?) ", line))}
    packages = {f"{p.parent.name}/" for p in PACKAGE.glob("*/__init__.py")}
    loose = {p.name for p in PACKAGE.glob("*.py")} - {"__main__.py"}
    assert shown == packages | loose
    assert len(loose - {"__init__.py"}) <= MAX_LOOSE_MODULES


def test_tests_mirror_the_package() -> None:
    packages = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert packages <= {p.parent.name for p in (ROOT / "tests").glob("*/__init__.py")}


def test_a_module_name_and_a_class_name_stand_for_one_thing() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        if path.stem != "__init__":
            places[f"module {path.stem}"].append(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[f"class {node.name.lstrip('_')}"].append(path)
    repeated = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert {*repeated} <= OF_EACH_TRAINER


@pytest.mark.parametrize(
    ("word", "most"), [("chosen", 40), ("found", 250), ("told", 20), ("words", 40)]
)
def test_private_words_stay_rare(word: str, most: int) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert len(re.findall(rf"\b{word}\b", text, re.IGNORECASE)) <= most
