"""Reading a summary: a missing or wrong field is named, a field of a later version is ignored."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from mprun.errors import UsageError
from mprun.records import run_record
from mprun.records.files import jsonable
from mprun.records.run_record import Summary, read_summary
from tests.fuzz.damage import places
from tests.study.compare.folders import summary_of

OPEN = ("versions", "accelerated", "layers")  # mappings from any name


def plain() -> Any:
    """A summary as it comes from a file."""
    return json.loads(json.dumps(jsonable(asdict(summary_of()))))


def parent(summary: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        summary = summary[key]
    return summary


def shown(path: tuple[Any, ...]) -> str:
    """A path as an error message shows it."""
    text = "$"
    for above, key in zip((None, *path), path, strict=False):
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += "[...]" if above in OPEN else f".{key}"
    return text


def read(folder: Path, value: object) -> Summary:
    (folder / "summary.json").write_text(json.dumps(value), encoding="utf-8")
    return read_summary(folder)


def defect(folder: Path, value: object) -> str:
    """What is wrong with the summary, according to the error."""
    with pytest.raises(UsageError, match=r"summary\.json is damaged: ") as caught:
        read(folder, value)
    return str(caught.value).partition("is damaged: ")[2]


PATHS = list(places(plain()))
OPTIONAL = {
    field.name
    for kind in vars(run_record).values()
    if is_dataclass(kind)
    for field in fields(kind)
    if (field.default, field.default_factory) != (MISSING, MISSING)
}
"""Fields with a default, which a file may leave out."""

REQUIRED = [
    path
    for path in PATHS
    if isinstance(path[-1], str)
    and not (len(path) > 1 and path[-2] in OPEN)
    and path[-1] not in OPTIONAL
]


def test_a_whole_summary_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, plain()) == summary_of()


def test_every_missing_field_is_named(tmp_path: Path) -> None:
    for path in REQUIRED:
        summary = plain()
        del parent(summary, path)[path[-1]]
        where = "" if len(path) == 1 else f" - at `{shown(path[:-1])}`"
        text = defect(tmp_path, summary)
        assert text == f"Object missing required field `{path[-1]}`{where}", path


def test_every_value_of_another_type_is_named(tmp_path: Path) -> None:
    for path in PATHS:
        for wrong in ([[]], {"a": {}}):
            summary = plain()
            parent(summary, path)[path[-1]] = wrong
            assert f"- at `{shown(path)}" in defect(tmp_path, summary), (path, wrong)
        summary = plain()
        parent(summary, path)[path[-1]] = 1e300
        name = ".".join(map(str, path)).replace(".0", "[0]")
        text = defect(tmp_path, summary)
        is_named = text == f"{name} is out of range" or text.endswith(f"- at `{shown(path)}`")
        assert is_named, (path, text)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("seed", True),
        ("wall_time_s", True),
        ("wall_time_s", "nan"),
        ("wall_time_s", 10**300),
        ("status", "done"),
    ],
    ids=str,
)
def test_values_that_python_would_accept_are_refused(
    key: str, wrong: object, tmp_path: Path
) -> None:
    text = defect(tmp_path, {**plain(), key: wrong})
    assert text == f"{key} is out of range" or text.endswith(f"- at `$.{key}`")


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1" + 400 * "0"])
def test_numbers_that_json_does_not_have_are_refused(text: str, tmp_path: Path) -> None:
    whole = json.dumps({**plain(), "wall_time_s": "HERE"}).replace('"HERE"', text)
    (tmp_path / "summary.json").write_text(whole, encoding="utf-8")
    with pytest.raises(UsageError, match=r"summary\.json is (not valid JSON|damaged)"):
        read_summary(tmp_path)


@pytest.mark.parametrize("loss", [1, 0.5, "nan", "inf", "-inf", None])
def test_a_loss_may_be_any_number_recorded(loss: object, tmp_path: Path) -> None:
    summary = plain()
    summary["test"]["loss"] = loss
    assert read(tmp_path, summary).test.loss == loss


def test_fields_of_later_versions_are_ignored(tmp_path: Path) -> None:
    summary = plain()
    summary["new"] = summary["data"]["new"] = [1]
    assert read(tmp_path, summary) == summary_of()


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_a_file_must_hold_an_object(value: object, tmp_path: Path) -> None:
    assert defect(tmp_path, value).startswith("Expected `object`")


def test_fields_with_a_default_may_be_missing(tmp_path: Path) -> None:
    summary = plain()
    del summary["fp_exceptions"], summary["warnings"]
    assert read(tmp_path, summary) == summary_of()
    summary["fp_exceptions"] = 3
    assert "fp_exceptions" in defect(tmp_path, summary)
