"""What is to be known of an op before its numbers are looked at.

Taken from its schema, once per op. PyTorch's schemas mark what an op writes to, but for the running
statistics of batch normalization.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mprun.numerics.exceptions.tensors import Limits, tensors_in

aten = torch.ops.aten

UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
"""How a loss scaler looks for overflows; its second argument becomes 1 where it finds one."""

OVERWRITES = (aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_)
"""Ops that write into a tensor without reading it."""

LISTWISE = ("_foreach_", "_fused_", "_amp_foreach_")
"""How the names of ops begin that do the same to each tensor of lists."""

STATISTICS = ("running_mean", "running_var")

Named = tuple[str, Tensor, Limits | None]
"""What the op calls a tensor, the tensor, and its limits where it was written to since."""


class Spec(NamedTuple):
    """What an op does to tensors."""

    makes_numbers: bool
    """Whether its results are looked at: not views, not memory that nothing was written to yet."""
    written: tuple[tuple[int, str], ...]
    """Position and name of the arguments it writes to."""
    reads_written: bool
    """Whether it reads those as well."""
    listwise: bool
    """Whether it does the same to each tensor of lists."""
    first_alone: bool
    """Whether the first result is the only one of interest."""
    random: bool
    """Whether it draws random numbers."""


@functools.cache
def spec_of(func: Any) -> Spec:
    """The spec of an `OpOverload`."""
    schema, name = func._schema, func.overloadpacket.__name__
    written = tuple(
        (i, a.name)
        for i, a in enumerate(schema.arguments)
        if (a.alias_info is not None and a.alias_info.is_write) or _is_statistics(name, a.name)
    )
    moves = func.is_view or torch.Tag.inplace_view in func.tags
    bare = name.startswith(("empty", "new_empty", "_empty", "resize"))
    out = any(argument.is_out for argument in schema.arguments)
    return Spec(
        makes_numbers=not (moves or bare),
        written=written,
        reads_written=not (out or func.overloadpacket in OVERWRITES),
        listwise=name.startswith(LISTWISE),
        first_alone=name.startswith("_scaled_dot_product"),  # the others are padded
        random=torch.Tag.nondeterministic_seeded in func.tags,
    )


def _is_statistics(op: str, argument: str) -> bool:
    """Whether it is one of the running statistics, which a forward op updates without a mark."""
    return argument in STATISTICS and "batch_norm" in op and "backward" not in op


class Call(NamedTuple):
    """An op with its arguments and its result."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    before: Mapping[int, Limits | None]
    """The limits of what it wrote to, before that, by `id`."""
    saved: Mapping[int, Tensor]
    """Copies of what it wrote to, as it was, by `id`; where the op may be run again."""

    @property
    def name(self) -> str:
        """ATen's, without the overload."""
        return str(self.func.overloadpacket.__name__)

    def written(self) -> Iterator[tuple[str, Any]]:
        """The arguments it writes to, with their names."""
        return written(spec_of(self.func), self.args, self.kwargs)

    def outputs(self) -> Iterator[tuple[str, int, Tensor]]:
        """What it made: name, position in a list, tensor."""
        seen = set()
        result = self.result[:1] if self._first_alone() else self.result
        for name, value in chain(self.written(), [("result", result)]):
            for i, x in enumerate(tensors_in(value)):
                if id(x) not in seen:
                    seen.add(id(x))
                    yield name, i, x

    def _first_alone(self) -> bool:
        return spec_of(self.func).first_alone and isinstance(self.result, tuple | list)

    def inputs(self, index: int | None) -> list[Named]:
        """What it read; of an op over lists, for the tensors at `index` of each, or all of them."""
        spec = spec_of(self.func)
        unread = set() if spec.reads_written else {name for _, name in spec.written}
        found = []
        for name, value in self._arguments():
            tensors = list(tensors_in(value))
            if spec.listwise and index is not None and not isinstance(value, Tensor):
                tensors = tensors[index : index + 1]
            if name not in unread:
                found += [(name, x, self.before.get(id(x))) for x in tensors]
        return found

    def _arguments(self) -> Iterator[tuple[str, Any]]:
        named = self.func._schema.arguments
        yield from ((a.name, x) for a, x in zip(named, self.args, strict=False))
        yield from self.kwargs.items()

    def numbers(self) -> Iterator[float]:
        """The numbers among its arguments that are no tensors."""
        for value in chain(self.args, self.kwargs.values()):
            items = value if isinstance(value, list | tuple) else (value,)
            yield from (x for x in items if isinstance(x, float))


def written(
    spec: Spec, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The arguments an op writes to, with their names."""
    for position, name in spec.written:
        value = args[position] if position < len(args) else kwargs.get(name)
        if value is not None:
            yield name, value
