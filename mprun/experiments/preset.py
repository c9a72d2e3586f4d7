"""Overrides as a preset: a YAML file with the same values; `preset=NAME` applies it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mprun.config.compose import parse
from mprun.config.recipe_file import named_file
from mprun.config.reference import GROUPS
from mprun.records.files import write_atomic


def preset_text(name: str, overrides: Sequence[str], comments: Sequence[str]) -> str:
    """The file's text.

    Args:
        name: the preset's.
        overrides: with one value each; another preset among them, and a recipe's file, are left
            out.
        comments: lines about its origin; the first is shown as the option's help.
    """
    groups: list[dict[str, str]] = []
    fields: dict[str, Any] = {"preset": {"name": name}}
    for text in overrides:
        override = parse(text)
        key, value = override.key_or_group, override.value()
        if key == "preset" or text in recipe_files([text]):
            continue  # this file replaces a preset, and is no place for the path of a recipe
        if key in GROUPS:
            groups.append({f"override /{key}": str(value)})
        else:
            _put(fields, key.split("."), value)
    comment = "".join(f"# {' '.join(line.split())}\n" for line in comments)
    body = yaml.safe_dump({"defaults": groups, **fields}, sort_keys=False, allow_unicode=True)
    return f"# @package _global_\n{comment}{body}"


def recipe_files(overrides: Sequence[str]) -> list[str]:
    """The overrides that name a recipe's file; the command that takes the preset has them too."""
    parsed = [(text, parse(text)) for text in overrides]
    return [t for t, o in parsed if o.key_or_group == "recipe" and named_file(o.value())]


def write_preset(folder: Path, name: str, text: str) -> Path:
    """Write it where `--config-dir folder` finds it; its path."""
    path = folder / "preset" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())
    return path


def copy_options(overrides: Sequence[str], config_dir: Path | None, folder: Path) -> None:
    """Copy the user's own options that the overrides name into the folder of a preset."""
    if config_dir is None:
        return
    for text in overrides:
        group, _, name = text.lstrip("+").partition("=")
        source = config_dir / group / f"{name}.yaml"
        if group in GROUPS and source.is_file():
            (folder / group).mkdir(exist_ok=True)
            write_atomic(folder / group / source.name, source.read_bytes())


def _put(fields: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        fields = fields.setdefault(key, {})
    fields[keys[-1]] = value
