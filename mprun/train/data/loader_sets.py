"""Samples that a PyTorch data set or data loader reads one by one, and batches of them.

    DatasetSet   a map-style data set: mprun batches and shuffles it
    LoaderSet    a ready `DataLoader`, copied for each run: its batches are micro-batches of a step;
                 also of an iterable data set, a stream of unknown length

The order of samples comes from one generator, seeded by the run: what a raw loop gets from
`DataLoader(..., generator=torch.Generator().manual_seed(seed))`. All other random numbers that data
code draws are those of the batch (`random_numbers.py`), or of a worker in this epoch. So an epoch
that is read again from its start gives the same samples, and a resumed run continues exactly: it
reads the epoch's first batches again and drops them.
"""

from __future__ import annotations

import copy
import itertools
import signal
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, Subset

from mprun.errors import RunFailedError, UsageError
from mprun.precision import devices
from mprun.precision._torch import end_workers, started
from mprun.precision.nested import children, map_tensors
from mprun.train.data.batches import (
    WHOLE,
    Batch,
    Batches,
    BatchForm,
    BatchSplit,
    MicroBatch,
    SampleSet,
    Stream,
    Whole,
    filled,
    first_samples,
)
from mprun.train.data.random_numbers import seeded

Loader = DataLoader[Any]


class Reading(NamedTuple):
    """How the samples of a set are read that does not decide it itself."""

    batch_size: int  # Samples of a micro-batch
    shuffle: bool = False  # Visit the samples in random order
    workers: int = 0  # Processes that read samples
    pin: bool = False  # Put batches into memory that a GPU copies from directly


@dataclass(frozen=True)
class LoadedSet(SampleSet):
    """Samples behind a `DataLoader`, of which none are kept in memory."""

    nbytes: ClassVar[int] = 0  # type: ignore[misc]
    most: ClassVar[int | None] = None
    """At most this many batches are read; None: all."""

    @property
    def fixed_batch_size(self) -> int | None:
        """The own batch size, where all batches but the last have it."""
        return self.own_batch_size

    @abstractmethod
    def first(self, n: int | None) -> LoadedSet:
        """The first `n` samples, or all where `n` is None."""

    def with_inputs(self, convert: Callable[[Any], Any]) -> LoadedSet:
        """The same: samples are not in memory yet."""
        return self

    @abstractmethod
    def loader(self, reading: Reading, generator: torch.Generator, epoch: int = 0) -> Loader:
        """A loader of micro-batches for one pass, read so unless the set decides it.

        The generator gives the order of samples and the seeds of workers; the epoch is the number
        of the pass, for samplers with `set_epoch`.
        """

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

    def loader(self, reading: Reading, generator: torch.Generator, epoch: int = 0) -> Loader:
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
        # without a batch sampler the data set gives batches
        if self.is_stream or batches is None or loader.batch_sampler is None:
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
        """Whether only a pass over the samples shows how many there are."""
        return isinstance(self.given.dataset, IterableDataset)

    def batches(self, batch_size: int) -> int | None:
        limits = (x for x in (_length(self.given), self.most) if x is not None)
        return min(limits, default=None)

    def first(self, n: int | None) -> LoadedSet:
        """As many whole batches as contain `n` samples."""
        if n is None or (self.samples is not None and n >= self.samples):
            return self
        if n == 0:
            return NOTHING
        return replace(self, most=-(-n // self.own_batch_size))

    def loader(self, reading: Reading, generator: torch.Generator, epoch: int = 0) -> Loader:
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
        return LoaderSet(given=part)
    if type(part).__module__.split(".")[0] == "datasets" and hasattr(part, "with_format"):
        has_format = (getattr(part, "format", None) or {}).get("type")  # streams may have None
        part = part if has_format else part.with_format("torch")
    if isinstance(part, IterableDataset):
        raise UsageError(
            f"data(): {name} is a {type(part).__name__}, a stream; legal is a loader of it, "
            "DataLoader(stream, batch_size=...)"
        )
    if isinstance(part, Dataset) or _is_map_style(part):
        if _length(part) is None:
            kind = type(part).__name__
            raise UsageError(
                f"data(): {name} is a {kind} without __len__; legal is a Dataset with __len__ and "
                "__getitem__, or a DataLoader"
            )
        return DatasetSet(dataset=part)
    return None


def _is_map_style(part: Any) -> bool:
    # what has a dtype is an array or a tensor: content, no data set
    if isinstance(part, str | bytes | tuple | dict) or hasattr(part, "dtype"):
        return False
    return hasattr(part, "__getitem__") and hasattr(part, "__len__")


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
    are_alike = (isinstance(x, Mapping) and set(x) == set(items[0]) for x in items)
    if isinstance(content, list) and items and all(are_alike):
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


def _copy(loader: Loader, **changes: Any) -> Loader:
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


def _batch_sampler(loader: Loader, sampler: Any, generator: torch.Generator, epoch: int) -> Any:
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


# ---- batches that a loader reads -----------------------------------------------------------------

EVALUATION_SEED = 0  # Evaluation reads the same samples each time
MAX_SEED = 2**62  # PyTorch's seeds are int64, and numbers of batches are added
_EPOCH_BYTES = 8  # Of the epoch's number, behind the generator's state: a checkpoint has one tensor


class EpochSeed(NamedTuple):
    """What decides the samples of an epoch, beside the generator's state."""

    seed: int  # Of what data code draws
    number: int  # From 0, for samplers with `set_epoch`


class LoaderOrder:
    """The order of a loader's samples; its state is that of the loader's generator.

    The generator moves on while an epoch is read, as in a raw loop.
    """

    def __init__(self, generator: torch.Generator, seed: int) -> None:
        self._generator = generator.manual_seed(seed)
        self._epoch = 0

    def state(self) -> Tensor:
        """The generator's state and the number of epochs: what the next epoch depends on."""
        epoch = torch.tensor(list(self._epoch.to_bytes(_EPOCH_BYTES, "little")), dtype=torch.uint8)
        return torch.cat([self._generator.get_state(), epoch])

    def restore(self, state: Tensor) -> None:
        self._generator.set_state(state[:-_EPOCH_BYTES].clone())
        self._epoch = int.from_bytes(bytes(state[-_EPOCH_BYTES:].tolist()), "little")

    def draw(self) -> EpochSeed:
        """What decides the next epoch."""
        # from a copy: the loader's generator moves on as in a raw loop, which draws no such seed
        copy = torch.Generator()
        copy.set_state(self._generator.get_state())
        self._epoch += 1
        seed = int(torch.randint(MAX_SEED, (), generator=copy))
        return EpochSeed(seed, self._epoch - 1)


class LoaderBatches(Batches):
    """The batches of a loader, on the training device: `accumulate` micro-batches per process.

    Of `split` only one process's micro-batches are taken; the others are read and dropped, so that
    the order of samples is that of one process. The generator gives the random order.
    """

    data: LoadedSet

    def __init__(
        self,
        data: LoadedSet,
        reading: Reading,
        generator: torch.Generator,
        form: BatchForm,
        device: torch.device,
        accumulate: int = 1,
        split: BatchSplit = WHOLE,
    ) -> None:
        self.data, self.device = data, device
        size = reading.batch_size if data.own_batch_size is None else data.fixed_batch_size
        self._split, self._per_step = split, accumulate * split.of
        self.batch_size = None if size is None else size * self._per_step
        self._reading, self._generator = reading, generator
        self._form, self._accumulate = form, accumulate

    @property
    def length(self) -> int | None:
        micro_batches = self.data.batches(self._reading.batch_size)
        return None if micro_batches is None else -(-micro_batches // self._per_step)

    def epoch(self, order: EpochSeed | None, skip: int = 0) -> Stream:
        """The batches of an epoch, less the first `skip`, which are read and dropped.

        The order is what `LoaderOrder.draw` gave; None for an evaluation.

        Raises:
            RunFailedError: the data ended before the first batch that is wanted.
        """
        with closing(self._contents(order)) as contents:
            wanted = skip * self._per_step
            dropped = sum(1 for _ in itertools.islice(contents, wanted))
            if dropped < wanted:
                raise RunFailedError(
                    f"the data gave {dropped:,} batches in this epoch, and the run that is resumed "
                    f"had taken {wanted:,}: it can be resumed only with the same data"
                )
            empty = not skip
            while batch := self._step(contents):
                empty = False
                yield batch
            if empty:
                raise RunFailedError(
                    "the data gave no batch: the dataset is empty, smaller than batch_size with "
                    "drop_last=True, or an iterator that gives its samples once"
                )

    def some(self, wanted: int, at_most: int) -> list[MicroBatch]:
        """At most `wanted` micro-batches; one that cannot be cut may have more samples."""
        reading = self._reading._replace(shuffle=False)
        if self.data.own_batch_size is None:
            known = self.samples or 1
            size = max(1, min(at_most, known // min(wanted, known)))
            reading = reading._replace(batch_size=size)
        cut = LoaderBatches(self.data, reading, self._generator, self._form, self.device)
        with closing(iter(cut)) as stream:
            parts = [batch.parts[0] for batch in itertools.islice(stream, wanted)]
        return [first_samples(part, at_most) for part in parts]

    def _step(self, contents: Iterator[Any]) -> Batch | None:
        """The micro-batches of the next step; the last step of an epoch may have fewer."""
        if self._split.of == 1:
            parts = tuple(map(self._micro_batch, itertools.islice(contents, self._accumulate)))
            return Batch(parts) if parts else None
        read = list(itertools.islice(contents, self._per_step))
        if not read:
            return None
        first, end = self._split.rows(len(read))
        own = tuple(map(self._micro_batch, read[first:end]))
        own = own or (self._micro_batch(read[0]).as_idle,)
        own = filled(own, self._split.most(len(read)))
        size = sum(map(batch_size, read))
        return Batch(own, Whole(size, float(size) if self._form.count is None else None))

    def _contents(self, order: EpochSeed | None) -> Generator[Any, None, None]:
        """What the loader yields, each batch with random numbers of its own."""
        generator, epoch = self._generator, order
        if epoch is None:
            generator = torch.Generator().manual_seed(EVALUATION_SEED)
            epoch = EpochSeed(EVALUATION_SEED, 0)
        loader = self.data.loader(self._reading, generator, epoch.number)
        with seeded(epoch.seed):  # the data set's own `__iter__` may draw when it begins
            source = started(loader)
        try:
            # One more is asked for than there are: then a sampler draws its last numbers, as in a
            # raw loop.
            for number in itertools.count(1):
                if self.data.most is not None and number > self.data.most:
                    return
                with seeded((epoch.seed + number) % MAX_SEED):
                    try:
                        content = next(source)
                    except StopIteration:
                        return
                yield content
        finally:  # an epoch that is not read to its end leaves workers behind
            end_workers(source)

    def _micro_batch(self, content: Any) -> MicroBatch:
        size, pinned = batch_size(content), devices.backend(self.device).pins
        content = map_tensors(lambda x: x.to(self.device, non_blocking=pinned), content)
        content = self._form.prepared(content)
        return self._form.micro_batch(content, self._form.convert(content), size)
