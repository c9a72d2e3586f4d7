"""`mprun trace`: one training step, op by op, and what its casts cost.

    mprun trace recipe=mnist op_lists=hmp

Takes the overrides of a run. Prints the totals and a summary by kind of op (with `trace.ops=true`
every op), and writes `trace.json` with everything into the run's folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from mprun.errors import RunFailedError
from mprun.inspect.question import Given, Prepared, Question, SavedResult, of_run
from mprun.records.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.files import json_text
from mprun.records.mode_names import SHORT_DTYPES
from mprun.records.result import Result
from mprun.records.run_record import BackendRow, Hardware

if TYPE_CHECKING:
    import torch

    from mprun.study.planned_run import PlannedRun
    from mprun.train.assemble.plan import Plan
    from mprun.train.data import Batch
    from mprun.watch.op_watcher import RecordedOp, TensorRecord

SCHEMA_VERSION = 1
WARMUP = 3  # Steps before the first timed one: optimizer state and kernels are made in them
REPEATS = 5  # Steps timed, and steps traced; times are their medians
COMPUTED_BY_MPRUN = (
    "note: ops that mprun computes itself (emulated or substituted) are shown as the model calls "
    "them; casts inside them are not counted"
)
ROOT = {"forward": "(root)"}  # The name of the model itself, whose path is empty
MAX_KINDS = 25  # The most kinds of ops in the summary; the rest are summed in one row
ELSEWHERE = "trace.json"  # A table that is cut names the file with the rest


@dataclass
class TraceSettings:
    """What `mprun trace` shows."""

    ops: bool = False
    """Whether every op is listed below the summary."""


class CastRecord(msgspec.Struct, frozen=True, rename={"from_dtype": "from", "to_dtype": "to"}):
    """A conversion of a tensor's dtype; `from` is a keyword of Python, so fields are renamed."""

    from_dtype: str
    to_dtype: str
    bytes: int  # Read and written
    time_ms: float
    redundant: str | None  # Why it is redundant: `cast back`, `cast twice`; None if it is not


@dataclass(frozen=True)
class TraceRow:
    """A call of the model with its kernels, or an op outside of a call."""

    op: str  # What Python called; in the backward pass and the optimizer, what ATen ran
    phase: str  # One of `step_events.PHASES`
    module: str
    rule: str  # The cast rule that decided the dtype
    dtypes_in: list[str]
    dtypes_out: list[str]
    kernels: list[str]  # The ATen ops that computed; empty for a cast alone
    began_ms: float
    time_ms: float  # Without casts
    cast_time_ms: float
    casts: list[CastRecord]  # The copies into another dtype that were made for it


@dataclass(frozen=True)
class TraceTotals:
    """Sums over a step."""

    time_ms: float
    by_dtype: dict[str, tuple[int, float]]
    """Output dtype to the number of ops and their time in milliseconds."""
    casts: int
    cast_bytes: int
    cast_time_ms: float
    cast_share: float  # Of the time of a step that is not traced
    redundant: dict[str, int]  # Kind of redundancy to the number of casts


@dataclass(frozen=True)
class TraceRecord:
    """All of it."""

    schema_version: int
    versions: dict[str, str | None]
    hardware: Hardware
    recipe: str
    precision: str
    variant: str
    execution: str
    backend: BackendRow
    step_time_ms: float  # The median time of a step that is not traced
    totals: TraceTotals
    rows: list[TraceRow]


def kinds_table(rows: Sequence[TraceRow]) -> FittedTable:
    """A row for each kind of op: those of one phase, rule and dtypes; the longest first."""
    groups: dict[tuple[str, str, str, str], list[TraceRow]] = {}
    for row in rows:
        groups.setdefault((row.phase, row.op, _dtypes(row), row.rule), []).append(row)
    kinds = sorted(groups.items(), key=lambda kind: -_whole_ms(kind[1]))
    shown = kinds[:MAX_KINDS]
    if rest := kinds[MAX_KINDS:]:
        others = [row for _, members in rest for row in members]
        shown.append((("", f"{len(rest)} more kinds", "", ""), others))
    return FittedTable(
        "kinds of ops, the longest first",
        text_column("phase", 4, cell=lambda kind: kind[0][0]),
        text_column("op", cell=lambda kind: kind[0][1]),
        text_column("dtypes", 6, cell=lambda kind: kind[0][2]),
        text_column("rule", 3, cell=lambda kind: kind[0][3]),
        figure_column("ops", 5, lambda kind: str(len(kind[1]))),
        figure_column("ms", cell=lambda kind: f"{sum(row.time_ms for row in kind[1]):.3f}"),
        figure_column("casts", 2, lambda kind: str(sum(len(row.casts) for row in kind[1]) or "")),
        figure_column("in casts", 7, lambda kind: _cast_ms(kind[1])),
        rows=shown,
        elsewhere=ELSEWHERE,
        caption=f"trace.ops=true lists all {len(rows)} ops",
    )


def _whole_ms(rows: Sequence[TraceRow]) -> float:
    return sum(row.time_ms + row.cast_time_ms for row in rows)


def _cast_ms(rows: Sequence[TraceRow]) -> str:
    """The time of their casts; empty without one."""
    has_casts = any(row.casts for row in rows)
    return f"{sum(row.cast_time_ms for row in rows):.3f}" if has_casts else ""


def step_table(rows: Sequence[TraceRow]) -> FittedTable:
    """A row for each call and each op outside of one, in the order they ran."""
    return FittedTable(
        "one training step",
        text_column("phase", 3, cell=lambda x: x[0].phase),
        text_column("module", cell=lambda x: x[0].module or ROOT.get(x[0].phase, "")),
        text_column("op", cell=lambda x: x[0].op + (f" x{x[1]}" if x[1] > 1 else "")),
        text_column("rule", 2, cell=lambda x: x[0].rule),
        text_column("dtypes", 5, cell=lambda x: _dtypes(x[0])),
        text_column("casts", 1, cell=lambda x: ", ".join(_casts(x[0].casts))),
        figure_column("ms", cell=lambda x: f"{x[0].time_ms:.3f}"),
        figure_column("in casts", 4, lambda x: _cast_ms([x[0]])),
        rows=_merged(rows),
        elsewhere=ELSEWHERE,
    )


def _merged(rows: Sequence[TraceRow]) -> Iterator[tuple[TraceRow, int]]:
    """Rows of the model one by one; equal rows outside of it as one, with their number and time."""
    groups: dict[str, list[TraceRow]] = {}
    for n, row in enumerate(rows):
        # an optimizer runs the same few ops for each parameter
        is_model = row.phase in ("forward", "backward")
        dtypes = (row.dtypes_in, row.dtypes_out)
        key = str(n if is_model else (row.phase, row.op, row.rule, dtypes, [*_casts(row.casts)]))
        groups.setdefault(key, []).append(row)
    for group in groups.values():
        time_ms = sum(row.time_ms for row in group)
        cast_time_ms = sum(row.cast_time_ms for row in group)
        yield replace(group[0], time_ms=time_ms, cast_time_ms=cast_time_ms), len(group)


def _short(names: Sequence[str]) -> str:
    return " ".join(SHORT_DTYPES.get(name, name) for name in names)


def _dtypes(row: TraceRow) -> str:
    """The dtypes of its kernels' inputs and outputs: `bf16`, or `bf16 fp32 > bf16`."""
    before, after = _short(row.dtypes_in), _short(row.dtypes_out)
    return before if before == after else f"{before} > {after}"


def _casts(casts: Sequence[CastRecord]) -> Iterator[str]:
    """Each kind of cast with its number: `fp32>bf16 x2`."""
    kinds = Counter((c.from_dtype, c.to_dtype, c.redundant) for c in casts)
    for (before, after, redundant), count in kinds.items():
        times = f" x{count}" if count > 1 else ""
        why = f" ({redundant})" if redundant else ""
        yield f"{_short([before])}>{_short([after])}{times}{why}"


def totals(record: TraceRecord) -> FittedTable:
    """The sums over the step's ops and casts."""
    total = record.totals
    redundant = ", ".join(f"{n} {kind}" for kind, n in total.redundant.items())
    rows = {
        "step, not traced": f"{record.step_time_ms:.3f} ms",
        "ops and casts": f"{total.time_ms:.3f} ms",
        **{
            f"ops that give {dtype}": f"{count} in {time_ms:.3f} ms"
            for dtype, (count, time_ms) in total.by_dtype.items()
        },
        "casts": f"{total.casts} in {total.cast_time_ms:.3f} ms, {total.cast_share:.1%} of the "
        f"step; {total.cast_bytes / 2**20:.2f} MiB read and written",
        "redundant casts": redundant or "none",
    }
    return FittedTable(
        "totals",
        text_column("quantity", cell=itemgetter(0)),
        text_column("value", cell=itemgetter(1)),
        rows=rows.items(),
    )


# ---- rows of the recorded ops --------------------------------------------------------------------


def casts_of(rows: Iterable[TraceRow]) -> list[CastRecord]:
    """All casts of these rows."""
    return [cast for row in rows for cast in row.casts]


def totals_of(rows: Sequence[TraceRow], step_time_ms: float) -> TraceTotals:
    """Sums over the rows of a step, whose time without tracing is `step_time_ms`."""
    by_dtype: dict[str, tuple[int, float]] = {}
    for row in rows:
        if row.kernels:
            for dtype in row.dtypes_out[:1]:  # each op counts once, by its first output
                count, time_ms = by_dtype.get(dtype, (0, 0.0))
                by_dtype[dtype] = (count + 1, time_ms + row.time_ms)
    cast_time_ms, casts = sum(row.cast_time_ms for row in rows), casts_of(rows)
    return TraceTotals(
        time_ms=_whole_ms(rows),
        by_dtype=by_dtype,
        casts=len(casts),
        cast_bytes=sum(cast.bytes for cast in casts),
        cast_time_ms=cast_time_ms,
        cast_share=cast_time_ms / step_time_ms,
        redundant=dict(Counter(cast.redundant for cast in casts if cast.redundant)),
    )


def trace(ops: Sequence[RecordedOp], layers: Iterable[str] = ()) -> list[TraceRow]:
    """The rows of a step, in the order they ran; `layers` name modules with a dtype of their own.

    The ops are from an `OpRecorder` with `CallStack.current` as its `call`; `layers` are names of
    modules with a dtype of their own.
    """
    redundant, own_dtype = _redundant(ops), tuple(layers)
    rows = []
    for _, group in groupby(enumerate(ops), key=lambda item: _group(*item)):
        members = list(group)
        casts = [_cast(op, redundant.get(i)) for i, op in members if op.is_cast]
        row = _row([op for _, op in members], casts, own_dtype)
        if row.kernels or row.casts:
            rows.append(row)
    return rows


def _group(index: int, op: RecordedOp) -> tuple[int, int]:
    """A key: equal for the ops of one call, different for all others."""
    # ops of a backward pass or an optimizer are rows of their own
    number = op.call.number if op.call is not None else 0
    return (number, 0) if number and op.phase == "forward" else (0, index)


def _row(ops: list[RecordedOp], casts: list[CastRecord], layers: tuple[str, ...]) -> TraceRow:
    first, computing = ops[0], [op for op in ops if not op.is_cast and not op.is_view]
    called = first.phase == "forward" and first.call is not None and first.call.number
    name = first.call.name if called else computing[0].name if computing else "cast"
    # the last kernel gives the row's output; one without outputs writes into its inputs
    made = [v for op in computing[-1:] for v in op.outputs or op.inputs]
    return TraceRow(
        op=name,
        phase=first.phase,
        module=first.module,
        rule=_rule(first, layers),
        dtypes_in=_floating(v for op in computing for v in op.inputs),
        dtypes_out=_floating(made),
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
        return "disabled"  # optimizers step outside of autocast and op lists
    if op.call is None or op.phase == "other":
        return "outside"
    in_layer = any(op.module == name or op.module.startswith(f"{name}.") for name in layers)
    return "layer policy" if op.call.rule == "disabled" and in_layer else str(op.call.rule)


def _floating(values: Iterable[TensorRecord]) -> list[str]:
    """Their distinct floating dtypes, in order."""
    return list(dict.fromkeys(_name(v.dtype) for v in values if v.dtype.is_floating_point))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")  # `dtype_name`, whose module imports torch


def _cast(op: RecordedOp, redundant: str | None) -> CastRecord:
    have, want = op.inputs[0], op.outputs[0]
    nbytes = have.nbytes + want.nbytes
    names = _name(have.dtype), _name(want.dtype)
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
        # memory alone does not tell two views of one storage apart
        key = (have.memory, have.layout, have.shape, have.dtype, want.dtype)
        if came_from.get(have.memory) == want.dtype:
            reasons[i] = "cast back"
        elif key in made:
            reasons[i] = "cast twice"
        made.add(key)
        came_from[want.memory] = have.dtype
    return reasons


def typical(traces: Sequence[list[TraceRow]]) -> list[TraceRow]:
    """The last trace, with medians as times, over the traces that ran the same ops."""
    # steps differ where a model's code branches, or a scaler skips an update
    alike = [rows for rows in traces if _shape(rows) == _shape(traces[-1])]
    return [_typical_row(rows) for rows in zip(*alike, strict=True)]


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


def _shape(rows: Sequence[TraceRow]) -> list[tuple[str, str, int]]:
    return [(row.op, row.module, len(row.casts)) for row in rows]


# ---- the measurement -----------------------------------------------------------------------------


def prepare(given: Given) -> Prepared:
    """Plan the run whose step is traced."""
    from mprun.config import compose
    from mprun.study.planned_run import plan_run

    planned = plan_run(compose(given.overrides, given.config_dir), "trace")
    with_ops = given.settings(TraceSettings).ops
    return of_run(planned, lambda _: measure(planned, with_ops))


QUESTION = Question(
    "trace",
    prepare,
    (TraceSettings,),
    saved=SavedResult(
        ELSEWHERE,
        TraceRecord,
        SCHEMA_VERSION,
        lambda record: (totals(record), kinds_table(record.rows)),
    ),
)


def measure(planned: PlannedRun, with_ops: bool) -> Result:
    """A training step of a planned run; `with_ops` shows every op, not only kinds of them."""
    from mprun.train.assemble.parts import build_arithmetic

    with planned.executing():
        rows, step_time_s = trace_step(planned.plan)
    summary = planned.summary
    record = TraceRecord(
        schema_version=SCHEMA_VERSION,
        versions=summary.versions,
        hardware=summary.hardware,
        recipe=summary.recipe,
        precision=summary.precision,
        variant=summary.variant,
        execution=summary.execution,
        backend=summary.backend,
        step_time_ms=step_time_s * 1e3,
        totals=totals_of(rows, step_time_s * 1e3),
        rows=rows,
    )
    parts: list[FittedTable | str] = [totals(record), kinds_table(rows)]
    if with_ops:
        parts.append(step_table(rows))
    # casts inside the ops that mprun emulates or substitutes are not counted
    if planned.plan.execution == "emulated" or build_arithmetic(planned.plan).substitutions:
        parts.append(COMPUTED_BY_MPRUN)
    return Result(record, parts, {"trace.json": json_text(record)})


def trace_step(plan: Plan) -> tuple[list[TraceRow], float]:
    """A training step of this plan, and the median time in seconds of a step that is not traced.

    Raises:
        RunFailedError: the step cannot run.
    """
    from mprun.inspect.op_trace import StepRecorder
    from mprun.train.user_code import described

    recorder = StepRecorder(plan, is_timed=True)
    batch = recorder.first_batch()
    try:  # recorded, so that the op that fails is known
        recorder.record(batch)
    except Exception as error:
        text = described(error, plan.policy.name)
        where = f"{recorder.fault}: " if recorder.fault is not None else ""
        raise RunFailedError(f"the step cannot run: {where}{text}") from error
    times = [recorder.time_s(batch) for _ in range(WARMUP + REPEATS)]
    traces = [trace(recorder.record(batch), plan.layers) for _ in range(REPEATS)]
    return typical(traces), median(times[WARMUP:])  # medians: single steps are interrupted


def traced_step(plan: Plan, batch: Batch) -> list[TraceRow]:
    """The first training step of this plan, on a batch; on a GPU its times mean nothing."""
    from mprun.inspect.op_trace import StepRecorder

    return trace(StepRecorder(plan, is_timed=False).record(batch), plan.layers)
