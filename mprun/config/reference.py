"""Each field's name, legal values and meaning, read from the schema.

One source for three readers: error messages, `mprun --help`, and docs/reference/configuration.md.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, EnumMeta
from functools import cache
from importlib.resources import files
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from mprun.config.schema import Config

GROUPS = (
    *("recipe", "precision", "op_lists", "loss_scale", "batch"),
    *("speed", "parallel", "logger", "preset"),
)


@dataclass(frozen=True)
class Field:
    """One leaf of the configuration, for example `train.batch_size`."""

    key: str
    type: Any
    default: Any
    doc: str

    @property
    def legal(self) -> str:
        """The legal values as text, for example "a whole number, or null"."""
        return describe_type(self.type)

    @property
    def choices(self) -> list[str]:
        """The names of an enum's members; empty for other types."""
        return enum_names(self.type) if isinstance(self.type, EnumMeta) else []

    @property
    def item_choices(self) -> list[str]:
        """The same of the items of a list."""
        kind = get_args(self.type)[0] if get_origin(self.type) is list else None
        return enum_names(kind) if isinstance(kind, EnumMeta) else []

    @property
    def default_text(self) -> str:
        """The default as a user would type it; "set by its group" if it is in conf/."""
        if self.default == MISSING:
            return "set by its group"
        if isinstance(self.default, Enum):
            return str(self.default.name)
        if isinstance(self.default, list):
            return f"[{','.join(x.name if isinstance(x, Enum) else str(x) for x in self.default)}]"
        if self.default is None:
            return "null"
        if isinstance(self.default, str) and self.default.startswith("${"):
            return self.default[2:-1]  # another field's value
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


def enum_names(kind: EnumMeta) -> list[str]:
    """What a user types for each member."""
    return list(kind.__members__)


def describe_type(kind: Any) -> str:
    """The values of a field's type, as text."""
    if get_origin(kind) in (Union, UnionType):
        inner = [describe_type(a) for a in get_args(kind) if a is not NoneType]
        return " or ".join(inner) + (", or null" if NoneType in get_args(kind) else "")
    if isinstance(kind, EnumMeta):
        return "one of " + ", ".join(enum_names(kind))
    if get_origin(kind) is list:
        (inner,) = get_args(kind)
        of = f" of {', '.join(enum_names(inner))}" if isinstance(inner, EnumMeta) else ""
        return f"a list [name, ...]{of}"
    if get_origin(kind) is dict:
        return f"a mapping {{name: {describe_type(get_args(kind)[1])}, ...}}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return "value" if kind is Any else names.get(kind, str(kind))


@cache
def docs_of(cls: type) -> dict[str, str]:
    """Field name to the string literal that follows the field in the class's source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for node, following in pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[node.target.id] = str(following.value.value)
    return docs


def walk(cls: type = Config, prefix: str = "") -> Iterator[Field]:
    """Every leaf field below `cls`, depth first, in the schema's order."""
    hints, docs = get_type_hints(cls), docs_of(cls)
    for item in fields(cls):
        kind, key = hints[item.name], f"{prefix}{item.name}"
        if is_dataclass(kind):
            yield from walk(kind, f"{key}.")  # type: ignore[arg-type]
        else:
            made = item.default_factory
            default = item.default if made is NO_DEFAULT else made()
            yield Field(key, kind, default, docs.get(item.name, ""))


@cache
def leaves() -> dict[str, Field]:
    """Key to field, for every leaf."""
    return {f.key: f for f in walk()}


@cache
def sections() -> tuple[str, ...]:
    """Keys with fields below them: `train`, `train.optimizer`, ..."""
    keys = []
    for key in leaves():
        parts = key.split(".")
        keys += [".".join(parts[:n]) for n in range(1, len(parts))]
    return tuple(dict.fromkeys(keys))


@cache
def options(group: str) -> dict[str, str]:
    """The shipped options of a group, with the first comment of each file."""
    folder = files("mprun.conf") / group
    comment_of = {}
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".yaml"):
            lines = entry.read_text(encoding="utf-8").splitlines()
            comments = [x[1:].strip() for x in lines if x.startswith("# ") and "@package" not in x]
            comment_of[entry.name.removesuffix(".yaml")] = comments[0] if comments else ""
    return comment_of
