"""What help, messages and the page of fields say of each field, read off the schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import get_type_hints

import pytest

from mprun.config import compose
from mprun.config.compose import OPEN_MAPPINGS
from mprun.config.reference import GROUPS, describe_type, docs_of, leaves, options, sections
from mprun.config.schema import Config

CONF = Path(str(files("mprun.conf")))


def classes(cls: type = Config) -> Iterator[type]:
    """`cls` and the classes of its sections."""
    yield cls
    for kind in get_type_hints(cls).values():
        if is_dataclass(kind):
            yield from classes(kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", list(classes()), ids=lambda c: c.__name__)
def test_every_field_and_section_is_documented(cls: type) -> None:
    assert (cls.__doc__ or "").endswith("."), "a text of its own, not the generated signature"
    assert set(docs_of(cls)) == {f.name for f in fields(cls)}
    for text in docs_of(cls).values():
        assert text.endswith(".")
        assert "\n" not in text


def test_leaves_and_sections_are_what_a_config_holds() -> None:
    resolved = compose([]).resolved

    def walk(node: dict[str, object], prefix: str = "") -> Iterator[tuple[str, bool]]:
        for name, value in node.items():
            key = f"{prefix}{name}"
            is_section = isinstance(value, dict) and f"{key}." not in OPEN_MAPPINGS
            yield key, is_section
            if is_section:
                yield from walk(value, f"{key}.")  # type: ignore[arg-type]

    found = list(walk(resolved))
    assert [key for key, is_section in found if not is_section] == list(leaves())
    assert {key for key, is_section in found if is_section} == set(sections())


def test_every_type_has_words() -> None:
    for field in leaves().values():
        assert "<" not in field.legal, field.key
    assert describe_type(bytes) == "<class 'bytes'>"


@pytest.mark.parametrize("group", GROUPS)
def test_options_are_the_files_with_their_opening_comment(group: str) -> None:
    found = options(group)
    assert list(found) == sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    for name, comment in found.items():
        assert f"# {comment}\n" in (CONF / group / f"{name}.yaml").read_text(encoding="utf-8")
