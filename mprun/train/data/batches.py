"""Samples decoded in memory, and batches made of them there.

A data loader with worker processes pays for decoding, pickling and collating every sample; for
sets that fit in memory that is most of a step's wait. Here samples lie decoded in tensors, on the
training device where they fit; a batch is one gather and the recipe's `prepare` on the whole
batch, with no Python work per sample.

The order of samples is the same in every precision mode and on every device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mprun.errors import RunFailedError
from mprun.precision import devices
from mprun.precision.nested import all_tensors, map_tensors

Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class BatchSplit:
    """The part of each batch that one of several processes takes: number `rank` of `of` parts.

    The order of samples is that of one process: a batch is cut into contiguous parts, so together
    the processes take the same samples in the same step.
    """

    rank: int = 0
    of: int = 1

    def rows(self, size: int) -> tuple[int, int]:
        """The first and the end of this process's rows of a batch; a small one may leave none."""
        # a part ends where the next one begins, and parts differ by one row at most
        return size * self.rank // self.of, size * (self.rank + 1) // self.of

    def most(self, size: int) -> int:
        """The rows of the largest part."""
        return -(-size // self.of)


WHOLE = BatchSplit()


class SampleSet(ABC):
    """Samples, in memory (`TensorSet`) or behind a `DataLoader` (`LoadedSet`)."""

    nbytes: int
    """Bytes of the samples that are kept in memory."""

    @property
    def own_batch_size(self) -> int | None:
        """The size of the batches that the samples come in; None: the run decides it."""
        return None

    @property
    @abstractmethod
    def samples(self) -> int | None:
        """How many there are; None for a stream."""

    @property
    def is_empty(self) -> bool:
        """Whether there are none; a stream has some."""
        return self.samples == 0

    @abstractmethod
    def batches(self, batch_size: int) -> int | None:
        """Micro-batches of a pass; None where that is unknown."""


@dataclass(frozen=True, init=False)
class TensorSet(SampleSet):
    """Samples in memory: tensors [N, ...] of any dtype, nested in tuples, lists and mappings.

    `TensorSet(x, y)` holds the tuple `(x, y)`; `TensorSet({"ids": x})` holds the mapping.
    """

    content: Any  # The tensors, nested as a batch of them will be

    def __init__(self, *content: Any) -> None:
        # the dataclass is frozen, and makes no __init__ that takes the items of a tuple
        object.__setattr__(self, "content", content[0] if len(content) == 1 else content)

    def __len__(self) -> int:
        return self.samples

    @cached_property  # the loop asks four times a step
    def samples(self) -> int:
        return len(all_tensors(self.content)[0])

    def batches(self, batch_size: int) -> int:
        return -(-len(self) // batch_size)

    @property
    def inputs(self) -> Any:
        """What `prepare` gets: all but the last item of a tuple, the first item of a pair."""
        content = self.content
        if not isinstance(content, tuple | list) or len(content) < 2:
            return content
        return content[0] if len(content) == 2 else content[:-1]

    @property
    def targets(self) -> Any:
        """The last item of a tuple."""
        return self.content[-1]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes that the tensors occupy."""
        return sum(x.nbytes for x in all_tensors(self.content))

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return all_tensors(self.content)[0].device

    def map(self, function: Callable[[Tensor], Tensor]) -> TensorSet:
        """The samples with `function` applied to each tensor."""
        return TensorSet(map_tensors(function, self.content))

    def first(self, n: int | None) -> TensorSet:
        """The first `n` samples, or all where `n` is None; no copy."""
        return self if n is None else self.map(lambda x: x[:n])

    def select(self, index: Sequence[int]) -> TensorSet:
        """A copy of the samples at these positions."""
        positions = torch.tensor(index, device=self.device)
        return self.map(lambda x: x.index_select(0, positions))

    def split(self, n: int) -> tuple[TensorSet, TensorSet]:
        """The first `n` samples and the rest; no copy."""
        return self.first(n), self.map(lambda x: x[n:])

    def with_inputs(self, convert: Convert) -> TensorSet:
        """The same samples with `convert` applied to their inputs."""
        return TensorSet(_with_inputs(self.content, convert))

    def to(self, device: torch.device) -> TensorSet:
        """A copy on `device`."""
        return self.map(lambda x: x.to(device))


NOTHING_COUNTS = (
    "count returned 0 for all samples of a step, so there is nothing to train on; leave samples "
    "out of the training data that have nothing to count"
)


class MicroBatch(NamedTuple):
    """The samples of one forward pass, on the training device."""

    content: Any
    """As the data gave them: what loss and metrics read."""
    inputs: Any
    """As the model takes them: the same in the mode's input dtype and memory format."""
    size: int
    """Samples; 0 for an idle part, which is computed and does not count."""
    weight: float
    """How much its loss counts in the step: what the recipe's `count` gives, else samples."""

    @property
    def as_idle(self) -> MicroBatch:
        """The same samples, for a process that must compute and has none of its own."""
        return self._replace(size=0, weight=0.0)


class Whole(NamedTuple):
    """A batch over all processes."""

    size: int  # Samples
    weight: float | None  # The sum of weights; None: each process knows its own part's alone


class Batch(NamedTuple):
    """The samples of one optimizer step, or the part of them that this process takes."""

    parts: tuple[MicroBatch, ...]
    whole: Whole | None = None
    """The batch that this is a part of; None: this is all of it."""

    @property
    def size(self) -> int:
        """Samples of the whole batch."""
        if self.whole is not None:
            return self.whole.size
        parts = self.parts
        return parts[0].size if len(parts) == 1 else sum([part.size for part in parts])

    @property
    def weight(self) -> float:
        """The sum of the weights of this process's parts."""
        parts = self.parts
        return parts[0].weight if len(parts) == 1 else sum([part.weight for part in parts])

    @property
    def whole_weight(self) -> float:
        """The sum of the weights over all processes; this process's where it is not known."""
        if self.whole is None or self.whole.weight is None:
            return self.weight
        return self.whole.weight

    @property
    def trained(self) -> Batch:
        """The batch without the parts that count 0: the mean of their loss is over nothing.

        For one of several processes they become idle parts.

        Raises:
            RunFailedError: no part is left.
        """
        if 0 not in [part.weight for part in self.parts]:
            return self
        if self.whole is not None:  # the others wait for the exchanges of its passes
            parts = tuple(part if part.weight else part.as_idle for part in self.parts)
            return self._replace(parts=parts)
        parts = tuple(part for part in self.parts if part.weight)
        if not parts:
            raise RunFailedError(NOTHING_COUNTS)
        return Batch(parts)

    @property
    def without_idle(self) -> Batch:
        """The batch without idle parts."""
        if self.whole is None or all(part.size for part in self.parts):
            return self
        return self._replace(parts=tuple(part for part in self.parts if part.size))


Stream = Generator[Batch, None, None]  # Batches one after the other; `close` ends what reads them


class Batches(ABC):
    """A set of samples, batch by batch."""

    data: SampleSet
    """The samples."""
    batch_size: int | None
    """Samples per batch; the last one of an epoch may be smaller. None where they differ."""
    device: torch.device
    """Where batches are needed."""

    @property
    def samples(self) -> int | None:
        """How many there are; None for a stream."""
        return self.data.samples

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return self.data.is_empty

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Batches per epoch; None where that is unknown."""

    def __iter__(self) -> Stream:
        """Batches in the stored order."""
        return self.epoch(None)

    @abstractmethod
    def epoch(self, order: Any, skip: int = 0) -> Stream:
        """Batches in an order that `Order.draw` gave, less the first `skip`."""

    @abstractmethod
    def some(self, wanted: int, at_most: int) -> list[MicroBatch]:
        """At most `wanted` micro-batches of at most `at_most` samples, in the stored order."""


class Order(Protocol):
    """The order in which epochs visit the samples."""

    def state(self) -> Tensor:
        """What the next `draw` depends on."""

    def restore(self, state: Tensor) -> None:
        """Go back to a `state`, which no epoch was read from since."""

    def draw(self) -> Any:
        """The next epoch's order, as `Batches.epoch` takes it."""


_NO_STATE = torch.empty(0, dtype=torch.uint8)  # So that every order has a state, a tensor of bytes


class TensorOrder:
    """The order of samples in memory; its state is the generator's, which the run's seed began."""

    def __init__(self, samples: int, seed: int, shuffle: bool) -> None:
        self._samples = samples
        self._shuffle = shuffle
        # used for nothing else, so that no mode and no device changes what it draws
        self._generator = torch.Generator().manual_seed(seed)

    def state(self) -> Tensor:
        return self._generator.get_state() if self._shuffle else _NO_STATE

    def restore(self, state: Tensor) -> None:
        if self._shuffle:
            self._generator.set_state(state)

    def draw(self) -> Tensor | None:
        """The next epoch's permutation [N], or None for the stored order."""
        if not self._shuffle:
            return None
        return torch.randperm(self._samples, generator=self._generator)


@dataclass(frozen=True)
class BatchForm:
    """How the samples of a batch become what model, loss and metrics take."""

    # Makes the stored inputs those of a batch, of the same or of another dtype
    prepare: Convert = lambda inputs: inputs
    # Makes of a batch what the model takes: the mode's input dtype, a memory format
    convert: Convert = lambda content: content
    count: Callable[[Any], float] | None = None  # What its loss averages over; None: its samples
    # Of a prepared batch with its targets: float64 in `precision=fp64`
    widen: Convert = lambda content: content

    def prepared(self, content: Any) -> Any:
        """A batch of stored samples with its inputs prepared."""
        return self.widen(_with_inputs(content, self.prepare))

    def micro_batch(self, content: Any, inputs: Any, size: int) -> MicroBatch:
        """A micro-batch of `size` samples that are converted already."""
        weight = size if self.count is None else float(self.count(content))
        return MicroBatch(content, inputs, size, weight)


class TensorBatches(Batches):
    """Cuts a set in memory into batches, prepares each and sends it to the training device.

    A batch has `batch_size` samples over all processes, of which `split` is made here, and
    `micro_batch` samples per forward pass; None: the whole batch.
    """

    data: TensorSet
    batch_size: int

    def __init__(
        self,
        data: TensorSet,
        batch_size: int,
        form: BatchForm,
        device: torch.device,
        micro_batch: int | None = None,
        split: BatchSplit = WHOLE,
    ) -> None:
        self.data = data
        self.batch_size = batch_size
        self.device = device
        self._form = form
        self._micro_batch = micro_batch or batch_size
        self._is_floating = any(x.is_floating_point() for x in all_tensors(data.inputs))
        self._moves = data.device != device
        self._split = split

    @property
    def length(self) -> int:
        return self.data.batches(self.batch_size)

    def epoch(self, order: Tensor | None, skip: int = 0) -> Stream:
        """Batches in the given order ([N] of indices, or None for the stored one), less `skip`."""
        size, total = self.batch_size, len(self.data)
        if order is not None:
            order = order.to(self.data.device)
        for start in range(skip * size, total, size):
            stop = min(start + size, total)
            if self._split.of == 1:
                yield self._batch(self._content(order, start, stop), stop - start)
            else:
                yield self._part(order, start, stop)

    def _part(self, order: Tensor | None, start: int, stop: int) -> Batch:
        """This process's part of a batch; an idle sample where it has none."""
        first, end = self._split.rows(stop - start)
        is_idle = first == end
        if is_idle:  # without a pass of this process, the others' exchanges would wait for it
            first, end = 0, 1
        batch = self._batch(self._content(order, start + first, start + end), end - first)
        # what `count` gives for the other parts is known after an exchange: `Layout.weighted`
        weight = float(stop - start) if self._form.count is None else None
        parts = tuple(part.as_idle for part in batch.parts) if is_idle else batch.parts
        most = -(-self._split.most(stop - start) // self._micro_batch)
        return Batch(filled(parts, most), Whole(stop - start, weight))

    def some(self, wanted: int, at_most: int) -> list[MicroBatch]:
        wanted = min(wanted, len(self.data))
        size = min(at_most, len(self.data) // wanted)
        cut = TensorBatches(self.data, size, self._form, self.device)
        return [batch.parts[0] for batch, _ in zip(cut, range(wanted), strict=False)]

    def _content(self, order: Tensor | None, start: int, stop: int) -> Any:
        """The samples of a batch, on the device."""
        if order is None and stop - start == len(self.data):  # all of them: no copy
            content = self.data.content
        elif order is None:
            content = map_tensors(lambda x: x[start:stop], self.data.content)
        else:
            index = order[start:stop]
            content = map_tensors(lambda x: x.index_select(0, index), self.data.content)
        content = self._form.widen(_with_inputs(content, self._prepared))
        return _to(content, self.device) if self._moves else content

    def _prepared(self, inputs: Any) -> Any:
        # integers (bytes of pixels, token ids) are smaller before they are prepared, so they are
        # sent first; floating samples are prepared first, and sent in what dtype they then have
        if self._is_floating or not self._moves:
            return self._form.prepare(inputs)
        return self._form.prepare(_to(inputs, self.device))

    def _batch(self, content: Any, size: int) -> Batch:
        form, micro = self._form, self._micro_batch
        inputs = form.convert(content)
        if size <= micro:
            return Batch((form.micro_batch(content, inputs, size),))
        starts = range(0, size, micro)
        return Batch(
            tuple(
                form.micro_batch(rows(content, n, micro), rows(inputs, n, micro), len_)
                for n, len_ in ((n, min(micro, size - n)) for n in starts)
            )
        )


def filled(parts: tuple[MicroBatch, ...], most: int) -> tuple[MicroBatch, ...]:
    """The parts, and idle ones up to `most`: all processes go forward and back equally often."""
    return parts + (parts[0].as_idle,) * (most - len(parts))


def rows(value: Any, start: int, size: int) -> Any:
    """Samples `start` to `start + size` of nested tensors; views."""
    return map_tensors(lambda x: x[start : start + size], value)


def place(data: TensorSet, device: torch.device) -> TensorSet:
    """`data`, on `device` if it takes at most half of the free memory there."""
    free = devices.free_bytes(device)
    if free is None or data.device == device:
        return data
    # the other half is for weights, gradients, optimizer state and activations
    return data.to(device) if data.nbytes <= free // 2 else data


def _to(value: Any, device: torch.device) -> Any:
    return map_tensors(lambda x: x.to(device), value)


def _with_inputs(content: Any, convert: Convert) -> Any:
    """`content` with `convert` applied to its inputs: all but the last item of a tuple.

    A list counts as one, because PyTorch's collation makes lists of pairs.
    """
    if not isinstance(content, tuple | list) or len(content) < 2:
        return convert(content)
    *inputs, last = content
    converted = (convert(inputs[0]),) if len(inputs) == 1 else convert(tuple(inputs))
    return [*converted, last] if isinstance(content, list) else (*converted, last)


# What has no samples inside; a list of these has one for each sample
_VALUES = (str, bytes, bool, int, float, type(None))


class CannotBeCutError(Exception):
    """A batch does not say which of its dimensions are samples, as a list of images does not."""


def first_samples(part: MicroBatch, at_most: int) -> MicroBatch:
    """At most that many samples of a micro-batch; all where it cannot be cut."""
    if part.size <= at_most:
        return part
    try:
        return _part_of(part, 0, at_most)
    except CannotBeCutError:
        return part


def halves(batch: Batch) -> tuple[Batch, Batch] | None:
    """The two halves of a batch, of equal size; None for what cannot be cut.

    Several parts are divided among the halves, one is cut.
    """
    parts, half = batch.parts, len(batch.parts) // 2
    if half:
        return Batch(parts[:half]), Batch(parts[half : 2 * half])
    size = parts[0].size // 2
    if not size:
        return None
    try:
        return tuple(Batch((_part_of(parts[0], n, size),)) for n in (0, size))  # type: ignore[return-value]
    except CannotBeCutError:
        return None


def _part_of(part: MicroBatch, start: int, size: int) -> MicroBatch:
    content = _rows(part.content, start, size, part.size)
    inputs = _rows(part.inputs, start, size, part.size)
    # as if every sample counted alike: what `count` gives for a part of a batch is not known
    return MicroBatch(content, inputs, size, part.weight * size / part.size)


def _rows(value: Any, start: int, size: int, whole: int) -> Any:
    """Samples `start` to `start + size` of `whole`; tensors are views."""
    if isinstance(value, _VALUES):
        return value
    if type(value) is dict:  # another class of mapping may not be made from its items
        return {key: _rows(item, start, size, whole) for key, item in value.items()}
    is_column = isinstance(value, Tensor) and value.dim() > 0
    if type(value) in (list, tuple):
        are_values = {isinstance(item, _VALUES) for item in value}
        is_column = are_values == {True}
        # a list of samples, or as many columns; a list of two is most likely inputs and targets
        if True not in are_values and (len(value) != whole or whole <= 2):
            return type(value)(_rows(item, start, size, whole) for item in value)
    if is_column and len(value) == whole:
        return value[start : start + size]
    raise CannotBeCutError
