"""Tensors nested in containers: every container keeps its type, other leaves pass untouched."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mprun.precision.nested import all_tensors, leaves, map_tensors, to_dtype


class Pair(NamedTuple):
    x: Tensor
    name: str


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    label: str | None


@dataclass
class Output(OrderedDict[str, Any]):
    """As `transformers.utils.ModelOutput`: a dataclass whose fields are its items as well."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, f.name) for f in fields(self))


X = torch.arange(6.0).view(3, 2)
IDS = torch.arange(3)

NESTED: dict[str, Any] = {
    "tensor": X,
    "tuple": (X, IDS, "text"),
    "list": [X, None, 3],
    "named tuple": Pair(X, "a"),
    "dict": {"x": X, "names": ["a", "b", "c"]},
    "ordered dict": OrderedDict(out=X, aux=IDS),
    "default dict": defaultdict(list, {"a": [X, IDS], "c": "text"}),
    "user dict": UserDict(a=X, b=IDS, c="text"),
    "return type": torch.return_types.max((X, IDS)),
    "dataclass": Frozen(X, None),
    "model output": Output(logits=(X, IDS, "text")),
    "lists of dicts": ([X, X[:2]], [{"boxes": X, "labels": IDS}, {"boxes": X, "labels": IDS}]),
}


@pytest.mark.parametrize("name", NESTED)
def test_floating_leaves_change_and_nothing_else_does(name: str) -> None:
    value = NESTED[name]
    half = to_dtype(value, torch.float16)
    assert type(half) is type(value)
    if isinstance(half, Output):
        assert half["logits"] is half.logits
    before, after = list(leaves(value)), list(leaves(half))
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        if isinstance(old, Tensor) and old.is_floating_point():
            assert new.dtype == torch.float16
            assert torch.equal(new.float(), old)
        else:
            assert new is old


@pytest.mark.parametrize("name", NESTED)
def test_a_value_without_a_change_is_returned_itself(name: str) -> None:
    assert map_tensors(lambda x: x, NESTED[name]) is NESTED[name]


def test_all_tensors_come_in_order() -> None:
    found = all_tensors(NESTED["lists of dicts"])
    assert [x.shape[0] for x in found] == [3, 2, 3, 3, 3, 3]
