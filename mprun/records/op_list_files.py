"""Files of op lists: names of ops, one per line or in YAML.

The text format is that of Habana's HMP, one name per line; blank lines, comments after `#`,
Windows line ends and a byte-order mark are allowed. A file that ends in .yaml or .yml holds a list
of names, or a mapping of such lists by `lower`, `fp32` and `promote`. Reading one runs no code, and
needs no torch: `precision/op_lists/` checks later whether the ops exist.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from mprun.records.reader import NotYamlError, read_text, read_yaml

KINDS = ("lower", "fp32", "promote")  # The lists: lower dtype, float32, widest of the inputs


class Entry(NamedTuple):
    """A name as written, and its place."""

    text: str
    where: str  # `file:line`, a YAML file, or the name of the lists it ships with


MAX_NAME = 200  # Characters; no op of PyTorch has as many


def read_list(path: Path, kind: str) -> list[Entry]:
    """The names in a file; of a YAML mapping those of `kind`, one of `KINDS`.

    A `ValueError` names the file, which cannot be read or contains anything but names.
    """
    try:
        if path.suffix in (".yaml", ".yml"):
            return _from_yaml(path, read_yaml(path), kind)
        lines = enumerate(re.split(r"\r\n|\r|\n", read_text(path)), start=1)
        names = ((line.partition("#")[0].strip(), f"{path}:{number}") for number, line in lines)
        return [Entry(_checked(name, where), where) for name, where in names if name]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except NotYamlError as error:
        reason = f"{error.problem}; a list has one op per line, or is YAML by its name"
        raise ValueError(f"{path}:{error.line or 1}: {reason}") from None


def _from_yaml(path: Path, content: Any, kind: str) -> list[Entry]:
    if isinstance(content, dict):
        if kind not in content:
            raise ValueError(
                f"{path}: it has no '{kind}'; legal: a list of names, or a mapping with "
                f"{', '.join(KINDS)}"
            )
        content = content[kind]
    # `no` and `on` are truth values to YAML
    if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path}: not a list of names; legal: one op per line, or in YAML a list")
    return [Entry(_checked(name.strip(), str(path)), str(path)) for name in content]


def _checked(name: str, where: str) -> str:
    """`name`, checked: an op's name has neither blanks nor control characters."""
    if not name.isprintable() or len(name.split()) != 1 or len(name) > MAX_NAME:
        shown = repr(name if len(name) <= 40 else name[:40] + "...")
        raise ValueError(f"{where}: {shown} is not the name of an op; a list has one op per line")
    return name
