"""A trace of one training step: every op, its dtypes, the rule that decided them, the casts.

    op         what Python called; in the backward pass and the optimizer, what ATen ran
    rule       why it ran in that dtype: its list, promotion, in-place, first input, a layer's own
               dtype, casts disabled, autocast's list, or nothing ("as it is")
    casts      the copies into another dtype that were made for it
    redundant  a cast of a tensor that was cast to the same dtype before, or a cast back to the
               dtype a tensor came from; lists that alternate between dtypes cause the second kind

With op lists, the caster itself reports the rules. With autocast, the same lists as data
(`op_lists=native`) say which list an op is on; a test checks that they agree with autocast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from mprun.inspect.trace_result import CastRecord, TraceRow, TraceTotals
from mprun.precision import Caster
from mprun.precision.op_lists import OpLists, Table, region
from mprun.precision.op_lists.rules import Casts
from mprun.precision.policy import dtype_name
from mprun.watch.op_watcher import RecordedOp, TensorRecord

# Names of the lists' rules in a trace; the other rules keep their names
LISTED = {"lower": "listed lower", "fp32": "listed fp32"}


class PythonCall(NamedTuple):
    """A Python call that ran ops."""

    number: int
    name: str
    rule: str


class CallStack:
    """Follows which Python call runs, and by which rule: a watcher for op lists.

    Args:
        prefix: put before the rule of a list, for lists that describe autocast.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._stack: list[PythonCall] = []
        self._count = 0

    @contextmanager
    def op(self, name: str, rule: str) -> Iterator[None]:
        self._count += 1
        listed = self._prefix + rule if self._prefix else LISTED.get(rule, rule)
        label = listed if rule in (*LISTED, "promote") else rule
        self._stack.append(PythonCall(self._count, name, label))
        try:
            yield
        finally:
            self._stack.pop()

    def cast(self, have: torch.dtype, want: torch.dtype) -> None:
        """Nothing to do: the recorder sees the cast itself."""

    def current(self) -> PythonCall | None:
        """The call whose ops run now."""
        return self._stack[-1] if self._stack else None


class LabelledCaster(Caster):
    """A caster whose rules are reported by lists that cast nothing.

    Args:
        caster: decides the dtypes.
        lists: describe what it decides.
        calls: receives the rules.
    """

    def __init__(self, caster: Caster, lists: OpLists, calls: CallStack) -> None:
        self._caster = caster
        self.columns = caster.columns
        self._table = Table(lists, torch.float32, _NoCasts(), "cpu", calls)

    def convert(self, model: nn.Module) -> None:
        self._caster.convert(model)

    @contextmanager
    def region(self) -> Iterator[None]:
        with self._caster.region(), region(self._table):
            yield

    def backward(
        self, loss: torch.Tensor, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        self._caster.backward(loss, retain_graph, create_graph)

    def step_region(self) -> AbstractContextManager[object]:
        return self._caster.step_region()

    def layer_region(self, dtype: torch.dtype) -> Callable[[], AbstractContextManager[object]]:
        return self._caster.layer_region(dtype)

    def end_step(self) -> None:
        self._caster.end_step()


class _NoCasts(Casts):
    def to(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x


@dataclass(frozen=True)
class StepTrace:
    """A step's rows in the order they ran."""

    rows: list[TraceRow]

    @property
    def casts(self) -> list[CastRecord]:
        """All casts of the step."""
        return [cast for row in self.rows for cast in row.casts]

    @property
    def time_ms(self) -> float:
        """The time of all ops and casts."""
        return sum(row.time_ms + row.cast_time_ms for row in self.rows)

    def totals(self, step_time_ms: float) -> TraceTotals:
        """Sums over the rows.

        Args:
            step_time_ms: of a step that is not traced; the share of casts is relative to it.
        """
        by_dtype: dict[str, tuple[int, float]] = {}
        for row in self.rows:
            if row.kernels:
                for dtype in row.dtypes_out[:1]:
                    count, time_ms = by_dtype.get(dtype, (0, 0.0))
                    by_dtype[dtype] = (count + 1, time_ms + row.time_ms)
        cast_time_ms = sum(row.cast_time_ms for row in self.rows)
        return TraceTotals(
            time_ms=self.time_ms,
            by_dtype=by_dtype,
            casts=len(self.casts),
            cast_bytes=sum(cast.bytes for cast in self.casts),
            cast_time_ms=cast_time_ms,
            cast_share=cast_time_ms / step_time_ms,
            redundant=dict(Counter(cast.redundant for cast in self.casts if cast.redundant)),
        )


def trace(ops: Sequence[RecordedOp], layers: Iterable[str] = ()) -> StepTrace:
    """The rows of a step.

    Args:
        ops: from an `OpRecorder` with `CallStack.current` as its `call`.
        layers: names of modules with a dtype of their own.
    """
    redundant, own_dtype = _redundant(ops), tuple(layers)
    rows = []
    for _, group in groupby(enumerate(ops), key=lambda item: _group(*item)):
        members = list(group)
        casts = [_cast(op, redundant.get(i)) for i, op in members if op.is_cast]
        row = _row([op for _, op in members], casts, own_dtype)
        if row.kernels or row.casts:
            rows.append(row)
    return StepTrace(rows)


def _group(index: int, op: RecordedOp) -> tuple[int, int]:
    """A key: equal for the ops of one call, different for all others."""
    number = op.call.number if op.call is not None else 0
    return (number, 0) if number and op.phase == "forward" else (0, index)


def _row(ops: list[RecordedOp], casts: list[CastRecord], layers: tuple[str, ...]) -> TraceRow:
    first, computing = ops[0], [op for op in ops if not op.is_cast and not op.is_view]
    called = first.phase == "forward" and first.call is not None and first.call.number
    name = first.call.name if called else computing[0].name if computing else "cast"
    made = [v for op in computing[-1:] for v in op.outputs or op.inputs]  # some write in place
    return TraceRow(
        op=name,
        phase=first.phase,
        module=first.module,
        rule=_rule(first, layers),
        dtypes_in=_dtypes(v for op in computing for v in op.inputs),
        dtypes_out=_dtypes(made),
        kernels=[op.name for op in computing],
        began_ms=first.began_s * 1e3,
        time_ms=sum(op.time_s for op in ops if not op.is_cast) * 1e3,
        cast_time_ms=sum(cast.time_ms for cast in casts),
        casts=casts,
    )


def _rule(op: RecordedOp, layers: tuple[str, ...]) -> str:
    if op.phase == "backward":
        return "as forward"
    if op.phase == "optimizer":
        return "disabled"
    if op.call is None or op.phase == "other":
        return "outside"
    in_layer = any(op.module == name or op.module.startswith(f"{name}.") for name in layers)
    return "layer policy" if op.call.rule == "disabled" and in_layer else str(op.call.rule)


def _dtypes(values: Iterable[TensorRecord]) -> list[str]:
    names = (dtype_name(v.dtype) for v in values if v.dtype.is_floating_point)
    return list(dict.fromkeys(names))


def _cast(op: RecordedOp, redundant: str | None) -> CastRecord:
    have, want = op.inputs[0], op.outputs[0]
    nbytes = have.nbytes + want.nbytes
    names = dtype_name(have.dtype), dtype_name(want.dtype)
    return CastRecord(*names, nbytes, op.time_s * 1e3, redundant)


def _redundant(ops: Sequence[RecordedOp]) -> dict[int, str]:
    """Index of a cast to why it is redundant."""
    made: set[tuple[Any, ...]] = set()
    came_from: dict[tuple[int, int], torch.dtype] = {}
    reasons = {}
    for i, op in enumerate(ops):
        if not op.is_cast:
            continue
        have, want = op.inputs[0], op.outputs[0]
        key = (have.memory, have.layout, have.shape, have.dtype, want.dtype)
        if came_from.get(have.memory) == want.dtype:
            reasons[i] = "cast back"
        elif key in made:
            reasons[i] = "cast twice"
        made.add(key)
        came_from[want.memory] = have.dtype
    return reasons


def typical(traces: Sequence[StepTrace]) -> StepTrace:
    """The last trace, with medians as times, over the traces that ran the same ops."""
    alike = [t.rows for t in traces if _shape(t) == _shape(traces[-1])]
    return StepTrace([_typical_row(rows) for rows in zip(*alike, strict=True)])


def _typical_row(rows: Sequence[TraceRow]) -> TraceRow:
    casts = [
        msgspec.structs.replace(casts[-1], time_ms=median(cast.time_ms for cast in casts))
        for casts in zip(*(row.casts for row in rows), strict=True)
    ]
    return replace(
        rows[-1],
        time_ms=median(row.time_ms for row in rows),
        cast_time_ms=sum(cast.time_ms for cast in casts),
        casts=casts,
    )


def _shape(t: StepTrace) -> list[tuple[str, str, int]]:
    return [(row.op, row.module, len(row.casts)) for row in t.rows]
