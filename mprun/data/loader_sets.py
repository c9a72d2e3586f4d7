"""Samples that a PyTorch data set or data loader reads one by one.

    DatasetSet   a map-style data set: mprun batches and shuffles it
    StreamSet    an iterable data set: batched as it comes, its length unknown
    LoaderSet    a ready `DataLoader`: its batches are the micro-batches of a step

Each makes a `DataLoader` whose random numbers come from one generator, which the run seeds. A ready
loader is made again with the same settings, so that the user's is not changed; one of a class that
iterates in its own way is used as it is.
"""

from __future__ import annotations

import itertools
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)


@dataclass(frozen=True)
class LoadedSet(ABC):
    """Samples behind a `DataLoader`."""

    nbytes = 0
    """None of them are kept in memory."""
    own_batch_size: int | None = None
    """The batch size that the samples come in; None: the run's."""

    @property
    @abstractmethod
    def samples(self) -> int | None:
        """How many there are; None for a stream."""

    @property
    def is_empty(self) -> bool:
        """Whether there are none; a stream has some."""
        return self.samples == 0

    @property
    def is_stream(self) -> bool:
        """Whether only a pass over the samples shows how many there are."""
        return self.samples is None

    @abstractmethod
    def first(self, n: int | None) -> LoadedSet:
        """The first `n` samples, or all where `n` is None."""

    def select(self, index: Sequence[int]) -> LoadedSet | None:
        """The samples at these positions; None where they cannot be told apart."""
        return None

    def with_inputs(self, convert: Callable[[Any], Any]) -> LoadedSet:
        """The same: samples are not in memory yet."""
        return self

    @abstractmethod
    def loader(
        self, batch_size: int, shuffle: bool, workers: int, generator: torch.Generator
    ) -> DataLoader[Any]:
        """A loader of micro-batches.

        Args:
            batch_size: samples of each, unless the set has its own.
            shuffle: visit the samples in random order, unless the set has its own.
            workers: processes that read samples, unless the set has its own.
            generator: gives all random numbers.
        """

    @abstractmethod
    def batches(self, batch_size: int) -> int | None:
        """Micro-batches of a pass; None where that is unknown."""


@dataclass(frozen=True)
class DatasetSet(LoadedSet):
    """A map-style data set: it has a length, and gives each sample by its position."""

    dataset: Any = ()

    @property
    def samples(self) -> int:
        return len(self.dataset)

    def first(self, n: int | None) -> DatasetSet:
        return self if n is None else self.select(range(min(n, self.samples)))

    def select(self, index: Sequence[int]) -> DatasetSet:
        return replace(self, dataset=Subset(self.dataset, index))

    def loader(
        self, batch_size: int, shuffle: bool, workers: int, generator: torch.Generator
    ) -> DataLoader[Any]:
        return DataLoader(
            self.dataset,
            batch_size,
            shuffle=shuffle,
            num_workers=workers,
            generator=generator,
            worker_init_fn=_WorkerStart(None),
        )

    def batches(self, batch_size: int) -> int:
        return -(-self.samples // batch_size)


@dataclass(frozen=True)
class StreamSet(LoadedSet):
    """An iterable data set."""

    dataset: Any = ()
    limit: int | None = None
    """At most this many samples."""

    @property
    def samples(self) -> None:
        return None

    def first(self, n: int | None) -> LoadedSet:
        if n == 0:
            return NOTHING
        return self if n is None else replace(self, limit=n)

    def loader(
        self, batch_size: int, shuffle: bool, workers: int, generator: torch.Generator
    ) -> DataLoader[Any]:
        dataset = self.dataset if self.limit is None else _FirstOf(self.dataset, self.limit)
        return DataLoader(
            dataset,
            batch_size,
            num_workers=workers if self.limit is None else 0,
            generator=generator,
            worker_init_fn=_WorkerStart(None),
        )

    def batches(self, batch_size: int) -> None:
        return None


@dataclass(frozen=True)
class LoaderSet(LoadedSet):
    """A ready `DataLoader`."""

    given: Any = None

    @property
    def samples(self) -> int | None:
        loader = self.given
        if isinstance(loader.dataset, IterableDataset) or self.batches(1) is None:
            return None
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        known = _length(getattr(sampler, "sampler", sampler))
        if known is None or not _is_plain(loader.batch_sampler):
            known = _length(loader.dataset)
        if known is not None and loader.drop_last and loader.batch_size:
            known -= known % loader.batch_size
        return known

    def batches(self, batch_size: int) -> int | None:
        return _length(self.given)

    def first(self, n: int | None) -> LoadedSet:
        if n is None:
            return self
        if n == 0:
            return NOTHING
        known = self.samples
        part = None if known is not None and n >= known else self.select(range(n))
        return self if part is None else part

    def select(self, index: Sequence[int]) -> LoadedSet | None:
        loader = self.given
        shuffles = type(loader.sampler) is RandomSampler and not loader.sampler.replacement
        in_order = type(loader.sampler) is SequentialSampler
        if isinstance(loader.dataset, IterableDataset) or not (shuffles or in_order):
            return None
        if not _is_plain(loader.batch_sampler):
            return None
        part: Dataset[Any] = Subset(loader.dataset, index)
        settings = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        made = DataLoader(part, shuffle=shuffles, **settings, **_settings(loader))
        return replace(self, given=made)

    def loader(
        self, batch_size: int, shuffle: bool, workers: int, generator: torch.Generator
    ) -> DataLoader[Any]:
        loader = self.given
        for sampler in _samplers(loader):
            if hasattr(sampler, "generator"):
                sampler.generator = generator
        if type(loader).__iter__ is not DataLoader.__iter__:
            loader.generator = generator
            return loader  # type: ignore[no-any-return]
        own: dict[str, Any] = {"generator": generator, **_settings(loader)}
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            own |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            if not isinstance(loader.dataset, IterableDataset):
                own["sampler"] = loader.sampler
        else:
            own["batch_sampler"] = loader.batch_sampler
        return DataLoader(loader.dataset, **own)


NOTHING = DatasetSet()
"""A part without samples."""


def loaded_set(part: Any) -> LoadedSet | None:
    """The set of a data set or a loader; None for anything else.

    A Hugging Face data set without a format gives tensors.
    """
    if isinstance(part, LoadedSet):
        return part
    if isinstance(part, DataLoader):
        return LoaderSet(own_batch_size=part.batch_size, given=part)
    part = _in_torch_format(part)
    if isinstance(part, IterableDataset):
        return StreamSet(dataset=part)
    if isinstance(part, Dataset | list) or _is_map_style(part):
        return DatasetSet(dataset=part)
    return None


def _is_map_style(part: Any) -> bool:
    if isinstance(part, str | bytes | tuple | dict | torch.Tensor):
        return False
    return hasattr(part, "__getitem__") and hasattr(part, "__len__") and not hasattr(part, "dtype")


def _in_torch_format(part: Any) -> Any:
    """A Hugging Face data set as one that gives tensors; anything else as it is."""
    if type(part).__module__.split(".")[0] != "datasets" or not hasattr(part, "with_format"):
        return part
    return (
        part.with_format("torch") if not (getattr(part, "format", None) or {}).get("type") else part
    )


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a loader made again keeps. Workers start anew in each epoch, which can be redone."""
    return {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": _WorkerStart(loader.worker_init_fn),
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor if loader.num_workers else None,
    }


def _samplers(loader: DataLoader[Any]) -> Iterator[Any]:
    if isinstance(loader.dataset, IterableDataset):
        return
    yield loader.sampler
    if loader.batch_sampler is not None:
        yield loader.batch_sampler
        if hasattr(loader.batch_sampler, "sampler"):
            yield loader.batch_sampler.sampler


def _is_plain(batch_sampler: Sampler[list[int]] | Any) -> bool:
    """Whether batches are cut from the sampler's order, and nothing else."""
    return batch_sampler is None or type(batch_sampler) is torch.utils.data.BatchSampler


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


@dataclass(frozen=True)
class _WorkerStart:
    """What a worker does first: signals that its parent defers end it, then the user's function."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.then is not None:
            self.then(worker)


class _FirstOf(IterableDataset[Any]):
    """The first samples of a stream."""

    def __init__(self, dataset: Any, limit: int) -> None:
        self._dataset, self._limit = dataset, limit

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._dataset), self._limit)
