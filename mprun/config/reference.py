"""Each field's name, legal values and meaning, read from the schema.

One source for three readers: error messages, `mprun --help`, and docs/site_build.py.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields, is_dataclass
from enum import EnumMeta
from functools import cache, cached_property
from importlib.resources import files
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mprun.config.schema import Config
from mprun.errors import UsageError, hint
from mprun.records.policy_columns import Legal
from mprun.records.run_config import yaml_text

T = TypeVar("T")

GROUPS = (
    *("recipe", "precision", "op_lists", "loss_scale", "batch"),
    *("speed", "parallel", "logger", "preset"),
)


def range_text(meta: Meta) -> str:
    """The numbers of a type as text: "0 or more and below 1"."""
    low = f"{meta.ge:g} or more" if meta.gt is None else f"above {meta.gt:g}"
    # ten digits: the largest limit is 4294967295
    if meta.lt is not None:
        return f"{low} and below {meta.lt:.10g}"
    return low if meta.le is None else f"{low} and at most {meta.le:.10g}"


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

    @cached_property
    def choices(self) -> tuple[str, ...]:
        """The texts that the value, or an item of a list, can be; empty if others can be too."""
        legal = _noted(self.type, Legal)
        return () if legal is None else legal.values

    @cached_property
    def limits(self) -> Meta | None:
        """The interval of a number that has one."""
        return _noted(self.type, Meta)

    @property
    def default_text(self) -> str:
        """The default as a user would type it; "set by its group" if it is in conf/."""
        if self.default == MISSING:
            return "set by its group"
        if isinstance(self.default, str) and self.default.startswith("${"):
            return self.default[2:-1]  # another field's value
        return yaml_text(self.default)

    def set_in(self, config: Any, value: Any, place: str, path: str = "") -> None:
        """Set the field in an OmegaConf configuration, which converts the value to its type.

        `place` is where it was given, as the beginning of a message; `path` the place in `config`,
        if it is not the field's key.
        """
        try:
            OmegaConf.update(config, path or self.key, value)
        except (OmegaConfBaseException, ValueError, TypeError):
            near = "" if isinstance(value, list) else hint(str(value), self.choices)
            raise UsageError(f"{place}: {self.key} is {self.legal}{near}") from None

    def check(self, value: Any) -> None:
        """Raise `UsageError` for a value outside of the range, or that is none of the choices."""
        is_word = isinstance(value, str) and bool(self.choices)  # of a number, or a word
        if not (is_word or self.limits is None or value is None or self._is_in_range(value)):
            raise UsageError(f"{self.key}={value}: legal is {range_text(self.limits)}")
        if not self.choices or (self.limits is not None and not is_word):
            return
        for text in value if get_origin(self.type) is list else [value]:
            if text not in self.choices:
                near = hint(text, self.choices)
                raise UsageError(f"'{self.key}={text}': {self.key} is {self.legal}{near}")

    def _is_in_range(self, value: float) -> bool:
        """Whether a number is finite, which types do not say, and within the limits."""
        try:
            msgspec.convert(value, Annotated[float, self.limits])
        except msgspec.ValidationError:
            return False
        return math.isfinite(value)


def _noted(kind: Any, note: type[T]) -> T | None:
    """What `Annotated` says in a type, in a member of a union or in the items of a list."""
    for arg in (*getattr(kind, "__metadata__", ()), *(_noted(x, note) for x in get_args(kind))):
        if isinstance(arg, note):
            return arg
    return None


def describe_type(kind: Any) -> str:
    """The values of a field's type, as text."""
    if get_origin(kind) is Annotated:
        if (legal := _noted(kind, Legal)) is None:
            return describe_type(get_args(kind)[0])
        return ("one of " if len(legal.values) > 1 else "") + ", ".join(legal.values)
    if get_origin(kind) in (Union, UnionType):
        inner = [describe_type(a) for a in get_args(kind) if a is not NoneType]
        return " or ".join(inner) + (", or null" if NoneType in get_args(kind) else "")
    if isinstance(kind, EnumMeta):  # of a recipe
        return "one of " + ", ".join(kind.__members__)
    if get_origin(kind) is list:
        of = describe_type(get_args(kind)[0])
        return "a list [name, ...]" + (of.removeprefix("one") if of.startswith("one of") else "")
    if get_origin(kind) is dict:
        return f"a mapping {{name: {describe_type(get_args(kind)[1])}, ...}}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return "value" if kind is Any else names.get(kind, str(kind))


@cache
def docs_of(cls: type) -> dict[str, str]:
    """Field name to the string literal that follows the field in the source of its class."""
    docs: dict[str, str] = {}  # from the source, since Python keeps no docstring of a field
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, following in pairwise(node.body):
            match field, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=text)),
                ):
                    docs[name] = str(text)
    return docs


def walk(cls: type = Config, prefix: str = "") -> Iterator[Field]:
    """Every leaf field below `cls`, depth first, in the schema's order."""
    hints, docs = get_type_hints(cls, include_extras=True), docs_of(cls)
    for item in fields(cls):
        kind, key = hints[item.name], f"{prefix}{item.name}"
        if is_dataclass(kind):
            yield from walk(kind, f"{key}.")  # type: ignore[arg-type]
        else:
            made = item.default_factory
            default = item.default if made is NO_DEFAULT else made()
            default = MISSING if default is NO_DEFAULT else default
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


def keys_called(name: str, known: Iterable[str]) -> list[str]:
    """The keys that end in a name's last part."""
    last = name.rpartition(".")[2]
    left_out = {name, *(f"{group}.name" for group in GROUPS)}  # an option's name is not set alone
    return [key for key in known if key.rpartition(".")[2] == last and key not in left_out]


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


# ---- values as texts for Hydra and OmegaConf, which give some characters a meaning ---------------


def quoted(value: object) -> str:
    """Any text as a quoted value of an override."""
    text = str(value)
    inner = text.replace("'", "\\'")
    end = "\\" * (len(inner) - len(inner.rstrip("\\")))  # a backslash would hide the last quote
    return f"'{inner}{end}'"


def as_text(value: Any) -> Any:
    """Plain values for OmegaConf that it does not interpolate: `${` in a text stays what it is."""
    if isinstance(value, str):
        # A backslash escapes `${`, and the backslashes before it.
        return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", value)
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    return [as_text(item) for item in value] if isinstance(value, list) else value


def override_text(value: Any) -> str:
    """A plain value in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{override_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(override_text, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else str(value).lower()
    return quoted(value)
