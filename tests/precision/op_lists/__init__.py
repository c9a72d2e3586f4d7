"""What the tests of op lists share: the shipped lists, regions, and a look below autograd."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mprun.config import compose
from mprun.precision.caster import OpListCaster
from mprun.precision.op_lists import Entry, OpLists, op_lists
from mprun.train.assemble.dtype_choices import choose_op_lists

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (FP16, BF16, FP32, FP64)
PAIRS = tuple((a, b) for a in DTYPES for b in DTYPES)
LOWER = (BF16, FP16)


@functools.cache
def shipped(name: str, device: str = "cpu") -> OpLists:
    """The lists of conf/op_lists/, as a run has them."""
    config = compose(["recipe=mnist", f"op_lists={name}"]).config
    found = choose_op_lists(config, torch.device(device), False)
    assert found is not None
    return found


def caster(
    lists: OpLists | None = None, dtype: torch.dtype = BF16, keep: bool = False
) -> OpListCaster:
    """A caster of `lists` (HMP's unless others are given)."""
    return OpListCaster(shipped("hmp") if lists is None else lists, dtype, keep=keep)


def own(
    lower: Iterable[Entry | str] = (),
    fp32: Iterable[Entry | str] = (),
    promote: Iterable[Entry | str] = (),
    first_input: bool = False,
) -> OpLists:
    """Lists of a test's own; what they do not name is left to PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that no op has
        return op_lists(lower, fp32, promote, first_input)


class Seen(NamedTuple):
    """An op that ran: its name and the dtypes of its floating inputs."""

    op: str
    dtypes: tuple[torch.dtype, ...]


PLUMBING = frozenset(
    (
        *("_to_copy", "detach", "alias", "clone", "copy_", "view", "_unsafe_view", "expand"),
        *("reshape", "_reshape_alias", "transpose", "permute", "unsqueeze", "squeeze"),
        *("as_strided", "slice", "select", "unbind", "split", "empty_like", "zeros_like"),
        *("ones_like", "new_empty", "new_zeros", "lift_fresh"),
    )
)
"""Ops that compute nothing."""


class Spy(TorchDispatchMode):
    """Below autograd: what is computed in which dtypes, and every cast."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self.casts: list[tuple[Tensor, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == "_to_copy" and args[0].is_floating_point():
            self.casts.append((args[0], (kwargs or {}).get("dtype", args[0].dtype)))
        if name not in PLUMBING:
            inputs = tree_leaves((args, kwargs))
            dtypes = (x.dtype for x in inputs if isinstance(x, Tensor) and x.is_floating_point())
            self.seen.append(Seen(name, tuple(dtypes)))
        return func(*args, **(kwargs or {}))

    def casts_of(self, tensor: Tensor) -> list[torch.dtype]:
        """The dtypes `tensor` itself was cast to, in order."""
        return [dtype for x, dtype in self.casts if x is tensor]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of all floating inputs."""
        return {dtype for seen in self.seen for dtype in seen.dtypes}


def to(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating tensor in it in `dtype`."""

    def one(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tree_map(one, value)


def same(ours: Any, theirs: Any) -> bool:
    """Whether two results have the same dtypes and bits; NaN equals NaN."""
    pairs = list(zip(tree_leaves(ours), tree_leaves(theirs), strict=True))
    return type(ours) is type(theirs) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))
        if isinstance(x, Tensor)
        else x == y
        for x, y in pairs
    )


def bits(x: Tensor) -> Tensor:
    """The patterns of a tensor's elements."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(whole[x.element_size()]) if x.is_floating_point() else x


def result(function: Callable[[], Any]) -> Any:
    """What a call returns, or the type of what it raises; random numbers begin anew."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed seeds CUDA too, which takes long
    try:
        return function()
    except Exception as error:
        return type(error)


@contextmanager
def watched(by: OpListCaster) -> Iterator[Spy]:
    """A region with a spy in it."""
    with by.region(), Spy() as spy:
        yield spy


def no_mode_is_left() -> bool:
    """Whether calls are back to what they do outside of a region."""
    a = torch.ones(2, 2)
    return torch._C._len_torch_function_stack() == 0 and torch.mm(a, a).dtype == FP32
