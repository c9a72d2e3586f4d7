"""Batches that a `DataLoader` reads.

A batch of the loader is one micro-batch; a step takes as many as the run accumulates. The order of
samples comes from one generator, seeded by the run: what a raw loop gets from
`DataLoader(..., generator=torch.Generator().manual_seed(seed))`. All other random numbers that data
code draws are those of the batch (`random_states.py`). So an epoch that is read again from its
start gives the same samples, and a resumed run continues exactly: it reads the epoch's first
batches again and drops them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mprun.data.batches import Batch, BatchForm, MicroBatch
from mprun.data.random_states import seeded
from mprun.errors import RunFailedError
from mprun.nested import all_tensors, map_tensors

EVALUATION_SEED = 0
"""Evaluation reads the same samples each time."""
LARGEST_SEED = 2**62


class LoaderOrder:
    """The order in which an epoch visits the samples of a loader; its state is the generator's.

    Args:
        generator: the loader's.
        seed: the run's seed.
    """

    def __init__(self, generator: torch.Generator, seed: int) -> None:
        self._generator = generator.manual_seed(seed)

    def state(self) -> Tensor:
        """The generator's state: what the next epoch depends on."""
        return self._generator.get_state()

    def restore(self, state: Tensor, drawn: bool) -> None:
        """Go back to `state`; states of loaders are always those before the next epoch."""
        self._generator.set_state(state)

    def draw(self) -> int:
        """The seed of what data code draws in the next epoch."""
        copy = torch.Generator()
        copy.set_state(self._generator.get_state())
        return int(torch.randint(LARGEST_SEED, (), generator=copy))


class LoaderBatches:
    """The batches of a loader, on the training device.

    Args:
        loader: gives micro-batches.
        generator: gives the loader's random numbers.
        form: makes of a micro-batch what the model takes.
        device: where batches are needed.
        accumulate: micro-batches per step.
        samples: how many samples there are; None for a stream.
        length: micro-batches of an epoch; None where that is unknown.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        generator: torch.Generator,
        form: BatchForm,
        device: torch.device,
        accumulate: int = 1,
        samples: int | None = None,
        length: int | None = None,
    ) -> None:
        self.device = device
        self.samples = samples
        self.batch_size = None if loader.batch_size is None else loader.batch_size * accumulate
        self.length = None if length is None else -(-length // accumulate)
        self._loader, self._generator = loader, generator
        self._form, self._accumulate = form, accumulate

    @property
    def is_empty(self) -> bool:
        return self.samples == 0

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(None)

    def epoch(self, order: int | None, skip: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, less the first `skip`, which are read and dropped.

        Args:
            order: what `LoaderOrder.draw` gave; None for an evaluation.
            skip: how many to drop.

        Raises:
            RunFailedError: the data ended before the first batch that is wanted.
        """
        if order is None:
            self._generator.manual_seed(EVALUATION_SEED)
            order = EVALUATION_SEED
        contents = self._contents(order)
        dropped = sum(1 for _ in itertools.islice(contents, skip * self._accumulate))
        if dropped < skip * self._accumulate:
            raise RunFailedError(
                f"the data gave {dropped:,} batches in this epoch, and the run that is resumed had "
                f"taken {skip * self._accumulate:,}: it can be resumed only on the same data"
            )
        micro_batches = map(self._micro_batch, contents)
        while parts := tuple(itertools.islice(micro_batches, self._accumulate)):
            yield Batch(parts)

    def some(self, wanted: int, at_most: int) -> list[MicroBatch]:
        return [batch.parts[0] for batch in itertools.islice(self, wanted)]

    def _contents(self, seed: int) -> Iterator[Any]:
        """What the loader yields, each batch with random numbers of its own."""
        with seeded(seed):
            source = iter(self._loader)
        for number in itertools.count(1):
            with seeded((seed + number) % LARGEST_SEED):
                try:
                    content = next(source)
                except StopIteration:
                    return
            yield content

    def _micro_batch(self, content: Any) -> MicroBatch:
        size = batch_size(content, self._loader.batch_size)
        content = map_tensors(lambda x: x.to(self.device), content)
        content = self._form.prepared(content)
        return self._form.micro_batch(content, self._form.convert(content), size)


def batch_size(content: Any, expected: int | None = None) -> int:
    """Samples in a batch that a loader made.

    They are the common length of its tensors; in a batch that lists its samples (of a detector, for
    example: a list of images and a list of targets), the common length of its items.

    Args:
        content: the batch.
        expected: the loader's batch size, which decides where both are possible.
    """
    lengths = {len(x) if x.dim() else 0 for x in all_tensors(content)}
    by_tensors = lengths.pop() if len(lengths) == 1 else None
    by_items = _length_of_items(content)
    known = [n for n in (by_tensors, by_items) if n]
    if not known:
        return expected or 1
    return expected if expected in known else known[0]


def _length_of_items(content: Any) -> int | None:
    """The common length of the lists and tuples that a batch consists of."""
    items = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(items, tuple | list):
        return None
    lists = [x for x in items if isinstance(x, tuple | list)]
    if not lists:
        return len(items) if isinstance(content, list) and len(items) > 2 else None
    lengths = {len(x) for x in lists}
    return lengths.pop() if len(lengths) == 1 else None
