"""Reading files: the one place where mprun opens a file that somebody else may have written.

Files come from anyone's disk: they may be cut off, edited by hand, written by another version, or
no file at all. So only regular files are opened, and none is read beyond a size that no file of its
kind has. What is behind this door is not checked again. No torch.
"""

from __future__ import annotations

import errno
import io
import math
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar

import msgspec
import yaml  # type: ignore[import-untyped]

from mprun.errors import UsageError, first_line, printable

T = TypeVar("T")

LARGEST = 1e100  # No figure of a run is near it. Above 1e154 a square is infinite in float64.
MAX_JSON_BYTES = 256 * 2**20
# Of metrics.jsonl, whose lines have about 200 bytes; the file may be of any length
MAX_LINE_BYTES = 2**20


# ---- bytes ---------------------------------------------------------------------------------------


def open_regular(path: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file for reading, also through a link.

    Raises `OSError`, whose `strerror` has the reason, if it cannot be opened, is no regular file,
    or is larger than `most_bytes`.
    """
    # O_NONBLOCK: opening a pipe would wait for a writer before it can be seen that it is one.
    descriptor = os.open(os.fspath(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):  # a device such as /dev/zero never ends
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if most_bytes is not None and status.st_size > most_bytes:
            raise OSError(errno.EINVAL, f"it is larger than {_size(most_bytes)}", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file; raises as `open_regular` does."""
    with open_regular(path, most_bytes) as file:
        return file.read(most_bytes)  # not all: it may have grown since its size was looked at


def _size(number: int) -> str:
    return f"{number // 2**20} MiB" if number >= 2**20 else f"{number // 1024} KiB"


# ---- JSON ----------------------------------------------------------------------------------------


class _Version(msgspec.Struct):
    schema_version: int


def read_json(path: Path, kind: type[T], newest: int) -> T:
    """The content of a JSON file as a dataclass.

    Unknown fields are ignored, since later versions add some. Fields with a default may be missing.
    Everything else must be there, with its type.

    Raises:
        FileNotFoundError: there is no file.
        UsageError: it cannot be read, is damaged, or its `schema_version` is above `newest`.
    """
    try:
        data = read_bytes(path, MAX_JSON_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    version = _decoded(path, data, _Version).schema_version
    if version > newest:
        raise UsageError(f"{path} has schema_version {version}, this mprun reads up to {newest}")
    return _in_range(path, _decoded(path, data, kind))


def read_json_lines(path: Path, having: bytes = b"") -> Iterator[dict[str, Any]]:
    """The lines of a file of JSON objects, one after the other.

    A last line without a line feed is left out: a crash cut it short. Only lines with the bytes
    `having` are parsed: parsing takes most of the time. Raises as `read_json` does.
    """
    try:
        with open_regular(path) as file:
            number = 1
            while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
                if having in line:
                    yield _decoded(path, line, dict[str, Any], f"line {number}: ")
                number += 1
            if len(line) == MAX_LINE_BYTES:
                size = _size(MAX_LINE_BYTES)
                raise UsageError(f"{path} is damaged: line {number} is longer than {size}")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def converted(path: object, value: object, kind: type[T], place: str = "") -> T:
    """Plain values, for example of a checkpoint, as a type of this package, or a `UsageError`.

    Its message begins with the file, and with their place in it.
    """
    try:
        return _in_range(path, msgspec.convert(value, kind), place)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is damaged: {place}{error}") from None
    except RecursionError:
        raise UsageError(f"{path} is damaged: {place}it is nested too deeply") from None


def _decoded(path: Path, data: bytes, kind: type[T], place: str = "") -> T:
    try:
        text = data.decode()  # msgspec does not look at the bytes of fields that it skips
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        reason = str(error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not place:
            raise UsageError(f"{path} is not valid JSON: {error}") from None
        reason = f"not valid JSON ({error})"
    except RecursionError:
        reason = "it is nested too deeply"
    raise UsageError(f"{path} is damaged: {place}{reason}")


def _in_range(path: object, value: T, place: str = "") -> T:
    if (name := _out_of_range(value)) is not None:
        raise UsageError(f"{path} is damaged: {place}{name} is out of range")
    return value


def _out_of_range(value: object, name: str = "") -> str | None:
    """The first figure inside `value` that is too large to compute with, or None."""
    if isinstance(value, int | float):
        return name if math.isfinite(value) and abs(value) > LARGEST else None
    items: list[tuple[str, object]] = []
    if is_dataclass(value):
        items = [(f"{name}.{f.name}".lstrip("."), getattr(value, f.name)) for f in fields(value)]
    elif isinstance(value, dict):
        items = [(f"{name}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    return next((x for key, item in items if (x := _out_of_range(item, key)) is not None), None)


MAX_BYTES = 2**20  # Of a YAML file
MAX_VALUES = 10_000
DEEPEST = 50  # A configuration has some 200 values and is nested four deep
CORE_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")
# YAML 1.1 asks for a dot, and reads 1e-3 as a text; OmegaConf writes and reads it as a number
EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")


class NotYamlError(ValueError):
    """A text that is not read as YAML; the message is one line, and `line` counts from 1."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem if line is None else f"line {line}: {problem}")
        self.problem, self.line = problem, line


# PyYAML has the loader in C only where libyaml was there when it was built
class _PlainLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader of mappings, lists, texts, numbers, truth values and null alone.

    A key that is written twice is refused.
    """

    # other tags make objects, and a plain word such as 2020-13-45 is a date that does not exist
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


def read_yaml(path: Path, most_bytes: int = MAX_BYTES) -> Any:
    """The content of a YAML file as plain values; raises as `read_bytes` and `load_yaml` do."""
    return load_yaml(read_text(path, most_bytes))


def read_text(path: Path, most_bytes: int = MAX_BYTES) -> str:
    """The text of a file in UTF-8, without a byte-order mark; `NotYamlError` if it is none."""
    data = read_bytes(path, most_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # lines as an editor counts them, whatever ends them
        before = data[: error.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        raise NotYamlError("not text (UTF-8)", before.count(b"\n") + 1) from None


def load_yaml(text: str) -> Any:
    """The content of a YAML text as plain values.

    `NotYamlError` if it is not YAML, has tags of other kinds, or is too large or deep.
    """
    try:
        _check_depth(text)
        content = yaml.load(text, Loader=_PlainLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None)
        line = None if mark is None else mark.line + 1
        raise NotYamlError(printable(str(problem or first_line(error)))[:80], line) from None
    except NotYamlError:
        raise
    except (ValueError, LookupError) as error:  # a tag whose text has another form: !!int x
        raise NotYamlError(printable(first_line(error))[:80]) from None
    _check_extent(content)  # aliases make it deeper and larger than its text
    return content


def _check_depth(text: str) -> None:
    """Refuse a text that is nested too deeply: the C library's loader would exhaust the stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_PlainLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            line = event.start_mark.line + 1
            raise NotYamlError(f"it is nested more than {DEEPEST} deep", line)


def _check_extent(content: Any) -> None:
    """Refuse what no configuration has: too many values, or a depth that aliases make endless."""
    count, level = 0, [content]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for value in level:
            parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value
            below += parts if isinstance(value, dict | list) else ()
            if count + len(below) > MAX_VALUES:
                raise NotYamlError(f"it has more than {MAX_VALUES:,} values")
        count, level = count + len(below), below
    if level:
        raise NotYamlError(f"it is nested more than {DEEPEST} deep")


ZIP = b"PK\x03\x04"  # How a zip file begins
BLOCK_BYTES = 2**20  # What is read at once, so that no entry has to fit into memory
ENCRYPTED = 0x1  # A bit of an entry's flags


class DamagedArchiveError(ValueError):
    """Why a file is no whole archive, as `it ...`."""


def check_archive(path: Path) -> None:
    """Check that a file is a whole archive of `torch.save`, of PyTorch 1.6 or later.

    PyTorch reads the archive in C++ that trusts the file: a damaged one may end the process without
    a word, and changed bytes become changed weights. It is a zip file whose entries are stored as
    they are, each with its CRC-32. Raises `DamagedArchiveError` for anything else.
    """
    with open_regular(path) as file:
        start = file.read(len(ZIP))
        if not start:
            raise DamagedArchiveError("it is empty")
        if start != ZIP:
            raise DamagedArchiveError("it is no archive, as torch.save writes since PyTorch 1.6")
        try:
            _check_zip(file)
        except Exception as error:  # zipfile raises almost anything for a damaged file
            raise DamagedArchiveError(f"it is not a complete zip archive: {error}") from None


def _check_zip(file: BinaryIO) -> None:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if len({entry.filename for entry in entries}) < len(entries):
            raise zipfile.BadZipFile("two entries have one name")
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & ENCRYPTED:
                raise zipfile.BadZipFile(f"{entry.filename!r} is not stored as it is")
            # Readers may differ in which of the two sizes they believe.
            if entry.file_size != entry.compress_size:
                raise zipfile.BadZipFile(f"{entry.filename!r} has two sizes")
        if sum(entry.file_size for entry in entries) > file.seek(0, io.SEEK_END):
            raise zipfile.BadZipFile("its entries overlap")
        for entry in entries:
            with archive.open(entry) as content:
                while content.read(BLOCK_BYTES):  # to its end, where the CRC-32 is compared
                    pass
