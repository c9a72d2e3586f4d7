"""Batches that a `DataLoader` reads.

A batch of the loader is one micro-batch; a step takes as many as the run accumulates. The order of
samples comes from one generator, seeded by the run: what a raw loop gets from
`DataLoader(..., generator=torch.Generator().manual_seed(seed))`. All other random numbers that data
code draws are those of the batch (`random_numbers.py`), or of a worker in this epoch. So an epoch
that is read again from its start gives the same samples, and a resumed run continues exactly: it
reads the epoch's first batches again and drops them.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mprun.errors import RunFailedError
from mprun.precision import devices
from mprun.precision._torch import end_workers, started
from mprun.precision.nested import map_tensors
from mprun.train.data.batches import (
    WHOLE,
    Batch,
    Batches,
    BatchForm,
    BatchSplit,
    MicroBatch,
    Stream,
    Whole,
    filled,
    first_samples,
)
from mprun.train.data.loader_sets import LoadedSet, Reading, batch_size
from mprun.train.data.random_numbers import seeded

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
        self._structure: str | None = None  # Of the first batch, as text

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
                    "the data gave no batch: the dataset is empty, or smaller than batch_size with "
                    "drop_last=True"
                )

    def some(self, wanted: int, at_most: int) -> list[MicroBatch]:
        """At most `wanted` micro-batches; one that cannot be cut may have more samples."""
        reading = self._reading._replace(shuffle=False)
        if self.data.own_batch_size is None:
            known = self.samples or wanted * at_most  # a stream: as if it had enough
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
                self._check(content)
                yield content
        finally:  # an epoch that is not read to its end leaves workers behind
            end_workers(source)

    def _check(self, content: Any) -> None:
        """Refuse a batch of another structure than the first: it may not be trained as meant."""
        found = f"a {type(content).__name__}"
        if isinstance(content, Mapping):
            found += f" of {', '.join(map(str, content))}"
        elif isinstance(content, tuple):
            found += f" of {len(content)}"
        self._structure = self._structure or found
        if found != self._structure:
            raise RunFailedError(
                f"the data gave a batch that is {found}, after one that was {self._structure}; "
                "legal are batches of one structure"
            )

    def _micro_batch(self, content: Any) -> MicroBatch:
        size, pinned = batch_size(content), devices.backend(self.device).pins
        content = map_tensors(lambda x: x.to(self.device, non_blocking=pinned), content)
        content = self._form.prepared(content)
        return self._form.micro_batch(content, self._form.convert(content), size)
