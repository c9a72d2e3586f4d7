"""The part of each batch that one of several processes takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSplit:
    """Part number `rank` of `of` parts; one process takes the whole.

    The order of samples is that of one process: a batch is cut into contiguous parts, so together
    the processes take the same samples in the same step.
    """

    rank: int = 0
    of: int = 1

    def rows(self, size: int) -> tuple[int, int]:
        """The first and the end of this process's rows among the `size` rows of a batch.

        Parts differ by one row at most; a batch of fewer rows than processes leaves some empty.
        """
        return size * self.rank // self.of, size * (self.rank + 1) // self.of

    def most(self, size: int) -> int:
        """The rows of the largest part."""
        return -(-size // self.of)


WHOLE = BatchSplit()
