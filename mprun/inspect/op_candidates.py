"""The ops of a model that can run in the lower dtype or in float32, and the lists for it.

A search starts with everything lower. Three rules do that:

    heavy ops      matmuls, convolutions, attention and recurrent layers, which 16-bit units speed
                   up, are on the lower list
    followers      every other op runs in the dtype of its first input, or where the model joins
                   several, in the widest (HMP's rules): behind a heavy op that is the lower dtype
    entrances      an op that would still run in float32 (its input is the model's, a float32 table,
                   or the result of a cast in the model's code) is on the lower list

No other op is listed: an op on no list runs in float32 behind one that was moved there, and the
large numbers of an `exp` pass through the `sum` behind it without naming that too.

Ops that only inspect numbers (comparisons) and those in place, which run in the dtype of the tensor
they write to, are not moved. A module is a candidate, by its name, if its own code calls such ops.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch
import yaml  # type: ignore[import-untyped]
from torch import nn

from mprun.errors import NotMeasurableError, first_line
from mprun.inspect.op_trace import CallStack
from mprun.inspect.passes import CastPlan, Forward, is_out_of_memory, ready
from mprun.precision import Arithmetic, NativeArithmetic, OpListCaster, OpLists, op_lists
from mprun.precision.apply import call
from mprun.precision.op_lists import Entry, Watcher
from mprun.precision.op_lists.lists import CONVOLUTIONS, RECURRENT, known, spelled
from mprun.watch.op_watcher import OpRecorder, RecordedOp

# Ops that are on the lower list unless they need float32
HEAVY = (
    *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "einsum", "linear"),
    *("linalg_multi_dot", "matmul", "mm", "mv", "tensordot", "bilinear", "conv_tbc"),
    *(*CONVOLUTIONS, *RECURRENT, "scaled_dot_product_attention"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_native_multi_head_attention"),
)

# Rules of ops that a list can move
MOVABLE = ("listed lower", "listed fp32", "promote", "first input")

# Kernels that compute nothing; a call that runs no others is left alone
COPIES = frozenset(("clone", "copy_", "_unsafe_view"))


class OpFailedError(Exception):
    """An op cannot be computed in the dtypes of its inputs; `op` is empty where it is unknown."""

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(f"{op or 'an op'} fails: {reason}")
        self.op = op


class _FailedCalls(CallStack):
    """Records the call in which an error was raised first."""

    failed = ""

    @contextmanager
    def op(self, name: str, rule: str) -> Iterator[None]:
        try:
            with super().op(name, rule):
                yield
        except RuntimeError:
            self.failed = self.failed or name
            raise


class ForwardCall(NamedTuple):
    """A call from Python that computed something in the forward pass."""

    op: str
    module: str  # Whose code made it; empty for the model's own
    is_movable: bool
    dtype: torch.dtype  # The dtype of its result
    elements: int  # The number of elements of the result


def forward_calls(
    model: nn.Module,
    inputs: Any,
    plan_with: Callable[[Watcher], CastPlan],
    forward: Forward = call,
) -> list[ForwardCall]:
    """The calls of a forward pass with floating results, in their order.

    Args:
        model, inputs: the model, and the inputs of one batch.
        plan_with: makes the cast plan, with a watcher that is notified of its calls.
        forward: gives the model's output for the inputs.

    Raises:
        OpFailedError: an op cannot be computed so.
    """
    names, ops = _FailedCalls(), list[RecordedOp]()
    recorder = OpRecorder(ops.append, names.current)
    plan = plan_with(names)
    following = recorder.following(model)
    try:
        with ready(model), plan.applied_to(model), following, recorder, plan.caster.region():
            forward(model, inputs)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise OpFailedError(names.failed, first_line(error)) from error
    called = (op for op in ops if op.phase == "forward" and op.call is not None)
    grouped = groupby(called, key=lambda op: op.call.number)
    return [call for _, group in grouped if (call := _forward_call(list(group))) is not None]


def _forward_call(ops: Sequence[RecordedOp]) -> ForwardCall | None:
    computing = [op for op in ops if not op.is_cast and not op.is_view]
    takes = any(v.dtype.is_floating_point for op in computing for v in op.inputs)
    results = ([v for v in op.outputs if v.dtype.is_floating_point] for op in reversed(computing))
    result = next((values[0] for values in results if values), None)  # others are statistics
    if not takes or result is None or COPIES.issuperset(op.name for op in computing):
        return None
    name, rule = ops[0].call.name, ops[0].call.rule
    movable = rule in MOVABLE and name in known()
    return ForwardCall(name, ops[0].module, movable, result.dtype, prod(result.shape))


def float32_share(calls: Sequence[ForwardCall]) -> float:
    """The share of the numbers these calls compute that are float32."""
    whole = sum(c.elements for c in calls)
    return sum(c.elements for c in calls if c.dtype == torch.float32) / whole if whole else 0.0


@dataclass(frozen=True)
class OpCandidates:
    """The ops and modules of a model that lists can move, and the cast plans that do it."""

    dtype: torch.dtype  # The lower one: bfloat16 or float16
    device_type: str  # Whose kernels run: cpu or cuda
    arithmetic: Arithmetic
    lower: tuple[str, ...] = HEAVY  # Ops on the lower list when everything is lower
    always: tuple[str, ...] = ()  # Ops that are always in float32
    ops: Mapping[str, int] = field(default_factory=dict)
    """Movable op to how often it is called, in the order of the first calls."""
    modules: Mapping[str, int] = field(default_factory=dict)
    """Module to how many movable calls its own code makes, in the order of the first ones."""

    def lists(self, fp32: Collection[str] = ()) -> OpLists:
        """These ops on the fp32 list, the others lower."""
        in_float32 = (*self.always, *fp32)
        lower = [n for n in self.lower if n not in in_float32]
        return op_lists(lower, in_float32, promoted())

    def plan(
        self,
        fp32: Collection[str] = (),
        modules: Collection[str] = (),
        watcher: Watcher | None = None,
    ) -> CastPlan:
        """These ops and modules in float32, the others lower."""
        apart = dict.fromkeys(modules, torch.float32)
        return CastPlan(self._caster(self.lists(fp32), watcher), apart, arithmetic=self.arithmetic)

    def op_alone(self, name: str) -> CastPlan:
        """One op lower, the others in float32."""
        lists = op_lists([name], [n for n in self.ops if n != name], promoted())
        return CastPlan(self._caster(lists), arithmetic=self.arithmetic)

    def module_alone(self, name: str) -> CastPlan:
        """One module lower, everything else in float32."""
        inside = self._caster(self.lists())
        outside = self._caster(op_lists((), self.ops, promoted()))
        return CastPlan(outside, {name: self.dtype}, lambda _: inside.region, self.arithmetic)

    def _caster(self, lists: OpLists, watcher: Watcher | None = None) -> OpListCaster:
        return OpListCaster(lists, self.dtype, self.device_type, watcher=watcher)


def op_candidates(
    model: nn.Module,
    inputs: Any,
    dtype: torch.dtype,
    always: Sequence[str] = (),
    arithmetic: Arithmetic | None = None,
    forward: Forward = call,
) -> OpCandidates:
    """The ops and modules of a model that lists can move.

    Args:
        model, inputs: the model, and the inputs of one batch; a few forward passes are run on them.
        dtype: bfloat16 or float16.
        always: ops that are always in float32, by any of their names.
        arithmetic: computes the ops; PyTorch's kernels by default.
        forward: gives the model's output for the inputs.

    Raises:
        NotMeasurableError: no op has a name in `always`; or the model fails in the lower dtype and
            no single op is to blame.
    """
    unknown = op_lists((), [Entry(name, "always") for name in always]).unknown
    if unknown:
        raise NotMeasurableError(str(unknown[0]))
    device = next(model.parameters()).device.type
    candidates, movable = _all_lower(
        OpCandidates(dtype, device, arithmetic or NativeArithmetic()), model, inputs, forward
    )
    return replace(
        candidates,
        always=tuple(name for text in always for name in spelled(text)),
        ops=Counter(c.op for c in movable),
        modules=Counter(c.module for c in movable if c.module),
    )


def _all_lower(
    candidates: OpCandidates,
    model: nn.Module,
    inputs: Any,
    forward: Forward,
    failing: tuple[str, ...] = (),
) -> tuple[OpCandidates, list[ForwardCall]]:
    """`candidates` with the model's entrances on the lower list, and the movable calls.

    Ops that cannot be computed in the lower dtype run in float32 here, if that is enough.
    """
    try:
        calls = forward_calls(model, inputs, lambda w: candidates.plan(failing, watcher=w), forward)
    except OpFailedError as error:
        if not error.op or error.op in failing:
            raise NotMeasurableError(f"with every op in {candidates.dtype}, {error}") from None
        return _all_lower(candidates, model, inputs, forward, (*failing, error.op))
    movable = [c for c in calls if c.is_movable]
    wide = (c.op for c in movable if c.dtype == torch.float32)
    entrance = next((op for op in wide if op not in (*candidates.lower, *failing)), None)
    if entrance is None:
        return candidates, movable
    with_entrance = replace(candidates, lower=(*candidates.lower, entrance))
    return _all_lower(with_entrance, model, inputs, forward, failing)


@functools.cache
def promoted() -> tuple[str, ...]:
    """HMP's third list: ops that join several tensors."""
    text = (files("mprun.conf") / "op_lists" / "hmp.yaml").read_text(encoding="utf-8")
    return tuple(yaml.safe_load(text)["op_lists"]["promote"])
