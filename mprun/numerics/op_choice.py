"""Which ops of a model can be in the lower dtype or in float32, and the lists that say so.

Everything lower is where a search begins. Three things make it so:

    heavy ops      matmuls, convolutions, attention, recurrent layers, which 16-bit units speed up,
                   are on the lower list
    followers      every other op runs in the dtype of its first input, or where the model joins
                   several, in the widest (HMP's rules): behind a heavy op that is the lower dtype
    entrances      an op that would run in float32 all the same (it takes the model's input, a
                   float32 table, the outcome of a cast in the model's code) is on the lower list

Nothing else is: an op whose name is on no list is in float32 behind one that was put there, and the
large numbers of an `exp` go through the `sum` behind it without naming that too.

Ops that look at numbers (comparisons) and those in place, which run in the dtype of what they write
into, are not moved. A module is one whose own code calls such ops, by its name.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch
import yaml  # type: ignore[import-untyped]
from torch import nn

from mprun.errors import first_line
from mprun.numerics.observe import Observer, Op
from mprun.numerics.passes import NotMeasurableError, Way, call, is_out_of_memory, ready
from mprun.numerics.trace import Calls
from mprun.precision import Arithmetic, NativeArithmetic, OpListCaster, OpLists, op_lists
from mprun.precision.op_lists import Entry, Watcher
from mprun.precision.op_lists.names import ATTENTION, CONVOLUTIONS, RECURRENT, known, spelled

HEAVY = (
    *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "einsum", "linear"),
    *("linalg_multi_dot", "matmul", "mm", "mv", "tensordot", "bilinear", "conv_tbc"),
    *(*CONVOLUTIONS, *RECURRENT, *ATTENTION),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_native_multi_head_attention"),
)
"""Ops that are on the lower list unless they are found to need float32."""

MOVABLE = ("listed lower", "listed fp32", "promote", "first input")
"""Rules of ops that a list can move."""


COPIES = frozenset(("clone", "copy_", "_unsafe_view"))
"""Kernels that compute nothing; a call that runs no others is left alone."""


class OpFailedError(Exception):
    """An op cannot be computed in the dtypes it was given; `op` is empty where it is not known."""

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(f"{op or 'an op'} fails: {reason}")
        self.op = op


class _Calls(Calls):
    """Knows in which call an error was raised first."""

    failed = ""

    @contextmanager
    def op(self, name: str, rule: str) -> Iterator[None]:
        try:
            with super().op(name, rule):
                yield
        except RuntimeError:
            self.failed = self.failed or name
            raise


class Call(NamedTuple):
    """A call from Python that computed something in the forward pass."""

    op: str
    module: str
    """Whose code made it; empty for the model's own."""
    is_movable: bool
    dtype: torch.dtype
    """Of its outcome."""
    elements: int
    """How many numbers that has."""


def calls(model: nn.Module, inputs: Any, way: Callable[[Watcher], Way]) -> list[Call]:
    """The calls of a forward pass with floating outcomes, in their order.

    Args:
        model: the model.
        inputs: of one batch.
        way: how ops are cast, given who is to be told of it.

    Raises:
        OpFailedError: an op cannot be computed so.
    """
    names, told = _Calls(), list[Op]()
    observer = Observer(told.append, names.current)
    chosen = way(names)
    nothing = torch.optim.SGD(model.parameters(), lr=0.0)  # the observer follows one
    following = observer.following(model, nothing)
    try:
        with ready(model), chosen.on(model), following, observer, chosen.caster.region():
            call(model, inputs)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise OpFailedError(names.failed, first_line(error)) from error
    mine = (op for op in told if op.phase == "forward" and op.call is not None)
    grouped = groupby(mine, key=lambda op: op.call.number)
    return [found for _, ops in grouped if (found := _call(list(ops))) is not None]


def _call(ops: Sequence[Op]) -> Call | None:
    computing = [op for op in ops if not op.is_cast and not op.is_view]
    takes = any(v.dtype.is_floating_point for op in computing for v in op.inputs)
    outcomes = ([v for v in op.outputs if v.dtype.is_floating_point] for op in reversed(computing))
    outcome = next((values[0] for values in outcomes if values), None)  # others are statistics
    if not takes or outcome is None or COPIES.issuperset(op.name for op in computing):
        return None
    name, rule = ops[0].call.name, ops[0].call.rule
    movable = rule in MOVABLE and name in known()
    return Call(name, ops[0].module, movable, outcome.dtype, prod(outcome.shape))


def float32_share(found: Sequence[Call]) -> float:
    """The share of the numbers these calls compute that are float32."""
    whole = sum(c.elements for c in found)
    return sum(c.elements for c in found if c.dtype == torch.float32) / whole if whole else 0.0


@dataclass(frozen=True)
class OpChoice:
    """The ops and modules of a model that can be chosen for, and the ways to do it."""

    dtype: torch.dtype
    """The lower one: bfloat16 or float16."""
    device_type: str
    """Whose kernels run: cpu or cuda."""
    arithmetic: Arithmetic
    lower: tuple[str, ...] = HEAVY
    """Ops on the lower list when everything is lower."""
    always: tuple[str, ...] = ()
    """Ops that are in float32 in any case."""
    ops: Mapping[str, int] = field(default_factory=dict)
    """Movable op to how often it is called, in the order of the first calls."""
    modules: Mapping[str, int] = field(default_factory=dict)
    """Module to how many movable calls its own code makes, in the order of the first ones."""
    _casters: dict[Hashable, OpListCaster] = field(default_factory=dict, repr=False, compare=False)

    def lists(self, fp32: Collection[str] = ()) -> OpLists:
        """These ops on the fp32 list, the others lower."""
        kept = (*self.always, *fp32)
        return op_lists([n for n in self.lower if n not in kept], kept, promoted())

    def way(
        self,
        fp32: Collection[str] = (),
        modules: Collection[str] = (),
        watcher: Watcher | None = None,
    ) -> Way:
        """These ops and modules in float32, the others lower."""
        kept = dict.fromkeys(modules, torch.float32)
        return Way(self._caster(self.lists(fp32), watcher), kept, arithmetic=self.arithmetic)

    def op_alone(self, name: str) -> Way:
        """One op lower, the others in float32."""
        lists = op_lists([name], [n for n in self.ops if n != name], promoted())
        return Way(self._caster(lists), arithmetic=self.arithmetic)

    def module_alone(self, name: str) -> Way:
        """One module lower, everything else in float32."""
        inside = self._caster(self.lists())
        outside = self._caster(op_lists((), self.ops, promoted()))
        return Way(outside, {name: self.dtype}, lambda _: inside.region, self.arithmetic)

    def _caster(self, lists: OpLists, watcher: Watcher | None = None) -> OpListCaster:
        """A caster for these lists, the one there is: making its table takes milliseconds."""
        if watcher is not None:
            return OpListCaster(lists, self.dtype, self.device_type, watcher=watcher)
        key = frozenset(lists.rules.items())
        if key not in self._casters:
            self._casters[key] = OpListCaster(lists, self.dtype, self.device_type)
        return self._casters[key]


def op_choice(
    model: nn.Module,
    inputs: Any,
    dtype: torch.dtype,
    always: Sequence[str] = (),
    arithmetic: Arithmetic | None = None,
) -> OpChoice:
    """What can be chosen for in a model.

    Args:
        model: the model.
        inputs: of one batch; a few forward passes are run on them.
        dtype: bfloat16 or float16.
        always: ops that are to be in float32 in any case, by any of their names.
        arithmetic: whose kernels compute; PyTorch's by default.

    Raises:
        NotMeasurableError: `always` has a name no op answers to; or the model fails in the lower
            dtype in a way that cannot be put down to an op.
    """
    unknown = op_lists((), [Entry(name, "always") for name in always]).unknown
    if unknown:
        raise NotMeasurableError(str(unknown[0]))
    device = next(model.parameters()).device.type
    choice, movable = _all_lower(
        OpChoice(dtype, device, arithmetic or NativeArithmetic()), model, inputs
    )
    return replace(
        choice,
        always=tuple(name for text in always for name in spelled(text)),
        ops=Counter(c.op for c in movable),
        modules=Counter(c.module for c in movable if c.module),
    )


def _all_lower(
    choice: OpChoice, model: nn.Module, inputs: Any, failing: tuple[str, ...] = ()
) -> tuple[OpChoice, list[Call]]:
    """`choice` with the model's entrances on its lower list, and the movable calls there are.

    Ops that cannot be computed in the lower dtype are met in float32 here, where that is enough.
    """
    try:
        found = calls(model, inputs, lambda watcher: choice.way(failing, watcher=watcher))
    except OpFailedError as error:
        if not error.op or error.op in failing:
            raise NotMeasurableError(f"with every op in {choice.dtype}, {error}") from None
        return _all_lower(choice, model, inputs, (*failing, error.op))
    movable = [c for c in found if c.is_movable]
    wide = (c.op for c in movable if c.dtype == torch.float32)
    entrance = next((op for op in wide if op not in (*choice.lower, *failing)), None)
    if entrance is None:
        return choice, movable
    return _all_lower(replace(choice, lower=(*choice.lower, entrance)), model, inputs, failing)


@functools.cache
def promoted() -> tuple[str, ...]:
    """HMP's third list: ops that join several tensors."""
    text = (files("mprun.conf") / "op_lists" / "hmp.yaml").read_text(encoding="utf-8")
    return tuple(yaml.safe_load(text)["op_lists"]["promote"])
