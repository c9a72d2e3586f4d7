"""Op lists: which ops compute in the lower dtype, in float32, in the widest of their inputs.

A list is data: names, one to an op, from a configuration or a file (`records/op_list_files.py`). A
name that no op has is listed in `OpLists.unknown` with the nearest known one. The reader of a file
or configuration (`Entry`) reports it; a name in a program's code gives a warning. An op on two
lists is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mprun.errors import nearest
from mprun.precision.op_lists.names import known, spelled
from mprun.records.op_list_files import KINDS, Entry


class Unknown(NamedTuple):
    """A name that no op has."""

    entry: Entry

    @property
    def nearest(self) -> str | None:
        """The known name most like it; computed when it is needed, as it takes milliseconds."""
        return nearest(spelled(self.entry.text)[0].lower(), known())

    def __str__(self) -> str:
        meant = f"; did you mean '{self.nearest}'?" if self.nearest else ""
        return f"{self.entry.where}: no op is named '{self.entry.text}'{meant}"


@dataclass(frozen=True)
class OpLists:
    """Lists with their names brought to canonical ones (`names.py`)."""

    rules: Mapping[str, str]
    """Canonical name to `lower`, `fp32` or `promote`."""
    first_input: bool
    """Whether an op on no list casts its inputs to the dtype of the first one, or PyTorch's own
    promotion is left to it."""
    unknown: tuple[Unknown, ...] = field(default=())
    """Names that were left out."""


def op_lists(
    lower: Iterable[Entry | str],
    fp32: Iterable[Entry | str],
    promote: Iterable[Entry | str] = (),
    first_input: bool = True,
    strict: bool = False,
) -> OpLists:
    """Lists from names.

    A name on `promote` that is on another list too is that other list's (HMP: the two lists take
    precedence over the third).

    Args:
        lower: ops that compute in the lower dtype.
        fp32: ops that compute in float32.
        promote: ops that compute in the widest dtype among their inputs.
        first_input: what becomes of an op on no list, see `OpLists`.
        strict: refuse a name that no op has. Otherwise it is left out; a name given as text, in a
            program's own code, is warned of.

    Raises:
        ValueError: one op is on both `lower` and `fp32`; the message names both entries. With
            `strict`, a name that no op has.
    """
    entries: dict[str, tuple[str, Entry]] = {}
    unknown: dict[str, Unknown] = {}
    for kind, names in zip(KINDS, (lower, fp32, promote), strict=True):
        for item in names:
            entry = Entry(item, f"{kind} list") if isinstance(item, str) else item
            canonical = spelled(entry.text)
            if not any(name in known() for name in canonical) and entry.text not in unknown:
                unknown[entry.text] = Unknown(entry)
                if strict:
                    raise ValueError(str(unknown[entry.text]))
                if isinstance(item, str):
                    warnings.warn(f"a name is left out: {unknown[entry.text]}", stacklevel=2)
            for name in canonical:
                _put(entries, name, kind, entry)
    rules = {name: kind for name, (kind, _) in entries.items() if name in known()}
    return OpLists(rules, first_input, tuple(unknown.values()))


def _put(entries: dict[str, tuple[str, Entry]], name: str, kind: str, entry: Entry) -> None:
    before = entries.setdefault(name, (kind, entry))
    if before[0] != kind and kind != "promote":
        other = before[1]
        same = "" if other.text == entry.text else f" and '{other.text}', the same op"
        raise ValueError(
            f"'{entry.text}'{same}: on the {before[0]} list ({other.where}) and on the {kind} list "
            f"({entry.where}); an op is on one of them: take it off the other, or bring both files"
        )
