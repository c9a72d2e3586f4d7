"""A summary's shape: what is missing or of another type is named, what is new is let be."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from mprun.compare.shape import defect
from mprun.records.run_record import Summary, jsonable
from tests.compare.folders import summary_of


def read() -> Any:
    """A summary as it comes from a file."""
    return json.loads(json.dumps(jsonable(summary_of())))


def places(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every key and item, those below it included."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, *path, key)


def parent(summary: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        summary = summary[key]
    return summary


OPEN = ("versions", "accelerated", "layers")  # mappings with keys of their own, which may lack any
FIELDS = [
    path
    for path in places(read())
    if isinstance(path[-1], str) and not (len(path) > 1 and path[-2] in OPEN)
]


def test_a_whole_summary_has_no_defect() -> None:
    assert defect(read(), Summary) is None


REQUIRED = [path for path in FIELDS if path[0] not in Summary.__optional_keys__]


@pytest.mark.parametrize("path", REQUIRED, ids=lambda p: ".".join(map(str, p)))
def test_every_field_is_missed(path: tuple[Any, ...]) -> None:
    summary = read()
    del parent(summary, path)[path[-1]]
    assert defect(summary, Summary) == f"{'.'.join(map(str, path))} is missing"


@pytest.mark.parametrize("path", list(places(read())), ids=lambda p: ".".join(map(str, p)))
def test_every_value_of_another_type_is_found(path: tuple[Any, ...]) -> None:
    where = ".".join(map(str, path))
    for wrong in ([[]], {"a": {}}, 1e300):
        summary = read()
        parent(summary, path)[path[-1]] = copy.deepcopy(wrong)
        assert str(defect(summary, Summary)).startswith(where), wrong


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("seed", True),
        ("seed", 1.0),
        ("seed", "1"),
        ("wall_time_s", True),
        ("wall_time_s", "nan"),
        ("wall_time_s", float("nan")),
        ("wall_time_s", 10**400),
        ("wall_time_s", None),
        ("status", "done"),
        ("error", 1),
        ("history", {}),
    ],
    ids=str,
)
def test_what_python_takes_for_the_same_is_not(key: str, wrong: object) -> None:
    assert str(defect({**read(), key: wrong}, Summary)).startswith(f"{key} is ")


@pytest.mark.parametrize("loss", [1, 0.5, "nan", "inf", "-inf", None])
def test_a_loss_may_be_any_number_recorded(loss: object) -> None:
    summary = read()
    summary["test"]["loss"] = loss
    assert defect(summary, Summary) is None


def test_fields_of_later_versions_are_let_be() -> None:
    summary = read()
    summary["new"] = summary["data"]["new"] = [1]
    assert defect(summary, Summary) is None


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_what_is_no_object_at_all(value: object) -> None:
    assert str(defect(value, Summary)).startswith("is ")


def test_a_record_from_before_a_field_was_added_is_whole() -> None:
    summary = read()
    del summary["fp_exceptions"]
    assert defect(summary, Summary) is None
    summary["fp_exceptions"] = 3
    assert "fp_exceptions" in (defect(summary, Summary) or "")
    del summary["fp_exceptions"], summary["metric"]
    assert defect(summary, Summary) == "metric is missing"
