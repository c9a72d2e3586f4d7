"""The checker of recorded values itself."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import pytest

from mprun.records.run_record import Number, Summary
from tests.schema import conforms
from tests.summaries import example


class Inner(TypedDict):
    size: int


class Outer(TypedDict):
    name: str
    ratio: float
    loss: Number | None
    flag: bool
    kind: Literal["a", "b"]
    counts: dict[str, int | None]
    rows: list[Inner]


def outer(**changes: Any) -> dict[str, Any]:
    whole = {"name": "x", "ratio": 0.5, "loss": 1.5, "flag": True, "kind": "a"}
    return {**whole, "counts": {"x": 1, "y": None}, "rows": [{"size": 1}], **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ratio": 1},
        {"loss": None},
        {"loss": "nan"},
        {"loss": "-inf"},
        {"rows": []},
        {"counts": {}},
    ],
)
def test_a_right_value_conforms(changes: dict[str, Any]) -> None:
    assert conforms(outer(**changes), Outer)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"extra": 1}, r"\$\.extra: unknown"),
        ({"name": None}, r"\$\.name"),
        ({"ratio": True}, r"\$\.ratio"),
        ({"ratio": "nan"}, r"\$\.ratio"),
        ({"ratio": float("nan")}, r"\$\.ratio"),
        ({"loss": "NaN"}, r"\$\.loss"),
        ({"loss": float("inf")}, r"\$\.loss"),
        ({"flag": 1}, r"\$\.flag"),
        ({"kind": "c"}, r"\$\.kind"),
        ({"counts": {"x": 1.5}}, r"\$\.counts\.x"),
        ({"counts": [1]}, r"\$\.counts"),
        ({"rows": {"size": 1}}, r"\$\.rows"),
        ({"rows": [{"size": 1}, {"size": "1"}]}, r"\$\.rows\[1\]\.size"),
        ({"rows": [{}]}, r"\$\.rows\[0\]\.size: missing"),
        ({"rows": [None]}, r"\$\.rows\[0\]"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(AssertionError, match=path):
        conforms(outer(**changes), Outer)


def test_every_defect_is_listed() -> None:
    with pytest.raises(AssertionError) as caught:
        conforms(outer(name=1, flag=None), Outer)
    assert len(str(caught.value).splitlines()) == 2


def test_every_field_of_a_summary_is_needed() -> None:
    assert conforms(example(), Summary)
    for key in example():
        lacking = {k: v for k, v in example().items() if k != key}
        with pytest.raises(AssertionError, match=rf"\$\.{key}: missing"):
            conforms(lacking, Summary)
