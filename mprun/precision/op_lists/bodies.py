"""What a Python function of PyTorch may call, read off its code.

`F.relu` calls `torch.relu` and nothing else; `F.multi_head_attention_forward` calls a dozen ops.
Only functions of the second kind need their body run with casts on, which costs microseconds a
call.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType, FunctionType
from typing import Any

OPERATORS = "<operators>"
"""Stands for `+`, `/`, `@` and the like, on tensors or not."""


@functools.cache
def calls_of(function: Any) -> frozenset[str]:
    """Every name that the function's code, or that of PyTorch's functions it names, looks up."""
    found: set[str] = set()
    _collect(function, found, set())
    return frozenset(found)


def _collect(function: FunctionType, found: set[str], seen: set[CodeType]) -> None:
    code = function.__code__
    if code in seen:
        return
    seen.add(code)
    found.update(code.co_names)
    if any(map(_computes, dis.get_instructions(code))):
        found.add(OPERATORS)
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    for inner in (*cells, *(function.__globals__.get(name) for name in code.co_names)):
        ours = isinstance(inner, FunctionType) and inner.__module__.startswith("torch")
        if ours and inner.__name__ not in _HELPERS:
            _collect(inner, found, seen)


def _computes(instruction: dis.Instruction) -> bool:
    """Whether it is an operator other than indexing."""
    operator = instruction.opname.startswith(("BINARY_", "INPLACE_"))
    indexing = instruction.opname.endswith(("SUBSCR", "SLICE")) or instruction.argrepr == "[]"
    return operator and not indexing


_HELPERS = frozenset(
    (
        *("handle_torch_function", "has_torch_function"),
        *("_get_softmax_dim", "_verify_batch_size", "_verify_spatial_size"),
    )
)
"""They look at arguments and call no op."""
