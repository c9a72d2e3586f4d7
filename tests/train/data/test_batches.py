"""Batches cut from a set in memory, and the order they are cut in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mprun.precision import devices
from mprun.train.data import Batches, BatchForm, TensorBatches, TensorOrder, TensorSet
from mprun.train.data.batches import (
    WHOLE,
    Batch,
    BatchSplit,
    MicroBatch,
    first_samples,
    halves,
    place,
)

CPU = torch.device("cpu")


def numbered(samples: int) -> TensorSet:
    """Samples whose inputs [N, 2] and targets [N] tell their index."""
    index = torch.arange(samples)
    return TensorSet(torch.stack([index, -index], 1), index)


def batches(samples: int, size: int) -> Batches:
    return TensorBatches(numbered(samples), size, BatchForm(), CPU)


# Order


def test_an_order_depends_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    one = TensorOrder(100, seed=1, shuffle=True)
    first = [one.draw() for _ in range(3)]
    torch.manual_seed(6)
    torch.rand(7)
    before = torch.get_rng_state()
    again, other = TensorOrder(100, seed=1, shuffle=True), TensorOrder(100, seed=2, shuffle=True)
    assert all(torch.equal(a, again.draw()) for a in first)
    assert not torch.equal(first[0], other.draw())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_state_tells_the_next_order() -> None:
    order = TensorOrder(100, seed=1, shuffle=True)
    order.draw()
    generator = torch.Generator()
    generator.set_state(order.state())
    assert torch.equal(order.draw(), torch.randperm(100, generator=generator))


# Batches


@given(samples=st.integers(0, 40), size=st.integers(1, 45), shuffle=st.booleans())
def test_batches_partition_the_set(samples: int, size: int, shuffle: bool) -> None:
    cut = batches(samples, size)
    order = TensorOrder(samples, seed=0, shuffle=shuffle).draw()
    found = list(cut.epoch(order))
    assert len(found) == cut.length
    assert all(b.size == len(b.parts[0].inputs[0]) == len(b.parts[0].content[1]) for b in found)
    assert [b.size for b in found[:-1]] == [size] * (len(found) - 1)
    visited = [i for b in found for i in b.parts[0].content[1].tolist()]
    assert sorted(visited) == list(range(samples))
    assert visited == list(range(samples) if order is None else order)
    assert all(
        torch.equal(
            b.parts[0].inputs[0], torch.stack([b.parts[0].content[1], -b.parts[0].content[1]], 1)
        )
        for b in found
    )


@given(skip=st.integers(0, 5), shuffle=st.booleans())
def test_skipped_batches_are_left_out_and_the_rest_is_as_before(skip: int, shuffle: bool) -> None:
    cut = batches(10, 3)
    order = TensorOrder(10, seed=0, shuffle=shuffle).draw()
    whole = [b.parts[0].content[1].tolist() for b in cut.epoch(order)]
    assert [b.parts[0].content[1].tolist() for b in cut.epoch(order, skip)] == whole[skip:]


def test_each_batch_is_prepared_once_and_targets_are_left() -> None:
    seen = []

    def prepare(inputs: Tensor) -> Tensor:
        seen.append(len(inputs))
        return inputs.float() / 2

    found = list(TensorBatches(numbered(10), 4, BatchForm(prepare), CPU))
    assert seen == [4, 4, 2]
    assert found[0].parts[0].inputs[0].dtype == torch.float32
    assert found[1].parts[0].inputs[0][0].tolist() == [2.0, -2.0]
    assert found[1].parts[0].content[1].tolist() == [4, 5, 6, 7]


# Parts of processes


@given(size=st.integers(0, 10_000), of=st.integers(1, 64))
def test_parts_are_a_partition_of_like_sizes(size: int, of: int) -> None:
    parts = [BatchSplit(rank, of).rows(size) for rank in range(of)]
    assert [i for first, end in parts for i in range(first, end)] == list(range(size))
    sizes = [end - first for first, end in parts]
    assert max(sizes) - min(sizes) <= 1
    assert WHOLE.rows(size) == (0, size)


# Sets


def shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_first_and_split_make_no_copy() -> None:
    data = numbered(10)
    head, rest = data.split(7)
    assert (len(data.first(4)), len(head), len(rest)) == (4, 7, 3)
    assert torch.equal(rest.targets, torch.arange(7, 10))
    for part in (data.first(4), head, rest):
        assert shares_memory(part.inputs, data.inputs)
        assert shares_memory(part.targets, data.targets)
    assert data.first(None) is data
    assert len(data.first(99)) == 10


@pytest.mark.parametrize(("free", "moved"), [(480, True), (479, False)])
def test_a_set_moves_where_it_takes_half_of_the_free_memory(
    free: int, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, there = numbered(10), numbered(1)  # 240 bytes
    monkeypatch.setattr(devices, "free_bytes", lambda device: free)
    monkeypatch.setattr(TensorSet, "to", lambda self, device: there)
    assert place(data, torch.device("cuda")) is (there if moved else data)


# ---- cutting: tensors along dimension 0 and lists of values, and nothing that is unsure ----------


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
