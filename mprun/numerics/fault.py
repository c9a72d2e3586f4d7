"""Why a step could not run: the op that raised, its module, and the dtypes that met there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

SAME_DTYPE = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr", "convolution")
)
"""ATen ops whose kernels take floating inputs of one dtype alone; fake tensors do not check it."""

FIX = (
    "make the tensor in the model's dtype (for example torch.zeros(..., dtype=x.dtype)), or take a "
    "mode that casts (precision=bf16_mixed, precision=fp16_mixed)"
)


class Fault(NamedTuple):
    """An op that raised."""

    op: str
    module: str
    """Path of the module whose forward pass ran; empty for the root or none."""
    phase: str
    dtypes: tuple[str, ...]
    """Distinct floating dtypes of its inputs, in order."""

    def __str__(self) -> str:
        of = f" of module {self.module}" if self.module else ""
        met = f" with inputs in {' and '.join(self.dtypes)}" if self.dtypes else ""
        fix = f"; {FIX}" if len(self.dtypes) > 1 else ""
        return f"{self.op} in the {self.phase} pass{of}{met}{fix}"


class DtypeMismatchError(RuntimeError):
    """A step that real kernels refuse; its text is that of the fault."""


def floating_dtypes(tree: Any) -> tuple[str, ...]:
    """The distinct floating dtypes of the tensors in a structure of arguments, in order."""
    tensors: Iterable[Tensor] = (x for x in tree_leaves(tree) if isinstance(x, Tensor))
    names = (str(x.dtype).removeprefix("torch.") for x in tensors if x.is_floating_point())
    return tuple(dict.fromkeys(names))


def check_dtypes(func: Any, args: Any, module: str, phase: str) -> None:
    """Raise `DtypeMismatchError` where an op of `SAME_DTYPE` has inputs of several dtypes."""
    name = func.overloadpacket.__name__
    if name in SAME_DTYPE and len(found := floating_dtypes(args)) > 1:
        raise DtypeMismatchError(str(Fault(name, module, phase, found)))
