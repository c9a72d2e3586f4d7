"""A recipe in a Python file: `recipe=path/to/my.py`, without YAML.

The file is read as text: composing a configuration runs no code of it. So mistakes are answered
without torch, and a file from someone else is not run before the user was told. Its `DEFAULTS` are
read, which stand above mprun's defaults and below presets and the command line. They are a plain
dictionary of values, not computed. The file becomes an option of the group `recipe` in Hydra's
store of configurations.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from mprun.config.reference import as_text, leaves, quoted
from mprun.config.schema import Config
from mprun.errors import UsageError, first_line, hint
from mprun.records.reader import open_regular

SECTIONS = ("train.", "data.", "debug.")
"""Sections whose fields `DEFAULTS` may set."""
FIELDS = ("precision.layers", "precision.layers_file", "device", "execution", "speed.compile")
"""Further fields that it may set; groups belong to a run."""
MAX_BYTES = 4 * 1024**2


@dataclass(frozen=True)
class RecipeFile:
    """What `recipe=` names if it is a file."""

    path: Path  # Absolute
    kind: str  # The class in it, or empty: its functions, or its only recipe

    @property
    def name(self) -> str:
        """The recipe's name in records."""
        return self.path.stem

    @property
    def text(self) -> str:
        """The value of `recipe=`, the path absolute."""
        return f"{self.path}:{self.kind}" if self.kind else str(self.path)


def named_file(value: object) -> RecipeFile | None:
    """The file that a value of `recipe=` names, or None for the name of a recipe."""
    # DOTALL: the name of a file may have a line end
    match = re.fullmatch(r"(.*\.py)(?::(\w*))?", str(value), re.DOTALL)
    if match is None:
        return None
    path = os.path.abspath(os.path.expanduser(match[1]))  # noqa: PTH100, PTH111 (keeps links)
    return RecipeFile(Path(path), match[2] or "")


def with_absolute_paths(override: Override) -> str:
    """The text of a `recipe=` override that means the same in every folder."""
    value: Any = override.value()
    listed = getattr(value, "list", []) if override.is_sweep_override() else [value]
    values = [str(getattr(item, "text", item)) for item in listed]
    files = [named_file(value) for value in values]
    if not any(files):
        return str(override.input_line)
    pairs = zip(values, files, strict=True)
    return "recipe=" + ",".join(v if file is None else quoted(file.text) for v, file in pairs)


def option_of(value: str) -> str:
    """The option of the group `recipe` that a value of `recipe=`, maybe a file, stands for."""
    file = named_file(value)
    if file is None:
        return value
    source = read_source(file.path)
    defaults = defaults_of(file.path, parsed(file.path, source))
    row = {"name": file.name, "target": file.kind, "file": str(file.path)}
    config = OmegaConf.create(as_text({"recipe": row}))
    for key, item in defaults.items():
        OmegaConf.update(config, key, as_text(item), force_add=True)
    about = file.text.encode(errors="surrogateescape")  # a path may have bytes that are no UTF-8
    # of the content: what was composed of an option is stored, and the file may be edited meanwhile
    option = "file_" + hashlib.sha256(about + b"\0" + source).hexdigest()[:16]
    ConfigStore.instance().store(group="recipe", name=option, node=config, package="_global_")
    return option


def read_source(path: Path) -> bytes:
    """The content of a recipe's file; raises `UsageError` if there is none."""
    if not path.is_file():
        raise UsageError(
            f"recipe={path}: there is no such file; write the path of a Python file with model "
            f"and data, or begin one: mprun new-recipe {path.stem}"
        )
    try:
        with open_regular(path, MAX_BYTES) as stream:
            return stream.read()
    except OSError as error:
        raise UsageError(f"recipe={path} cannot be read ({error.strerror})") from None


def parsed(path: Path, source: bytes) -> ast.Module:
    """The syntax tree of a recipe's file; a `UsageError` names the line that is not Python."""
    try:
        return ast.parse(source, str(path))
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        shown = f" at `{error.text.strip()}`" if error.text and error.text.strip() else ""
        raise UsageError(f"recipe={path}: {line}{error.msg}{shown}; correct the file") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"recipe={path} is not a Python file ({first_line(error)})") from None


def defaults_of(path: Path, tree: ast.Module) -> dict[str, Any]:
    """The file's `DEFAULTS`; empty without one. Raises `UsageError` where they are not legal."""
    node = _defaults_in(tree)
    if node is None:
        return {}
    try:
        defaults = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        defaults = None
    if not isinstance(defaults, dict):
        raise UsageError(
            f"{path}, line {node.lineno}: DEFAULTS is read without running the file; legal is a "
            'dictionary of plain values: DEFAULTS = {"train.lr": 1e-3, "train.batch_size": 8}'
        )
    schema = OmegaConf.structured(Config)
    for key, value in defaults.items():
        _check(path, schema, key, value)
    return defaults


def _defaults_in(tree: ast.Module) -> ast.expr | None:
    """What the module assigns to `DEFAULTS` last."""
    for node in reversed(tree.body):
        # `x = 1` has targets, `x: int = 1` a target
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(isinstance(target, ast.Name) and target.id == "DEFAULTS" for target in targets):
            return getattr(node, "value", None)
    return None


def _check(path: Path, schema: Any, key: Any, value: Any) -> None:
    known = [k for k in leaves() if k.startswith(SECTIONS) or k in FIELDS]
    place = f"{path}: DEFAULTS[{key!r}] = {value!r}"
    if key not in known:
        raise UsageError(
            f"{place}: legal keys are fields of train, data and debug, and {', '.join(FIELDS)}"
            f"{hint(str(key), known)}; what a run chooses, such as precision, is given on the "
            "command line"
        )
    field = leaves()[key]
    field.set_in(schema, as_text(value), place)
    try:
        field.check(OmegaConf.select(schema, key))
    except UsageError as error:
        raise UsageError(f"{path}: DEFAULTS: {error}") from None
