"""The dtypes of a model by module, in few rows.

A part whose numbers all have one dtype is one row. Parts that differ in nothing but a number of
their name (`layers.0.norm`, `layers.1.norm`) are one row too: `layers.*.norm`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.numerics.op_watcher import dtype_name

ELSEWHERE = "(not of this model)"
Tensors = Mapping[str, list[Tensor]]
"""By the name of the parameter or buffer that they belong to."""


@dataclass(frozen=True)
class DtypeRow:
    """The numbers of one dtype in a part of a model."""

    role: str
    """parameters, gradients, buffers or optimizer state."""
    dtype: str
    module: str
    """A name of `named_modules()`, with * for numbers where it stands for several; empty for the
    model."""
    modules: int
    """How many it stands for."""
    numbers: int

    def __str__(self) -> str:
        several = f" ({self.modules} modules)" if self.modules > 1 else ""
        where = self.module or "the model"
        return f"{self.role:<16}{self.dtype:<10}{self.numbers:>14,}  {where}{several}"


def dtype_rows(model: nn.Module, optimizer: Optimizer | None) -> tuple[DtypeRow, ...]:
    """Parameters, gradients, buffers and optimizer state by dtype and module."""
    named = dict(model.named_parameters())
    content: dict[str, Tensors] = {
        "parameters": {name: [p] for name, p in named.items()},
        "gradients": {name: [p.grad] for name, p in named.items() if p.grad is not None},
        "buffers": {name: [x] for name, x in model.named_buffers()},
        "optimizer state": _states(named, optimizer),
    }
    return tuple(row for role, tensors in content.items() for row in _rows(role, tensors))


def totals(rows: Iterable[DtypeRow]) -> dict[str, dict[str, int]]:
    """Role to dtype to how many numbers, the most frequent dtype first."""
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        of_role = counts.setdefault(row.role, {})
        of_role[row.dtype] = of_role.get(row.dtype, 0) + row.numbers
    return {role: dict(sorted(row.items(), key=lambda x: -x[1])) for role, row in counts.items()}


def _states(named: Mapping[str, nn.Parameter], optimizer: Optimizer | None) -> Tensors:
    """The tensors of an optimizer's state by parameter; single numbers, such as `step`, are not
    counted."""
    names = {p: name for name, p in named.items()}
    tensors: dict[str, list[Tensor]] = {}
    states: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    for p, state in states.items():
        held = [x for x in state.values() if isinstance(x, Tensor) and x.dim()]
        if held:
            tensors.setdefault(names.get(p, f"{ELSEWHERE}."), []).extend(held)
    return tensors


def _rows(role: str, tensors: Tensors) -> Iterator[DtypeRow]:
    counts: dict[tuple[str, str], tuple[set[str], int]] = {}
    for module, dtype, numbers in _parts("", tensors):
        words = ["*" if word.isdigit() else word for word in module.split(".")]
        modules, total = counts.get((".".join(words), dtype), (set(), 0))
        counts[".".join(words), dtype] = (modules | {module}, total + numbers)
    for (pattern, dtype), (modules, numbers) in counts.items():
        where = pattern if len(modules) > 1 else next(iter(modules))
        yield DtypeRow(role, dtype, where, len(modules), numbers)


def _parts(prefix: str, tensors: Tensors) -> Iterator[tuple[str, str, int]]:
    """Module, dtype and count of numbers: one for each largest part of one dtype."""
    counts: dict[str, int] = {}
    for x in (x for held in tensors.values() for x in held):
        counts[dtype_name(x.dtype)] = counts.get(dtype_name(x.dtype), 0) + x.numel()
    children: dict[str, dict[str, list[Tensor]]] = {}
    own: dict[str, list[Tensor]] = {}
    for name, held in tensors.items():
        child, dot, _ = name.removeprefix(f"{prefix}." if prefix else "").partition(".")
        if dot:
            children.setdefault(child, {})[name] = held
        else:
            own[name] = held
    if len(counts) == 1 or not children:
        yield from ((prefix, dtype, numbers) for dtype, numbers in counts.items())
        return
    if own:
        yield from _parts(prefix, own)
    for child, held_below in children.items():
        yield from _parts(f"{prefix}.{child}" if prefix else child, held_below)
