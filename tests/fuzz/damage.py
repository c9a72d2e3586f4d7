"""Wrong settings and damaged files, drawn from a random generator.

Each function returns something that is certainly wrong, and what an error must name.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import yaml

from mprun.cli.main import COMMANDS as ALL
from mprun.config.reference import leaves
from mprun.config.settings import Field, fields

NOTHING = ("???", "${x}", "${oc.env:MPRUN_NO_SUCH_VARIABLE}", "${", "${nope:1}")
LISTED = ("1,2", "choice(1,2)", "range(3)")
SEVERAL = ("glob(*)", "glob(a*,exclude=b)", *LISTED, "interval(0,1)")
NOT_READ = ("[1", "{a", "'", '"', "nope(1)", "a b=c", "(", "1]")
NO_NUMBER = ("text", "[1]", "nan", "-inf", "1e999", "-1e9", "''", "{a: 1}", "[]", "'${x}'", "'???'")
NO_LIST = ("text", "{a: 1}", "[???]", "['${x}']", "[{a: 1}]", "[[1]]", "1")
NO_BOOL = ("maybe", "[]", "{a: 1}", "1.5", "''")

WRONG = ([[]], {"a": {}}, {"a": [{}]})
"""Of another type than any value of a record."""

DEEP = 200_000
BROKEN_YAML = (
    "[" * 2000,
    "- " * 2000 + "x",
    "a: " + "{a: " * 2000,
    "a: !!timestamp zz",
    "a: !!timestamp 2020-13-45",
    "a: !!python/object/apply:os.getcwd []",
    "a: !!python/name:os.system",
    "a: !!int x",
    "a: !!int ''",
    "a: !!bool x",
    "a: !!float x",
    "a: !!binary x",
    "a: !!map x",
    "a: &a [*a]",
    "a: *b",
    "a: 1\na: 2",
    "? [a, b]\n: 1\n? {c: d}\n: 2",
    "a: [1, 2",
    "\ta: 1",
    "a: 'b",
    "%YAML 9.9\n---\na",
    "a: 1\n---\nb: 2",
    "a\0b",
    "a: " + "9" * 5000,
    "\udcff\udcfe",
    "just text",
    "- a\n- list",
    "17",
)


@dataclass(frozen=True)
class Case:
    """Arguments of mprun that must be refused."""

    arguments: tuple[str, ...]
    named: tuple[str, ...]
    """The error contains one of these."""


# ---- settings ------------------------------------------------------------------------------------

COMMANDS = {x.name: [*fields(x.settings).values()] for x in ALL if x.settings}
# Groups are chosen by name, and mappings and lists of names are read when the run is planned
COMMANDS["train"] = [
    x
    for x in leaves().values()
    if not x.key.endswith(".name") and not x.legal.startswith(("a mapping", "a list"))
]


def wrong_setting(chance: Random) -> Case:
    """A field of a run, or a setting of a command, with a value that it cannot have."""
    command = chance.choice(["train"] * len(COMMANDS) + list(COMMANDS))
    field = chance.choice(COMMANDS[command])
    key = field.key
    taken = LISTED if key == "seeds" else ()  # which may be listed
    no_value = [text for text in (*NOTHING, *SEVERAL, *NOT_READ) if text not in taken]
    takes_names = isinstance(field.default, dict) or key == "compare.margin"  # of quantities
    text = chance.choice(
        [
            f"{key}={chance.choice(bad_values(field))}",
            f"{key}={chance.choice(no_value)}",
            f"{chance.choice(['+', '++'])}{key}={chance.choice(NOTHING)}",
            f"~{key}{chance.choice(['', '=1', '=glob(*)'])}",
            f"{key}x=1",
            *(() if takes_names else (f"{key}.x=1",)),
            f"{key}@x=1",
        ]
    )
    return Case((command, text), (key,))


def bad_values(field: Field) -> tuple[str, ...]:
    """Values that a field cannot have, as a user would type them."""
    legal = field.legal
    if "number" in legal:
        return NO_NUMBER
    if "list" in legal:
        return NO_LIST
    if "true or false" in legal:
        return NO_BOOL
    return (*NOTHING, "{a: 1}", "[a]")


# ---- JSON ----------------------------------------------------------------------------------------


def places(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every key and item, those below it included."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, *path, key)


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place."""
    changed = copy.deepcopy(content)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return changed


def broken_json(chance: Random, text: str) -> bytes:
    """A JSON text that is cut, has another byte, or is another text."""
    whole = text.strip().encode()
    cut = chance.randrange(len(whole))
    return chance.choice(
        [
            whole[:cut],
            whole[:cut] + b"\xff" + whole[cut:],
            whole + b"]",
            b"\0" * 20,
            b"[" * DEEP,
            b'{"schema_version":1,"x":' + b"[" * DEEP,
            b"NaN",
            b"null",
            b"[]",
            b'"text"',
            b"{}",
            b'{"schema_version": 99}',
            b'{"schema_version": true}',
            b'{"schema_version": 1e400}',
            b'{"schema_version": ' + b"9" * 400 + b"}",
        ]
    )


def wrong_json(chance: Random, text: str) -> bytes:
    """A JSON text with a value of another type somewhere, or `broken_json`."""
    if chance.random() < 0.3:
        return broken_json(chance, text)
    content = json.loads(text)
    path = chance.choice(list(places(content)))
    return json.dumps(replaced(content, path, chance.choice(WRONG))).encode()


def wrong_line(chance: Random) -> bytes:
    """A line that metrics.jsonl cannot have, with its line feed."""
    line = chance.choice(
        [
            b"no json",
            b"[]",
            b"17",
            b"null",
            b'{"kind":"step"}',
            b'{"step":1}',
            b'{"kind":"step","step":"1"}',
            b'{"kind":"step","step":1.5}',
            b'{"kind":"step","step":null}',
            b'{"kind":3,"step":1}',
            b'{"kind":"step","step":' + b"9" * 30 + b"}",
            b'{"kind":"step","step":1,"loss":NaN}',
            b'{"kind":"step","step":1',
            b"[" * DEEP,
            b'{"kind":"step","step":1,"x":' + b"[" * DEEP + b"]" * DEEP + b"}",
            b"\xff\xfe",
            b"\0" * 100,
            b"x" * 2**21,
        ]
    )
    return line + b"\n"


# ---- YAML ----------------------------------------------------------------------------------------

FREE = (
    *(("recipe", "model"), ("run",), ("precision", "layers"), ("train", "optimizer", "args")),
    ("logger", "tags"),
)
"""Places of a configuration that may have any content, or that resuming replaces."""


def wrong_config(chance: Random, text: str) -> tuple[bytes, tuple[str, ...]]:
    """A configuration with a value that a field cannot have, or no YAML; what must be named."""
    if chance.random() < 0.4:
        broken = chance.choice(BROKEN_YAML)
        return broken.encode(errors="surrogateescape"), ("config.yaml",)
    content = yaml.safe_load(text)
    known = [p for p in places(content) if not any(p[: len(free)] == free for free in FREE)]
    path = chance.choice(known)
    value = chance.choice([{"a": {"b": 1}}, {"a": ["${x}"]}])
    if isinstance(path[-1], str) and chance.random() < 0.3:
        path = (*path[:-1], f"{path[-1]}x")
    changed = yaml.safe_dump(replaced(content, path, value))
    return changed.encode(), (str(path[-1]), "config.yaml")


def wrong_layers(chance: Random) -> bytes:
    """A file of layers that cannot be one."""
    text = chance.choice(
        [*BROKEN_YAML, "fc: 1", "fc: [fp32]", "fc: {a: b}", "fc: fp64", "fc: null", "[fp32]: fc"]
    )
    return text.encode(errors="surrogateescape")


def wrong_op_list(chance: Random) -> bytes:
    """A YAML file that is no list of ops."""
    text = chance.choice(
        [*(x for x in BROKEN_YAML if x != "- a\n- list"), "- [a]", "- a b", "lower: {a: b}"]
    )
    return text.encode(errors="surrogateescape")


# ---- checkpoints ---------------------------------------------------------------------------------

NEEDED = (
    ("choices",),
    ("choices", "memory_format"),
    ("choices", "optimizer_impl"),
    ("trainer",),
    ("trainer", "step"),
    ("trainer", "epoch"),
    ("trainer", "in_epoch"),
    ("trainer", "sums"),
    ("trainer", "last_scores"),
    ("trainer", "order"),
    ("trainer", "model"),
    ("trainer", "model", "weight"),
    ("trainer", "optimizer"),
    ("trainer", "optimizer", "param_groups"),
    ("trainer", "loss_scale"),
    ("trainer", "rng"),
    ("journal",),
    ("journal", "loss_series"),
    ("journal", "steps"),
    ("journal", "statistics"),
)


CHECKED = (
    *(("format_version",), ("choices",), ("choices", "memory_format"), ("trainer",)),
    *(("trainer", "step"), ("trainer", "epoch"), ("trainer", "sums"), ("trainer", "sums", "loss")),
    *(("journal",), ("journal", "steps")),
)
"""Parts of which the type is checked: see `SavedRun`."""


def wrong_checkpoint(chance: Random, content: dict[str, Any]) -> dict[str, Any]:
    """The content of a checkpoint without a part, or with another type of one that is checked."""
    path: tuple[Any, ...] = chance.choice(NEEDED)
    if chance.random() < 0.5:
        return replaced(content, chance.choice(CHECKED), chance.choice(["x", {"a": 1}, *WRONG]))
    changed = copy.deepcopy(content)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return changed


def damaged(chance: Random, whole: bytes) -> bytes:
    """A file that is cut short or has other bytes."""
    place, size = chance.randrange(len(whole)), chance.choice([1, 1, 4, 64])
    changed = bytes(byte ^ chance.randrange(1, 256) for byte in whole[place : place + size])
    return chance.choice(
        [
            whole[:place],
            whole[:place] + changed + whole[place + size :],
            whole[:place] + whole[place + size :],
            whole[:place] + bytes(size) + whole[place:],
            whole[place:],
        ]
    )
