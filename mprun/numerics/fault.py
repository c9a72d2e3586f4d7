"""Why a step failed: the op that raised the error, its module, and the dtypes of its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from mprun._torch import op_name, tree_leaves

SAME_DTYPE = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr", "convolution")
)
"""ATen ops whose kernels need all floating inputs in one dtype; fake tensors do not check it."""

FIX = (
    "make the tensor in the model's dtype (for example torch.zeros(..., dtype=x.dtype)), or take a "
    "mode that casts (precision=bf16_mixed, precision=fp16_mixed)"
)


class OpFault(NamedTuple):
    """An op that raised an error."""

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
    """Real kernels would refuse this step; the text is that of the `OpFault`."""


def floating_dtypes(tree: Any) -> tuple[str, ...]:
    """The distinct floating dtypes of the tensors in a structure of arguments, in order."""
    tensors: Iterable[Tensor] = (x for x in tree_leaves(tree) if isinstance(x, Tensor))
    names = (str(x.dtype).removeprefix("torch.") for x in tensors if x.is_floating_point())
    return tuple(dict.fromkeys(names))


def check_dtypes(func: Any, args: Any, module: str, phase: str) -> None:
    """Raise `DtypeMismatchError` where an op of `SAME_DTYPE` has inputs of several dtypes."""
    name = op_name(func)
    if name in SAME_DTYPE and len(dtypes := floating_dtypes(args)) > 1:
        raise DtypeMismatchError(str(OpFault(name, module, phase, dtypes)))
