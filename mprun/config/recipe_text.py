"""The parameters and defaults of a recipe's file, read from its text, for `--help`.

As for `DEFAULTS` no code of the file runs, so torch is not imported and help is shown at once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from mprun.config.recipe_file import RecipeFile, defaults_of, parsed, read_source
from mprun.errors import UsageError, hint

BASES = ("Recipe", "Classification")
"""Classes of mprun that a recipe extends."""
NEEDED = {"model", "data"}
"""Methods without which a class is only the base of recipes."""


@dataclass(frozen=True)
class Parameter:
    """A field of a recipe's class, `recipe.model.<name>`."""

    name: str
    type: str
    default: str | None
    """As it is written; None where the user has to give a value."""
    doc: str


@dataclass(frozen=True)
class RecipeText:
    """What a recipe's file says about itself."""

    doc: str
    """The first paragraph of its docstring."""
    functions: tuple[str, ...]
    classes: dict[str, tuple[Parameter, ...]]
    """The recipes among its classes, the one that is named or all, with their parameters."""
    defaults: dict[str, Any]


def recipe_text(file: RecipeFile) -> RecipeText:
    """Read a recipe's file.

    Raises:
        UsageError: it cannot be read, or has no such class.
    """
    tree = parsed(file.path, read_source(file.path))
    bodies = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    recipes = {
        name: node
        for name, node in bodies.items()
        if _is_recipe(node, bodies) and _methods(node, bodies) >= NEEDED
    }
    if file.kind:
        if file.kind not in bodies:
            legal = f"; legal: {', '.join(recipes)}" if recipes else ""
            raise UsageError(
                f"recipe={file.text}: the file has no class {file.kind}"
                f"{hint(file.kind, bodies)}{legal}"
            )
        recipes = {file.kind: bodies[file.kind]}
    return RecipeText(
        doc=_paragraph(tree),
        functions=tuple(node.name for node in tree.body if isinstance(node, ast.FunctionDef)),
        classes={name: _parameters(node, bodies) for name, node in recipes.items()},
        defaults=defaults_of(file.path, tree),
    )


def _is_recipe(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> bool:
    """Whether a class extends one of mprun's, directly or by classes of the file."""
    bases = [_last_name(base) for base in node.bases]
    return any(
        base in BASES or (base != node.name and base in known and _is_recipe(known[base], known))
        for base in bases
    )


def _methods(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    """The methods of a class and of the classes of the file that it extends."""
    own = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    bases = [base for base in map(_last_name, node.bases) if base in known and base != node.name]
    return own.union(*(_methods(known[base], known) for base in bases))


def _last_name(base: ast.expr) -> str:
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def _parameters(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> tuple[Parameter, ...]:
    """Those of the class and, before them, of the classes of the file that it extends."""
    found: dict[str, Parameter] = {}
    for base in map(_last_name, node.bases):
        if base in known and base != node.name:
            found |= {one.name: one for one in _parameters(known[base], known)}
    found |= {one.name: one for one in _own_parameters(node)}
    return tuple(found.values())


def _own_parameters(node: ast.ClassDef) -> Iterator[Parameter]:
    for field, following in zip_longest(node.body, node.body[1:]):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        kind = ast.unparse(field.annotation)
        if "ClassVar" in kind:
            continue
        default = None if field.value is None else ast.unparse(field.value)
        yield Parameter(field.target.id, kind, default, _text_of(following))


def _text_of(node: ast.stmt | None) -> str:
    """The string that a statement consists of, else nothing."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split()) if isinstance(node.value.value, str) else ""
    return ""


def _paragraph(tree: ast.Module) -> str:
    return " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
