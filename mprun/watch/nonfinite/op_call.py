"""An op with its arguments and results: what it reads and writes, and the same op in float64.

Which arguments an op writes to is in its schema, which is read once per op, except for the running
statistics of batch normalization.

After every op the range of its results is taken: it shows whether a tensor is finite, and how near
it is to its dtype's largest number. On CUDA, reading the range makes the host wait for the device.
Dispatch modes that round or count do not see these ops, so measuring changes nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mprun.precision import devices
from mprun.precision._torch import (
    is_fake,
    local_tensor,
    no_dispatch,
    op_name,
    schema_of,
    stored_values,
    tree_map,
)
from mprun.precision.nested import tensors_in
from mprun.precision.policy import dtype_name
from mprun.watch.nonfinite.fp_exception import TensorStats
from mprun.watch.op_watcher import tensors_of

REDUCIBLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class ValueRange(NamedTuple):
    """The least and the largest value; both are NaN where any value is."""

    low: float
    high: float

    @property
    def finite(self) -> bool:
        """Whether every value is."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def has_nan(self) -> bool:
        """Whether a value is NaN."""
        return math.isnan(self.low)  # `aminmax` gives NaN for both where any value is

    @property
    def size(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))


def value_range(x: Tensor) -> ValueRange | None:
    """The range of a floating tensor; None for any other, an empty one, or one without data."""
    values = numbers(x)
    if values is None:
        return None
    with no_dispatch():
        # One pass over memory, which costs about as much as a ReLU (on one core, 1 million float32:
        # 164 us against 95; float16: 101 against 102). `isfinite(x).all()` takes 18 to 22 times as
        # long
        low, high = torch.ops.aten.aminmax.default(values)
        return ValueRange(low.item(), high.item())


def is_finite(measured: ValueRange | None) -> bool:
    """Whether a tensor of this range has neither NaN nor infinities."""
    return measured is None or measured.finite


def is_plain(x: Tensor) -> bool:
    """Whether it is an ordinary strided tensor of real floating numbers."""
    # The exact types: a subclass (DTensor, torchao's) has its numbers elsewhere
    return type(x) in PLAIN_TYPES and x.dtype in REDUCIBLE and x.layout is torch.strided


def numbers(x: Tensor) -> Tensor | None:
    """The floating numbers of any kind of tensor as a strided one; None where it has none."""
    if is_plain(x):
        return x if x.numel() and x.device.type != "meta" else None
    x = local_tensor(x)
    if not (x.is_floating_point() or x.is_complex()) or is_fake(x) or x.device.type == "meta":
        return None
    with no_dispatch(), torch.no_grad():
        x = stored_values(x)
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        if x.dtype not in REDUCIBLE:  # 8 bits
            x = x.float()
    return x if x.numel() else None


def stats(name: str, x: Tensor, known: ValueRange | None = None) -> TensorStats:
    """The statistics of a tensor; `known` is an earlier range of it, if it was written to since."""
    bare = TensorStats(name, dtype_name(x.dtype), tuple(map(int, x.shape)))
    measured = known or value_range(x)
    if measured is None:
        return bare
    if measured.finite:
        return replace(bare, low=measured.low, high=measured.high, nan=0, inf=0)
    if known is not None:  # the numbers are gone
        return bare
    values = numbers(x)
    assert values is not None
    with no_dispatch(), torch.no_grad():
        nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
        low, high = value_range(values[torch.isfinite(values)]) or (None, None)
    return replace(bare, low=low, high=high, nan=nan, inf=inf)


aten = torch.ops.aten

# Ops that write into a tensor without reading it
OVERWRITES = (aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_)

# Prefixes of ops that do the same to each tensor of lists
LISTWISE = ("_foreach_", "_fused_", "_amp_foreach_")

STATISTICS = ("running_mean", "running_var")

# Arguments with bytes that a forward kernel left for its backward kernel. Their layout is that of
# one dtype and library: oneDNN's LSTM in another dtype writes outside of its memory with them.
WORKSPACES = ("workspace", "reserve", "reserveSpace")

LARGEST = 2**26  # Elements of an op's inputs up to which it is run again: half a GiB in float64

# Name in the schema, tensor, and its range before the op where the op wrote to it
NamedTensor = tuple[str, Tensor, ValueRange | None]


class OpSpec(NamedTuple):
    """The properties of an op that do not depend on its arguments."""

    makes_numbers: bool
    """Whether its results are inspected: not views, not memory without numbers in it yet."""
    written: tuple[tuple[int, str], ...]  # Position and name of the arguments it writes to
    reads_written: bool  # Whether it reads those as well
    listwise: bool  # Whether it does the same to each tensor of lists
    first_alone: bool  # Whether only the first result matters
    runs_again: bool
    """Whether it gives the same in another dtype: not with random numbers or a workspace."""


@functools.cache
def op_spec(func: Any) -> OpSpec:
    """The spec of an `OpOverload`."""
    arguments, name = schema_of(func).arguments, op_name(func)
    updates_statistics = "batch_norm" in name and "backward" not in name
    written = tuple(
        (i, a.name)
        for i, a in enumerate(arguments)
        if (a.alias_info is not None and a.alias_info.is_write)
        or (updates_statistics and a.name in STATISTICS)
    )
    moves = func.is_view or torch.Tag.inplace_view in func.tags
    # Memory that nothing was written to: what it holds is left from freed tensors
    bare = name.startswith(("empty", "new_empty", "_empty", "resize"))
    out = any(argument.is_out for argument in arguments)
    return OpSpec(
        makes_numbers=not (moves or bare),
        written=written,
        reads_written=not (out or func.overloadpacket in OVERWRITES),
        listwise=name.startswith(LISTWISE),
        first_alone=name.startswith("_scaled_dot_product"),  # the others are padded
        runs_again=torch.Tag.nondeterministic_seeded not in func.tags
        and not any(a.name in WORKSPACES for a in arguments),
    )


class OpCall(NamedTuple):
    """An op with its arguments and its result."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    before: Mapping[int, ValueRange | None] = {}
    """The ranges of the tensors it wrote to, before it did, by `id`."""
    saved: Mapping[int, Tensor] = {}
    """Copies of those tensors as they were, by `id`; empty where it will not be run again."""

    @property
    def name(self) -> str:
        """ATen's, without the overload."""
        return op_name(self.func)

    def outputs(self) -> Iterator[tuple[str, int, Tensor]]:
        """Its results: name, position in a list, tensor."""
        seen, result = set(), self.result
        if op_spec(self.func).first_alone and isinstance(result, tuple | list):
            result = result[:1]
        written = written_arguments(self.func, self.args, self.kwargs)
        for name, value in chain(written, [("result", result)]):
            for i, x in enumerate(tensors_in([value])):
                if id(x) not in seen:
                    seen.add(id(x))
                    yield name, i, x

    def inputs(self) -> list[NamedTensor]:
        """The tensors it read."""
        spec = op_spec(self.func)
        unread = set() if spec.reads_written else {name for _, name in spec.written}
        named = zip((a.name for a in schema_of(self.func).arguments), self.args, strict=False)
        read: list[NamedTensor] = []
        for name, value in chain(named, self.kwargs.items()):
            if name not in unread:
                read += [(name, x, self.before.get(id(x))) for x in tensors_in([value])]
        return read

    def numbers(self) -> Iterator[float]:
        """The floats among its arguments."""
        for value in chain(self.args, self.kwargs.values()):
            items = value if isinstance(value, list | tuple) else (value,)
            yield from (x for x in items if isinstance(x, float))


def written_arguments(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The arguments an op writes to, with their names."""
    for position, name in op_spec(func).written:
        value = args[position] if position < len(args) else kwargs.get(name)
        if value is not None:
            yield name, value


def _able(device: torch.device, dtype: torch.dtype) -> torch.device:
    """The device, or the CPU where it has no such dtype."""
    able = dtype != torch.float64 or devices.backend(device).float64
    return device if able else devices.CPU


def recomputed(
    call: OpCall, value: Callable[[Tensor], Tensor | None] = lambda x: None
) -> list[Tensor] | None:
    """The results of an op computed in float64, in the order of `call.outputs()`.

    They are where the tensors are, or on the CPU where that device has no float64. None where it is
    not possible: the op draws random numbers, reads a workspace of its forward kernel, is very
    large, has no kernel for float64, or overwrote inputs of which no copy exists.

    Args:
        call: the op, which has run.
        value: returns numbers to use in place of a tensor's own, or None.
    """
    spec = op_spec(call.func)
    size = sum(x.numel() for x in tensors_of((call.args, call.kwargs)))
    if not spec.runs_again or size > LARGEST:
        return None
    written = written_arguments(call.func, call.args, call.kwargs)
    targets = {id(x) for x in tensors_in(v for _, v in written)}
    if spec.reads_written and not targets <= call.saved.keys():
        return None
    wide: dict[int, Tensor] = {}

    def widened(x: Any) -> Any:
        if isinstance(x, Tensor):
            if id(x) not in wide:  # one copy for a tensor that is given twice, as in `x.mul_(x)`
                given = value(x)
                source = call.saved.get(id(x), x) if given is None else given
                # indices and masks stay as they are
                to = torch.float64 if x.is_floating_point() else x.dtype
                source = source.to(_able(source.device, to)).to(to)
                # The op would write into the copies of before, or into the tensor itself
                wide[id(x)] = source.clone() if id(x) in targets else source
            return wide[id(x)]
        if isinstance(x, torch.device):
            return _able(x, torch.float64)
        return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

    # softmax's order to make float32 of float16 has no kernel for float64
    names = (a.name for a in schema_of(call.func).arguments)
    named = zip(names, call.args, strict=False)
    given_args = tuple(False if name == "half_to_float" else x for name, x in named)
    with no_dispatch(), torch.no_grad():
        try:
            args, kwargs = tree_map(widened, (given_args, dict(call.kwargs)))
            result = call.func(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, MemoryError):  # no kernel, or no room for it
            return None
    return [x for _, _, x in OpCall(call.func, tuple(args), kwargs, result).outputs()]
