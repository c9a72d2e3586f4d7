"""The architecture: rooms, imports and limits of docs/ARCHITECTURE.md hold in the tree."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests import house

WITHOUT_TORCH = (
    "mprun.records.",
    "mprun.config.",
    "mprun.study.compare.",
    "mprun.study.report.",
    "mprun.errors",
)
"""Help and mistakes are answered at once: torch takes seconds."""
OF_EACH_TRAINER = {"class MprunCallback"}
"""The same thing for several trainers: its module names which."""


def forbidden(module: str, tree: ast.AST) -> set[str]:
    """What a module imports and may not."""
    own = house.room_of(module)
    allowed = {own, *house.rooms()[own]}
    wrong = {x for x in house.own_modules(tree) if house.room_of(x) not in allowed}
    roots = {name.split(".")[0] for name in house.imported(tree)}
    if f"{module}.".startswith(WITHOUT_TORCH):
        wrong |= roots & {"torch", "torchvision", "torchmetrics"}
    if own != "config":  # the only room that knows Hydra
        wrong |= roots & {"hydra"}
    return wrong


def test_imports_follow_the_table() -> None:
    wrong = {
        module: found
        for module, path in house.sources().items()
        if module in house.file_graph() and (found := forbidden(module, house.tree_of(path)))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mprun.precision.apply", "from mprun.train.loop import Trainer"),
        ("mprun.watch.audit", "def late():\n    from mprun.train import loop"),
        ("mprun.train.loop", "import mprun.cli.main"),
        ("mprun.study.compare.load", "import torch"),
        ("mprun.errors", "from torch import Tensor"),
        ("mprun.train.assemble.plan", "from hydra import compose"),
        ("mprun.records.reader", "if TYPE_CHECKING:\n    from mprun.config import schema"),
    ],
)
def test_a_forbidden_import_is_noticed(module: str, source: str) -> None:
    assert forbidden(module, ast.parse(source))


def test_rooms_import_only_rooms_below() -> None:
    order = list(house.rooms())
    for room, needs in house.rooms().items():
        assert needs <= set(order[order.index(room) + 1 :]), room


def test_every_row_of_the_table_is_needed() -> None:
    assert house.room_graph() == house.rooms()


def test_files_form_no_circle() -> None:
    assert house.circle(house.file_graph()) == []


def test_a_circle_is_noticed() -> None:
    assert house.circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert house.circle({"a": {"b", "c"}, "b": {"c"}}) == []


@pytest.mark.parametrize("name", house.limits())
def test_a_limit_is_kept(name: str) -> None:
    value, limit = house.figures()[name], house.limits()[name]
    assert value >= limit if name.endswith("at least") else value <= limit


def test_the_map_is_the_tree() -> None:
    text = house.page()
    start = text.index("mprun/\n", text.index("## The map"))
    lines = text[start : text.index("```", start)].splitlines()[1:]
    shown = {m[1] for line in lines if (m := re.match(r"  ([\w.]+/?) ", line))}
    loose = {p.name for p in house.PACKAGE.glob("*.py")} - {"__main__.py"}
    assert shown == loose | {f"{p.parent.name}/" for p in house.PACKAGE.glob("*/__init__.py")}


def test_tests_mirror_the_package() -> None:
    packages = {p.parent.relative_to(house.PACKAGE) for p in house.PACKAGE.glob("*/__init__.py")}
    tests = {
        p.parent.relative_to(house.ROOT / "tests")
        for p in (house.ROOT / "tests").glob("*/__init__.py")
    }
    assert packages <= tests


def test_a_module_name_and_a_class_name_stand_for_one_thing() -> None:
    places = defaultdict[str, list[Path]](list)
    for path in house.sources().values():
        if path.stem != "__init__" and path.parent != house.PACKAGE:  # those are public names
            places[f"module {path.stem}"].append(path)
        for node in ast.walk(house.tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places[f"class {node.name.lstrip('_')}"].append(path)
    repeated = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert {*repeated} <= OF_EACH_TRAINER
