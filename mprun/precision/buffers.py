"""Floating buffers under overflows, and float32 copies that emulation keeps of 16-bit tensors.

**Buffers** are, for one, BatchNorm's running statistics. A step that overflows in the forward pass
writes infinities and NaN into them; skipping the optimizer step does not undo that, and every later
evaluation is NaN. So after a skipped step, elements of floating buffers that became non-finite get
their values from before it. The others keep what the step wrote: if only the backward pass
overflowed, the statistics of the forward pass are good.

After a step that was taken nothing is restored: `overflows` reports such an overflow as an event.

**Copies** let emulation widen the same numbers once. Emulation computes in float32 and stores in 16
bits. Taken literally, each op widens its inputs and rounds its result: two passes over memory for
each tensor that passes from one op to the next, and one more for each op of the backward pass that
reads it again. Instead the loop that rounds a result writes it twice, as 16 bits and as the float32
of the same value, over the unrounded result. The next op reads the float32 numbers as they are.
Memory is the price: six bytes a number, not two.

A copy belongs to a storage, so views share it, and lives as long. It is valid

- while nothing was written to the tensor: PyTorch counts writes, and emulation drops the copy of
  what an op writes to, also through `Tensor.data`, which has a count of its own;
- within its generation: one training step, or one region outside of a step. Kernels that PyTorch
  does not know of write to parameters and gradients between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mprun.precision._torch import is_fake, write_count
from mprun.precision.policy import dtype_name

CHANNELS = 8  # Channels that an event's text names


class BufferOverflow(NamedTuple):
    """Elements of a buffer that became non-finite in a step that was taken."""

    step: int
    buffer: str  # Its name, as `model.named_buffers()` gives it
    channels: list[int]  # Indices along its first dimension; empty for a scalar
    dtype: str

    @property
    def text(self) -> str:
        """A sentence for users."""
        named = ", ".join(map(str, self.channels[:CHANNELS]))
        more = f" and {len(self.channels) - CHANNELS} more" if len(self.channels) > CHANNELS else ""
        where = f", channel {named}{more}" if self.channels else ""
        return (
            f"step {self.step} was taken and made the buffer {self.buffer}{where} non-finite "
            f"({self.dtype}): evaluation will use it; a float32 buffer, precision.layers with fp32 "
            "for its module, or smaller activations avoid that"
        )


# A buffer's name in reports, its module, and its attribute there
_Owner = tuple[str, nn.Module, str]


class _BufferGroup:
    """Floating buffers of one dtype on one device, as one flat tensor [n]."""

    def __init__(self, owners: Sequence[_Owner]) -> None:
        self._owners = owners
        self._saved: Tensor | None = None
        self._first: Tensor | None = None  # int32 [n]: the step that overflowed, or 0

    def before(self, step: int) -> None:
        self._saved = self._flat()
        self._number = step

    def after(self, skipped: Tensor | None) -> None:
        if self._saved is None:  # no step has begun
            return
        now = self._flat()
        became = torch.isfinite(self._saved) & ~torch.isfinite(now)
        if skipped is not None:
            dropped = skipped.to(now.device) > 0
            # Only on a CPU the flag is read without a wait for the device; a fake one has no value
            if now.device.type != "cpu" or is_fake(now) or bool(dropped):
                self._write(torch.where(became & dropped, self._saved, now))
            # Reported only where the step was taken. Nothing is restored there: the buffer would
            # stop following the activations while training continues, and nobody would notice.
            became = became & ~dropped
        if self._first is None:
            self._first = torch.zeros_like(became, dtype=torch.int32)
        self._first = torch.where(became & (self._first == 0), self._number, self._first)

    def overflows(self) -> list[BufferOverflow]:
        first, self._first = self._first, None
        if first is None or not bool(first.any()):
            return []
        overflows = []
        parts = first.split([b.numel() for b in self._buffers()])
        for (name, _, _), buffer, part in zip(self._owners, self._buffers(), parts, strict=True):
            if bool(part.any()):
                rows = (part > 0).view(len(buffer) if buffer.dim() else 1, -1)
                channels = rows.any(1).nonzero().flatten().tolist()
                dtype = dtype_name(buffer.dtype)
                step = int(part[part > 0].min())
                overflows.append(
                    BufferOverflow(step, name, channels if buffer.dim() else [], dtype)
                )
        return overflows

    def _buffers(self) -> list[Tensor]:
        # Looked up each time: `model.to` and `load_state_dict(assign=True)` replace them.
        return [getattr(module, name) for _, module, name in self._owners]

    def _flat(self) -> Tensor:
        return torch.cat([b.detach().reshape(-1) for b in self._buffers()])

    def _write(self, flat: Tensor) -> None:
        buffers = self._buffers()
        for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            # By `data`, so that a graph that another model's step left open can still go backward.
            buffer.data.copy_(part.view(buffer.shape))


class BufferGuard:
    """Restores what a skipped step made non-finite, and reports what a taken one did.

    On CUDA it needs no host synchronization, but for `overflows`.

    Args:
        prefix: what is put before its buffers' names.
        active: whether buffers can overflow; a guard that is not active does nothing.
    """

    def __init__(self, model: nn.Module, prefix: str = "", active: bool = True) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[_Owner]] = {}
        for full, buffer in model.named_buffers():
            if active and buffer.is_floating_point():
                path, _, name = full.rpartition(".")
                owner = (f"{prefix}{full}", model.get_submodule(path), name)
                kinds.setdefault((buffer.dtype, buffer.device), []).append(owner)
        self._groups = [_BufferGroup(owners) for owners in kinds.values()]

    def before(self, step: int) -> None:
        """Step number `step` begins."""
        for group in self._groups:
            group.before(step)

    def after(self, skipped: Tensor | None) -> None:
        """An optimizer stepped, or did not where `skipped` is 1; None: steps are never skipped."""
        for group in self._groups:
            group.after(skipped)

    def overflows(self) -> list[BufferOverflow]:
        """Elements that became non-finite in taken steps since the last call; waits for them."""
        overflows = [x for group in self._groups for x in group.overflows()]
        return sorted(overflows, key=lambda x: x.step)


ATTRIBUTE = "_mprun_wide_copy"  # The attribute of a storage that holds its copy


class _WideCopy(NamedTuple):
    wide: Tensor  # As many float32 numbers as the storage has of 16 bits, in the same order
    writes: int
    owner: WideCopies
    generation: int


class WideCopies:
    """The copies that one arithmetic made."""

    def __init__(self) -> None:
        self._generation = 0

    def invalidate(self) -> None:
        """A new generation begins."""
        self._generation += 1

    def keep(self, low: Tensor, wide: Tensor) -> None:
        """`wide` has the values of `low`, its strides, and a storage of its own; both are whole."""
        # At the storage, so that views share the copy, and it lives no longer
        copy = _WideCopy(wide, write_count(low), self, self._generation)
        setattr(low.untyped_storage(), ATTRIBUTE, copy)

    def get(self, low: Tensor) -> Tensor | None:
        """The copy of `low`, not to be written to, laid out as `low.float()` would be, or None."""
        copy = self._valid(low)
        if copy is None or not is_dense(low):
            return None
        wide = copy.wide
        if wide.shape == low.shape and wide.stride() == low.stride():
            return wide
        return wide.as_strided(low.size(), low.stride(), low.storage_offset())

    def take(self, low: Tensor) -> Tensor | None:
        """The copy of a whole `low` for the caller alone, which may write to it, or None.

        It is no copy any more.
        """
        wide = self.get(low) if is_whole(low) else None
        if wide is not None:
            forget(low)
        return wide

    def _valid(self, low: Tensor) -> _WideCopy | None:
        storage = low.untyped_storage()
        copy: _WideCopy | None = getattr(storage, ATTRIBUTE, None)
        if copy is None or copy.owner is not self or copy.generation != self._generation:
            return None
        # A storage that is resized itself, as FSDP does, counts no write
        resized = copy.wide.numel() * low.element_size() != storage.nbytes()
        return None if resized or copy.writes != write_count(low) else copy


def forget(low: Tensor) -> None:
    """Drop the copy of what shares memory with `low`, if there is one."""
    vars(low.untyped_storage()).pop(ATTRIBUTE, None)


def is_dense(x: Tensor) -> bool:
    """Whether the numbers of `x` lie side by side in some order, without gaps or overlaps."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_whole(x: Tensor) -> bool:
    """Whether `x` is dense and all of its storage."""
    filled = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return filled and int(x.storage_offset()) == 0 and is_dense(x)


def is_plain(x: Tensor) -> bool:
    """Whether `x` is a CPU tensor with memory of its own, which a C kernel can read."""
    kind = type(x) is Tensor or type(x) is torch.nn.Parameter
    return kind and x.is_cpu and x.layout is torch.strided
