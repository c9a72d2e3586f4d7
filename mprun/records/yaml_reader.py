"""Reading YAML: the one loader of every YAML file that somebody else may have written.

YAML is more than it seems. Tags make objects, a plain word such as 2020-13-45 is a date that does
not exist, a few nested aliases stand for billions of values, and brackets without end exhaust the
stack. So this loader makes mappings, lists, texts, numbers, truth values and null alone, and it
refuses what has too many values, aliases counted as often as they are used, or is nested too
deeply. Numbers are those of OmegaConf, which writes the configurations: `1e-3` is one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from mprun.errors import first_line, printable
from mprun.records.reader import read_bytes

MOST_BYTES = 2**20
MOST_VALUES = 100_000
DEEPEST = 50
"""A configuration has some 200 values and is nested four deep."""
CORE_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")
EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")


class NotYamlError(ValueError):
    """A text that is not read as YAML; the message is one line.

    Args:
        problem: the reason.
        line: where, from 1; None if it is of the whole text.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem if line is None else f"line {line}: {problem}")
        self.problem, self.line = problem, line


class _PlainLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader of plain values; a key that is written twice is refused."""

    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in CORE_TAGS
    }
    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {
        first: [row for row in rows if row[0].rpartition(":")[2] in CORE_TAGS]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> Any:
        keys: set[str] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                problem = f"the key {key.value!r} is written twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def flatten_mapping(self, node: yaml.Node) -> None:
        """Merge keys (`<<`) are ordinary keys: a few nested ones multiply without end."""


_PlainLoader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))


def read_yaml(path: Path, most_bytes: int = MOST_BYTES) -> tuple[str, Any]:
    """The text of a YAML file, and its content as plain values.

    Raises:
        OSError: it cannot be read, is no regular file, or is too large.
        NotYamlError: it is not text, not YAML, or too large or deep.
    """
    text = read_text(path, most_bytes)
    return text, load_yaml(text)


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8, without a byte-order mark.

    Raises:
        OSError: it cannot be read, is no regular file, or is too large.
        NotYamlError: it is not text.
    """
    data = read_bytes(path, most_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        raise NotYamlError("not text (UTF-8)", before.count(b"\n") + 1) from None


def load_yaml(text: str) -> Any:
    """The content of a YAML text as plain values.

    Raises:
        NotYamlError: it is not YAML, has tags of other kinds, or is too large or deep.
    """
    content = _parsed(yaml.load, text)
    _check_extent(content)  # aliases make it deeper and larger than its text
    return content


def compose_yaml(text: str) -> yaml.Node | None:
    """The nodes of a YAML text, which have their lines; None for an empty one.

    Raises:
        NotYamlError: it is not YAML.
    """
    return _parsed(yaml.compose, text)


def _parsed(parse: Any, text: str) -> Any:
    try:
        _check_depth(text)
        return parse(text, Loader=_PlainLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None)
        line = None if mark is None else mark.line + 1
        raise NotYamlError(printable(str(problem or first_line(error)))[:80], line) from None
    except NotYamlError:
        raise
    except (ValueError, LookupError) as error:  # a tag whose text has another form: !!int x
        raise NotYamlError(printable(first_line(error))[:80]) from None


def _check_depth(text: str) -> None:
    """Refuse a text that is nested too deeply: the C library's loader would exhaust the stack.

    Raises:
        NotYamlError: it is too deep.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_PlainLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            line = event.start_mark.line + 1
            raise NotYamlError(f"it is nested more than {DEEPEST} deep", line)


def _check_extent(content: Any) -> None:
    """Refuse what no configuration has: too many values, or a depth that aliases may make endless.

    Raises:
        NotYamlError: it is too large or too deep.
    """
    count, level = 0, [content]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for value in level:
            parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value
            below += parts if isinstance(value, dict | list) else ()
            if count + len(below) > MOST_VALUES:
                raise NotYamlError(f"it has more than {MOST_VALUES:,} values")
        count, level = count + len(below), below
    if level:
        raise NotYamlError(f"it is nested more than {DEEPEST} deep")
