"""Batches that a `DataLoader` reads: order, sizes, random numbers, workers."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from mprun.errors import RunFailedError
from mprun.train.data import BatchForm, LoadedSet, LoaderBatches, LoaderOrder, loaded_set
from mprun.train.data.loader_sets import Reading, batch_size

CPU = torch.device("cpu")
NUMBERS = TensorDataset(torch.arange(10))


def batches_of(
    part: Any, seed: int = 0, reading: Reading | None = None, accumulate: int = 1
) -> tuple[LoaderBatches, LoaderOrder]:
    data = part if isinstance(part, LoadedSet) else loaded_set(part)
    assert data is not None
    generator = torch.Generator()
    batches = LoaderBatches(
        data, reading or Reading(4, shuffle=True), generator, BatchForm(), CPU, accumulate
    )
    return batches, LoaderOrder(generator, seed)


def numbers(batches: Any) -> list[list[int]]:
    return [[int(x) for part in b.parts for x in part.content[0].flatten()] for b in batches]


def raw(loader: DataLoader[Any], epochs: int) -> list[list[int]]:
    return [b[0].flatten().tolist() for _ in range(epochs) for b in loader]


def sampled(kind: str, generator: torch.Generator | None) -> DataLoader[Any]:
    own: dict[str, Any] = {"generator": generator}
    if kind == "shuffle":
        return DataLoader(NUMBERS, 4, shuffle=True, **own)
    if kind == "drop_last":
        return DataLoader(NUMBERS, 4, shuffle=True, drop_last=True, **own)
    if kind == "workers":
        return DataLoader(NUMBERS, 4, shuffle=True, num_workers=2, **own)
    if kind == "persistent":
        return DataLoader(NUMBERS, 4, shuffle=True, num_workers=1, persistent_workers=True, **own)
    if kind == "weighted":
        weights = torch.arange(10).double()
        return DataLoader(
            NUMBERS, 4, sampler=WeightedRandomSampler(weights.tolist(), 9, generator=generator)
        )
    sampler = BatchSampler(RandomSampler(NUMBERS, generator=generator), 3, drop_last=False)
    return DataLoader(NUMBERS, batch_sampler=sampler, **own)


KINDS = ["shuffle", "drop_last", "workers", "batch_sampler"]


@pytest.mark.parametrize("kind", KINDS)
def test_three_epochs_are_those_of_the_raw_loader(kind: str) -> None:
    expected = raw(sampled(kind, torch.Generator().manual_seed(7)), 3)
    batches, order = batches_of(sampled(kind, None), seed=7)
    found = [x for _ in range(3) for x in numbers(batches.epoch(order.draw()))]
    assert found == expected
    assert len(expected) == 3 * (batches.length or 0)


@pytest.mark.representative("*-shuffle", "*-drop_last", "*-batch*", "*-weighted", "1-*rs", "1-*nt")
@pytest.mark.parametrize("kind", [*KINDS, "weighted", "persistent"])
@pytest.mark.parametrize("done", [0, 1, 2])
def test_an_epoch_continues_from_its_saved_state(kind: str, done: int) -> None:
    batches, order = batches_of(sampled(kind, None), seed=7)
    list(batches.epoch(order.draw()))
    state = order.state()
    second = numbers(batches.epoch(order.draw()))
    third = numbers(batches.epoch(order.draw()))
    again, restored = batches_of(sampled(kind, None), seed=8)
    restored.restore(state)
    assert numbers(again.epoch(restored.draw(), skip=done)) == second[done:]
    assert numbers(again.epoch(restored.draw())) == third
    assert torch.equal(restored.state(), order.state())


def test_two_users_of_a_loader_do_not_disturb_each_other() -> None:
    loader = sampled("shuffle", None)
    (alone, order), expected = batches_of(loader, seed=3), []
    expected = numbers(alone.epoch(order.draw())) + numbers(alone.epoch(order.draw()))
    train, drawn = batches_of(loader, seed=3)
    evaluated, _ = batches_of(loader, seed=4)
    first = train.epoch(drawn.draw())
    begun = numbers(itertools.islice(first, 1))
    seen = numbers(evaluated)
    found = begun + numbers(first) + numbers(train.epoch(drawn.draw()))
    assert found == expected
    assert seen == numbers(evaluated)
    assert loader.generator is None
    assert loader.sampler.generator is None  # type: ignore[attr-defined]


def test_samplers_learn_the_epoch() -> None:
    class Sampler(torch.utils.data.Sampler[int]):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Any:
            return iter(range(10))

        def __len__(self) -> int:
            return 10

    batches, order = batches_of(DataLoader(NUMBERS, 4, sampler=Sampler()))
    for _ in range(3):
        list(batches.epoch(order.draw()))
    assert Sampler.epochs == [0, 1, 2]


def test_a_step_takes_as_many_batches_as_it_accumulates() -> None:
    batches, order = batches_of(DataLoader(NUMBERS, 2, shuffle=True), accumulate=2)
    assert (batches.length, batches.batch_size) == (3, 4)
    taken = list(batches.epoch(order.draw()))
    assert [[part.size for part in b.parts] for b in taken] == [[2, 2], [2, 2], [2]]
    skipped, of_skipped = batches_of(DataLoader(NUMBERS, 2, shuffle=True), accumulate=2)
    assert numbers(skipped.epoch(of_skipped.draw(), skip=2)) == numbers(taken)[2:]


# ---- random numbers ------------------------------------------------------------------------------


class Drawing(Dataset[Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_data_set_draws_depends_on_nothing_else(workers: int) -> None:
    def drawn(disturb: bool) -> list[list[float]]:
        batches, order = batches_of(Drawing(), 5, Reading(4, True, workers))
        found = []
        for _ in range(2):
            for batch in batches.epoch(order.draw()):
                found += batch.parts[0].content.tolist()
                if disturb:
                    torch.rand(3), np.random.rand(), random.random()
        return found

    first = drawn(False)
    assert first == drawn(True)
    for column in zip(*first, strict=True):
        assert len(set(column)) == 20  # each sample, in each epoch, its own


def test_reading_leaves_random_numbers_as_they_were() -> None:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = (torch.rand(()).item(), np.random.rand(), random.random())
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    batches, order = batches_of(Drawing())
    list(batches.epoch(order.draw()))
    assert (torch.rand(()).item(), np.random.rand(), random.random()) == expected


# ---- sizes and structure -------------------------------------------------------------------------


@dataclass
class Pair:
    name: str
    x: Tensor


X, Y = torch.zeros(5, 3), torch.zeros(5)


@pytest.mark.parametrize(
    ("content", "size"),
    [
        (X, 5),
        ({"text": ["a"] * 5, "x": X}, 5),
        (Pair("n", X), 5),
        ([{"ids": X}, {"labels": Y}], 5),
        (([torch.zeros(3, 4)] * 2, [{"boxes": X}] * 2), 2),
        ([torch.tensor(1.0), ["a", "b", "c"]], 3),
        (["a", "b"], 2),
    ],
    ids=str,
)
def test_the_samples_of_a_batch(content: Any, size: int) -> None:
    assert batch_size(content) == size


def test_some_batches_are_cut_to_size() -> None:
    batches, _ = batches_of(NUMBERS)
    assert [part.size for part in batches.some(3, 2)] == [2, 2, 2]
    loader, _ = batches_of(DataLoader(NUMBERS, 4))
    assert [part.content[0].tolist() for part in loader.some(2, 3)] == [[0, 1, 2], [4, 5, 6]]


# ---- parts of a set ------------------------------------------------------------------------------


def test_a_part_of_a_loader_is_whole_batches() -> None:
    data = loaded_set(DataLoader(NUMBERS, 4, sampler=list(range(9, -1, -1))))
    assert data is not None
    batches, order = batches_of(data.first(5))
    assert numbers(batches.epoch(order.draw())) == [[9, 8, 7, 6], [5, 4, 3, 2]]
    assert (batches.length, batches.samples) == (2, 8)
    assert data.first(0).is_empty
    assert data.first(99) is data


def test_a_data_set_that_gives_batches_has_the_size_of_its_first() -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(3, 6, 2)), batch_size=None)
    data = loaded_set(loader)
    assert data is not None
    assert (data.own_batch_size, data.fixed_batch_size, data.batches(1)) == (6, None, 3)
    batches, order = batches_of(data)
    assert batches.batch_size is None
    assert [b.size for b in batches.epoch(order.draw())] == [6, 6, 6]


@pytest.mark.parametrize("part", ["text", torch.ones(3)])
def test_other_things_are_no_data_sets(part: Any) -> None:
    assert loaded_set(part) is None


def test_data_that_end_too_early_are_refused() -> None:
    batches, order = batches_of(NUMBERS)
    with pytest.raises(RunFailedError, match=r"gave 3 batches in this epoch, and .* taken 4"):
        list(batches.epoch(order.draw(), skip=4))


# ---- workers -------------------------------------------------------------------------------------


def own_children() -> list[multiprocessing.process.BaseProcess]:
    """Those of this test: joblib keeps workers of earlier tests for a while."""
    return [x for x in multiprocessing.active_children() if "Loky" not in type(x).__name__]


def test_workers_end_with_the_epoch_and_before_it() -> None:
    batches, order = batches_of(sampled("workers", None))
    list(batches.epoch(order.draw()))
    assert not own_children()
    stream = batches.epoch(order.draw())
    next(stream)
    assert len(own_children()) == 2
    stream.close()
    assert not own_children()
