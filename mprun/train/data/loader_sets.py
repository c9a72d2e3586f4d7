"""Samples that a PyTorch data set or data loader reads one by one.

    DatasetSet   a map-style data set: mprun batches and shuffles it
    StreamSet    an iterable data set: batched as it comes, its length unknown
    LoaderSet    a ready `DataLoader`: its batches are the micro-batches of a step

Each makes a `DataLoader` whose random numbers come from one generator, which the run seeds. A ready
loader and its samplers are copied, so that runs that share it do not disturb each other.
"""

from __future__ import annotations

import copy
import itertools
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from mprun.errors import UsageError
from mprun.precision.nested import children
from mprun.train.data.random_numbers import seeded


class Reading(NamedTuple):
    """How the samples of a set are read that does not decide it itself."""

    batch_size: int  # Samples of a micro-batch
    shuffle: bool = False  # Visit the samples in random order
    workers: int = 0  # Processes that read samples
    pin: bool = False  # Put batches into memory that a GPU copies from directly


@dataclass(frozen=True)
class LoadedSet(ABC):
    """Samples behind a `DataLoader`."""

    nbytes: ClassVar[int] = 0
    """None of them are kept in memory."""
    most: ClassVar[int | None] = None
    """At most this many batches are read; None: all."""

    @property
    def own_batch_size(self) -> int | None:
        """The size of the batches that the samples come in; None: the run decides it."""
        return None

    @property
    def fixed_batch_size(self) -> int | None:
        """The same, where all batches but the last have it."""
        return self.own_batch_size

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

    @property
    def places(self) -> int | None:
        """How many positions `select` takes: also of samples that no batch of an epoch has."""
        return self.samples

    def with_inputs(self, convert: Callable[[Any], Any]) -> LoadedSet:
        """The same: samples are not in memory yet."""
        return self

    @abstractmethod
    def loader(
        self, reading: Reading, generator: torch.Generator, epoch: int = 0
    ) -> DataLoader[Any]:
        """A loader of micro-batches for one pass, read so unless the set decides it.

        The generator gives the order of samples and the seeds of workers; the epoch is the number
        of the pass, for samplers with `set_epoch`.
        """

    @abstractmethod
    def batches(self, batch_size: int) -> int | None:
        """Micro-batches of a pass; None where that is unknown."""

    def example(self, batch_size: int) -> Any:
        """The first batch, or None where there is none; it is read here, without workers."""
        with seeded(0):
            loader = self.loader(Reading(batch_size), torch.Generator().manual_seed(0))
            # without workers PyTorch refuses a prefetch factor and a timeout
            return next(iter(_copy(loader, num_workers=0, prefetch_factor=None, timeout=0)), None)


@dataclass(frozen=True)
class DatasetSet(LoadedSet):
    """A map-style data set: it has a length, and gives each sample by its position."""

    dataset: Any = ()

    @property
    def samples(self) -> int:
        return len(self.dataset)

    def first(self, n: int | None) -> DatasetSet:
        return self if n is None or n >= self.samples else self.select(range(n))

    def select(self, index: Sequence[int]) -> DatasetSet:
        return replace(self, dataset=Subset(self.dataset, index))

    def loader(
        self, reading: Reading, generator: torch.Generator, epoch: int = 0
    ) -> DataLoader[Any]:
        return DataLoader(
            self.dataset,
            reading.batch_size,
            shuffle=reading.shuffle,
            num_workers=reading.workers,
            generator=generator,
            worker_init_fn=_WorkerStart(None),
            pin_memory=reading.pin,
        )

    def batches(self, batch_size: int) -> int:
        return -(-self.samples // batch_size)


@dataclass(frozen=True)
class StreamSet(LoadedSet):
    """An iterable data set. One process reads it: each worker would read the whole stream."""

    dataset: Any = ()
    limit: int | None = None  # At most this many samples

    @property
    def samples(self) -> None:
        return None

    def first(self, n: int | None) -> LoadedSet:
        if n == 0:
            return NOTHING
        return self if n is None else replace(self, limit=n)

    def loader(
        self, reading: Reading, generator: torch.Generator, epoch: int = 0
    ) -> DataLoader[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        dataset = self.dataset if self.limit is None else _FirstOf(self.dataset, self.limit)
        return DataLoader(dataset, reading.batch_size, generator=generator, pin_memory=reading.pin)

    def batches(self, batch_size: int) -> None:
        return None


@dataclass(frozen=True)
class LoaderSet(LoadedSet):
    """A ready `DataLoader`."""

    given: Any = None
    most: int | None = None  # type: ignore[misc]

    @cached_property
    def own_batch_size(self) -> int:
        """The loader's; where its batches have several sizes, that of the first one."""
        loader = self.given
        known = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if isinstance(known, int):
            return known
        return batch_size(self.example(1))

    @property
    def fixed_batch_size(self) -> int | None:
        return None if self.given.batch_size is None else self.own_batch_size

    @property
    def samples(self) -> int | None:
        loader, batches = self.given, self.batches(1)
        if isinstance(loader.dataset, IterableDataset) or batches is None:
            return None
        if loader.batch_sampler is None:  # the data set gives batches
            return None
        is_plain = type(loader.batch_sampler) is BatchSampler
        known: int | None = _length(loader.batch_sampler.sampler if is_plain else loader.dataset)
        if known is None or not (is_plain and loader.batch_size):
            return known
        most: int = batches * loader.batch_size
        return min(known, most)

    @property
    def is_empty(self) -> bool:
        return self.batches(1) == 0

    @property
    def is_stream(self) -> bool:
        return isinstance(self.given.dataset, IterableDataset)

    def batches(self, batch_size: int) -> int | None:
        known = _length(self.given)
        if self.most is None or known is None:
            return self.most if known is None else known
        return min(known, self.most)

    def first(self, n: int | None) -> LoadedSet:
        """The first `n` samples, or as many whole batches of another sampler's as contain them."""
        if n is None or (self.samples is not None and n >= self.samples):
            return self
        if n == 0:
            return NOTHING
        return self.select(range(n)) or replace(self, most=-(-n // self.own_batch_size))

    @property
    def places(self) -> int | None:
        return None if self.is_stream else _length(self.given.dataset)

    def select(self, index: Sequence[int]) -> LoadedSet | None:
        loader = self.given
        sampler = loader.sampler
        shuffles = (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler.num_samples == _length(loader.dataset)  # it does not draw some of them
        )
        if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
            return None
        if self.most is not None or not (shuffles or type(sampler) is SequentialSampler):
            return None
        part: Subset[Any] = Subset(loader.dataset, index)
        own: Sampler[int] = RandomSampler(part) if shuffles else SequentialSampler(part)
        batches = BatchSampler(own, loader.batch_size, loader.drop_last)
        return replace(self, given=_copy(loader, dataset=part, sampler=own, batch_sampler=batches))

    def loader(
        self, reading: Reading, generator: torch.Generator, epoch: int = 0
    ) -> DataLoader[Any]:
        given = self.given
        own: dict[str, Any] = {
            "generator": generator,
            "persistent_workers": False,  # workers start anew, so that an epoch can be read again
            "in_order": True,  # else batches come in the order in which workers finish them
            "worker_init_fn": _WorkerStart(given.worker_init_fn),
        }
        if self.is_stream:
            if hasattr(given.dataset, "set_epoch"):
                given.dataset.set_epoch(epoch)
        else:
            own["sampler"] = _seeded(given.sampler, generator, epoch)
            own["batch_sampler"] = _batch_sampler(given, own["sampler"], generator, epoch)
        return _copy(given, **own)


NOTHING = DatasetSet()  # A part without samples


def loaded_set(part: Any, name: str = "train") -> LoadedSet | None:
    """The set of a data set or a loader that a recipe's `data` gave; None for anything else.

    A Hugging Face data set without a format gives tensors.

    Raises:
        UsageError: it cannot be read twice in the same way.
    """
    if isinstance(part, LoadedSet):
        return part
    if isinstance(part, DataLoader):
        _check_stream(part.dataset, name)
        return LoaderSet(given=part)
    part = _in_torch_format(part)
    if isinstance(part, IterableDataset):
        _check_stream(part, name)
        return StreamSet(dataset=part)
    if isinstance(part, Dataset) or _is_map_style(part):
        if _length(part) is None:
            kind = type(part).__name__
            raise UsageError(
                f"data(): {name} is a {kind} without __len__; legal is a Dataset with __len__ and "
                "__getitem__, or an IterableDataset with __iter__"
            )
        return DatasetSet(dataset=part)
    return None


def _check_stream(dataset: Any, name: str) -> None:
    if isinstance(dataset, IterableDataset) and hasattr(type(dataset), "__next__"):
        raise UsageError(
            f"data(): {name} is a {type(dataset).__name__}, an iterator that gives its samples "
            "once; legal is an IterableDataset whose __iter__ begins anew for each epoch and run"
        )


def _is_map_style(part: Any) -> bool:
    # what has a dtype is an array or a tensor: content, no data set
    if isinstance(part, str | bytes | tuple | dict) or hasattr(part, "dtype"):
        return False
    return hasattr(part, "__getitem__") and hasattr(part, "__len__")


def _in_torch_format(part: Any) -> Any:
    """A Hugging Face data set as one that gives tensors; anything else as it is."""
    if type(part).__module__.split(".")[0] != "datasets" or not hasattr(part, "with_format"):
        return part
    has_format = (getattr(part, "format", None) or {}).get("type")  # streams may have None
    return part if has_format else part.with_format("torch")


def batch_size(content: Any) -> int:
    """Samples in a batch that a loader made.

    They are the length of the first tensor that is an item of the batch; without one, of the first
    list: a detector's batch lists its images and its targets. A list of mappings with the same keys
    is a list of samples.
    """
    if isinstance(content, Tensor):
        return len(content) if content.dim() else 1
    items = children(content)
    if items is None:
        return 1
    if isinstance(content, list) and _are_samples(items):
        return len(items)
    for item in items:
        if isinstance(item, Tensor) and item.dim():
            return len(item)
    for item in items:
        if isinstance(item, list | tuple):
            return len(item)
        if children(item):
            return batch_size(item)
    return max(1, len(items)) if isinstance(content, list) else 1


def _are_samples(items: list[Any]) -> bool:
    if not items or not all(isinstance(x, Mapping) for x in items):
        return False
    return all(set(x) == set(items[0]) for x in items)


def _copy(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A copy of a loader; PyTorch lets no one assign to some of its attributes."""
    copied = copy.copy(loader)
    vars(copied).update(changes)
    return copied


def _seeded(sampler: Any, generator: torch.Generator, epoch: int) -> Any:
    """A copy of a sampler that draws from `generator`."""
    copied = copy.copy(sampler)
    if hasattr(copied, "generator"):
        copied.generator = generator
    if hasattr(copied, "set_epoch"):
        copied.set_epoch(epoch)
    return copied


def _batch_sampler(
    loader: DataLoader[Any], sampler: Any, generator: torch.Generator, epoch: int
) -> Any:
    """A copy of the loader's, which takes its samples from `sampler` or from a copy of its own."""
    if loader.batch_sampler is None:
        return None
    copied = _seeded(loader.batch_sampler, generator, epoch)
    inner = getattr(copied, "sampler", None)
    if inner is loader.sampler:
        copied.sampler = sampler
    elif isinstance(inner, Sampler):
        copied.sampler = _seeded(inner, generator, epoch)
    return copied


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


# A class, because it is pickled for workers that are spawned, which a nested function cannot be
@dataclass(frozen=True)
class _WorkerStart:
    """What a worker does first: signals that its parent defers end it, then the user's function."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if hasattr(signal, "SIGHUP"):  # Windows has none
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if self.then is not None:
            self.then(worker)


class _FirstOf(IterableDataset[Any]):
    """The first samples of a stream."""

    def __init__(self, dataset: Any, limit: int) -> None:
        self._dataset, self._limit = dataset, limit

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._dataset), self._limit)
