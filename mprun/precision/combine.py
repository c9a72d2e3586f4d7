"""What processes with shards must agree on before a step: the gradients' norm, and overflows.

Each process of FSDP2 has gradients of its own shards. Clipping needs the norm of all of them, and
a step that one process skips must be skipped by all. Processes with whole gradients (one process,
or the replicas of DistributedDataParallel) agree already: for them `Combine` itself does nothing.
"""

from __future__ import annotations

from torch import Tensor


class Combine:
    """Combines the figures of one process's gradients with those of the others: here, of none.

    Every process calls the same methods in the same order, also one without any gradient. Its
    figures are then 0.
    """

    def total_norm(self, norm: Tensor) -> Tensor:
        """The root of the sum of squares over processes of the gradients' L2 norm.

        Args:
            norm: scalar on the gradients' device; float32 unless an optimizer of `torch.optim` has
                16-bit gradients. Not finite where a gradient is not.

        Returns:
            A scalar of that dtype on that device, equal on all processes.
        """
        return norm

    def overflow(self, flag: Tensor) -> Tensor:
        """The largest flag of all processes.

        Args:
            flag: 1 where a gradient of this process is not finite, else 0: a float32 scalar on the
                device of the loss scale.

        Returns:
            A float32 scalar on that device, equal on all processes.
        """
        return flag


ALONE = Combine()
"""For gradients that are whole."""
