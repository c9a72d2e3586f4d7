"""Cutting a batch: tensors along dimension 0 and lists of values, and nothing that is unsure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mprun.train.data.batches import Batch, MicroBatch, first_samples, halves

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)
WORDS = ["a", "b", "c", "d", "e", "f"]


def part(content: Any, size: int = 6) -> MicroBatch:
    return MicroBatch(content, content, size, size)


def test_strings_are_cut_with_their_tensors() -> None:
    first, second = halves(Batch((part({"word": WORDS, "x": X, "y": Y}),))) or ((), ())
    assert isinstance(first, Batch)
    assert isinstance(second, Batch)
    assert [b.parts[0].content["word"] for b in (first, second)] == [WORDS[:3], WORDS[3:]]
    assert torch.equal(second.parts[0].inputs["x"], X[3:])
    assert first.size == second.size == 3


@pytest.mark.parametrize(
    "content", [(X, Y), [X, Y], ((X, X), {"y": Y, "scale": 2.0, "name": None})]
)
def test_nested_tensors_are_cut(content: Any) -> None:
    cut = first_samples(part(content), 4)
    assert cut.size == 4
    assert type(cut.content) is type(content)
    flat = cut.content[0][0] if isinstance(content[0], tuple) else cut.content[0]
    assert torch.equal(flat, X[:4])


@pytest.mark.parametrize(
    "content",
    [
        ([torch.zeros(3, 4, 4)] * 3, [{"boxes": torch.zeros(1, 4)}] * 3),  # channels, not samples
        {"word": WORDS[:5], "x": X},
        (X, torch.tensor(1.0)),
        (X, Y[:5]),
    ],
    ids=["images", "other length", "no dimension", "other tensor"],
)
def test_what_does_not_say_its_samples_is_not_cut(content: Any) -> None:
    whole = part(
        content, 3 if isinstance(content[0] if isinstance(content, tuple) else 0, list) else 6
    )
    assert halves(Batch((whole,))) is None
    assert first_samples(whole, 2) is whole


def test_several_parts_are_divided() -> None:
    parts = tuple(part((X, Y)) for _ in range(5))
    first, second = halves(Batch(parts)) or ((), ())
    assert isinstance(first, Batch)
    assert isinstance(second, Batch)
    assert (first.parts, second.parts) == (parts[:2], parts[2:4])
