"""The cast rules: which dtype an op's floating inputs get before it runs.

    in-place     an argument the op writes into is never cast; the others go to its dtype
    lower, fp32  the op is on that list: its inputs go to the lower dtype, or to float32
    promote      its inputs go to the widest dtype among them (float16 with bfloat16: float32)
    first input  on no list: its inputs go to the dtype of the first floating one
    as it is     on no list, and the lists leave such ops to PyTorch's own type promotion

The first rule that applies decides. float64, integer and bool tensors are never cast, nor is a
listed op with a float64 input. Normalisations take their activation in the lower dtype and their
few weights uncast. A *handler* carries a rule out: it gets the call and calls the op. Sources:
Habana, "Mixed Precision Training with PyTorch Autocast / HMP"; PyTorch, `autocast_mode.h`.

As in torch.autocast, `Casts` stores the cast copy of a weight until the region (or step) ends. A
copy is not used for a weight that was written to since, or for a graph if it was cast without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mprun.precision._torch import write_count
from mprun.precision.nested import map_tensors, tensors_in

# Dtypes that are ever cast; float64, integers, bool and complex stay what they are
CASTABLE = frozenset((torch.float32, torch.float16, torch.bfloat16))

# float16 and bfloat16 are equally wide: neither holds all numbers of the other
WIDTH = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 2, torch.float64: 3}


def widest(dtypes: set[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds all of `dtypes`: float16 with bfloat16 gives float32."""
    top = max(WIDTH[dtype] for dtype in dtypes)
    among = [dtype for dtype in dtypes if WIDTH[dtype] == top]
    return among[0] if len(among) == 1 else torch.float32


class Casts:
    """Does the casts of a region and stores those of weights."""

    def __init__(self) -> None:
        # (id, dtype, whether a graph is recorded) -> the weight, its version, the copy
        self._copies: dict[tuple[int, torch.dtype, bool], tuple[Tensor, int, Tensor]] = {}

    def to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` in `dtype`, differentiably; `x` itself where it has it or is never cast."""
        have = x.dtype
        if have is dtype or have not in CASTABLE:
            return x
        if x.requires_grad and x.is_leaf and not torch.compiler.is_compiling():
            return self._weight(x, dtype)
        return x.to(dtype)

    def _weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        key = (id(weight), dtype, torch.is_grad_enabled())
        if torch.is_inference_mode_enabled() or weight.is_inference():
            # An inference tensor counts no writes: its copy could be an old one
            return weight.to(dtype)
        entry = self._copies.get(key)
        if entry is None or entry[0] is not weight or entry[1] != write_count(weight):
            entry = self._copies[key] = weight, write_count(weight), weight.to(dtype)
        return entry[2]

    def forget(self) -> None:
        """Drop the copies."""
        self._copies.clear()


Cast = Callable[[Tensor, torch.dtype], Tensor]  # `Casts.to`, or one that reports the cast as well

Function = Callable[..., Any]
# Calls a function with its arguments, cast by a rule
Handler = Callable[[Function, tuple[Any, ...], Mapping[str, Any]], Any]

NORMS = frozenset(("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm"))
# Their further arguments hold running statistics, which they write into
WRITES_STATISTICS = frozenset(("batch_norm", "instance_norm"))

# CUDA's kernels of these take weights in the activation's dtype alone
SAME_DTYPE_ON_CUDA = frozenset(("layer_norm", "group_norm"))

# Casts that a model's code asks for
EXPLICIT = frozenset(("to", "type", "type_as", "float", "half", "bfloat16", "double"))

# No computations: these are about dtypes or shapes, or copy between dtypes on purpose
UNCAST = frozenset(
    (
        *("copy_", "set_", "_to_copy", "_foreach_copy_", "clone"),
        *("view_as", "reshape_as", "expand_as", "resize_as_", "resize_as_sparse_"),
        *("result_type", "promote_types", "can_cast", "is_same_size", "_assert"),
        *("equal", "allclose", "isclose", "data_ptr", "getitem"),
        *("backward", "detach", "detach_", "requires_grad_", "retain_grad", "register_hook"),
    )
)


def plain(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Nothing is cast."""
    return function(*args, **kwargs)


def to_dtype(cast: Cast, dtype: torch.dtype) -> Handler:
    """Every floating input goes to `dtype`."""

    def handler(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if _has_float64(args) or (kwargs and _has_float64(kwargs.values())):
            return function(*args, **kwargs)
        return _called_in(dtype, cast, function, args, kwargs)

    return handler


def activation_to(cast: Cast, dtype: torch.dtype) -> Handler:
    """The first input alone goes to `dtype`."""

    def handler(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if args:
            return function(_cast(args[0], dtype, cast), *args[1:], **kwargs)
        return function(**{**kwargs, "input": _cast(kwargs["input"], dtype, cast)})

    return handler


def promote(cast: Cast) -> Handler:
    """Every floating input goes to the widest dtype among them."""

    def handler(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        dtypes = {x.dtype for x in tensors_in((*args, *kwargs.values())) if x.is_floating_point()}
        if len(dtypes) < 2 or not dtypes <= _KNOWN_WIDTHS or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        return _called_in(widest(dtypes), cast, function, args, kwargs)

    return handler


def first_input(cast: Cast) -> Handler:
    """Every floating input goes to the dtype of the first one."""

    def handler(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        first = None
        for x in tensors_in((*args, *kwargs.values()) if kwargs else args):
            dtype = x.dtype
            if first is None:
                first = dtype if dtype.is_floating_point else None
            elif dtype is not first and dtype in CASTABLE and kwargs.get("out") is None:
                return _called_in(first, cast, function, args, kwargs)
        return function(*args, **kwargs)

    return handler


def mutated(cast: Cast) -> Handler:
    """The first argument is written into: the others go to its dtype."""

    def handler(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        target = args[0] if args else kwargs.get("input")
        if not isinstance(target, Tensor) or not target.is_floating_point():
            return function(*args, **kwargs)
        dtype = target.dtype
        rest = [_cast(a, dtype, cast) for a in args[1:]]
        if kwargs:
            kwargs = {k: v if v is target else _cast(v, dtype, cast) for k, v in kwargs.items()}
        return function(*args[:1], *rest, **kwargs)

    return handler


def indexed(writes: Handler) -> Handler:
    """`writes` where the index of `x[index] = y` holds tensors: `y` must then have `x`'s dtype."""

    def handler(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # PyTorch casts `y` itself where the index has numbers and slices alone
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(x, Tensor) for x in index):
            return writes(function, args, kwargs)
        return function(*args, **kwargs)

    return handler


def unless_mutating(handler: Handler, writes: Handler) -> Handler:
    """`writes` for a call with `inplace=True`; nothing is cast with `max_norm` (weights change)."""

    def either(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if kwargs.get("inplace"):
            return writes(function, args, kwargs)
        # An embedding then writes into its weight, and a cast copy would be written to instead
        if kwargs.get("max_norm") is not None:
            return function(*args, **kwargs)
        return handler(function, args, kwargs)

    return either


_KNOWN_WIDTHS = CASTABLE | {torch.float64}


def _called_in(
    dtype: torch.dtype, cast: Cast, function: Function, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    new = [_cast(a, dtype, cast) for a in args]
    return function(*new, **{k: _cast(v, dtype, cast) for k, v in kwargs.items()})


def _cast(value: Any, dtype: torch.dtype, cast: Cast) -> Any:
    """`value` with the floating tensors in it in `dtype`."""
    if isinstance(value, Tensor):
        return cast(value, dtype)
    if isinstance(value, _SEQUENCE) and any(isinstance(x, (Tensor, *_SEQUENCE)) for x in value):
        return map_tensors(lambda x: cast(x, dtype), value)
    return value


def _has_float64(values: Iterable[Any]) -> bool:
    for value in values:  # a loop, as this runs before every listed op
        if isinstance(value, Tensor):
            if value.dtype is torch.float64:
                return True
        elif isinstance(value, _SEQUENCE) and _has_float64(value):
            return True
    return False


_SEQUENCE = (list, tuple)
