"""The errors of two sides of a model with their bounds, and the first that is beyond.

Of each module, forward and backward, and of each side:

    arising     its own error: of what the module's own code computes from the inputs that this side
                gave it, relative to float64
    inherited   the error that float64 makes of these inputs: it came from earlier modules
    bias        the mean of the own error; the rest of it is noise
    explained   the bound (`rounding_oracle.py`), of the call's dtype: bfloat16 under autocast is no
                finding, and a float32 module that rounds to bfloat16 inside is one

A capture is made where a side runs; two captures are compared anywhere (`mprun diff`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.errors import first_line
from mprun.inspect.divergence.boundaries import (
    Boundaries,
    Boundary,
    OpError,
    OpErrors,
    Place,
    Recording,
    Results,
    calls_followed,
    exact_arithmetic,
    floating,
    run_forced,
    set_values,
    true_outputs,
)
from mprun.inspect.divergence.compiled import CompiledBoundaries, named
from mprun.inspect.passes import ready
from mprun.inspect.rounding_oracle import SideError, boundary_error
from mprun.precision._torch import is_compiled, original_module, without_compiled_code
from mprun.precision.apply import call
from mprun.precision.formats import BLOCK_FORMATS
from mprun.precision.nested import copied_model, map_tensors
from mprun.precision.rounding import sums_db
from mprun.records.console.fitted_table import FittedTable, figure_column, text_column
from mprun.watch.updates import power

SEED = 0  # Of all passes, so that both sides draw the same random numbers
ROUNDING = "emulate_precision_casts"  # Inductor's option to round where eager code does
ALIKE_DB = 0.5  # Outputs that differ by less are as near to float64
SHOWN = 12  # Rows of a printed table; diff.json has all
# What is compared at a boundary: the gradient, of input or output, of a child, number
TENSOR = re.compile(r"(gradient at )?(input|output)(?: of (.+?))?(?:,? (?:tensor )?(\d+))?")
BLOCK_NAMES = {form.name for form in BLOCK_FORMATS}


# ---- the result ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CapturedCall:
    """A module's own code in one pass of one side."""

    phase: str
    """forward or backward."""
    module: str
    """A name of `named_modules()`; empty for the model itself."""
    call: int
    """The number of the module's call, from 0."""
    kind: str
    """The module's class."""
    errors: dict[str, SideError]
    """By what is compared: an output, the gradient at an input, a parameter's gradient."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What a comparison needs of a side."""

    loss: float
    compiled: bool
    calls: list[CapturedCall]
    ops: list[OpError]
    note: str = ""
    """Why less than its modules is seen."""


@dataclass(frozen=True)
class DifferenceRow:
    """A module's own code in one pass, on both sides; other fields are those of `CapturedCall`."""

    phase: str
    module: str
    call: int
    kind: str
    what: str
    """Where the error is largest beside its bound: an output, the gradient at an input, or a
    parameter's gradient."""
    a: SideError
    b: SideError
    op: str = ""
    """Of a row beyond its bound: the op with the largest error, if ops are visible."""
    line: str = ""
    """The op's line of code, in the forward pass."""

    @property
    def is_explained(self) -> bool:
        """Whether both sides' errors are within their bounds."""
        return self.a.is_explained and self.b.is_explained


class Nearness(NamedTuple):
    """How near one way to run a model is to float64: the signal over the error, in dB."""

    output: float
    gradient: float
    is_eager: bool
    """Whether the outputs are those of eager code, bit for bit."""


@dataclass(frozen=True)
class Difference:
    """Where two models part; printed, it is a table."""

    rows: tuple[DifferenceRow, ...]
    """In the order they ran: the forward pass, then the backward pass."""
    ops: tuple[tuple[OpError, ...], tuple[OpError, ...]]
    """The ops of either side."""
    losses: tuple[float, float]
    notes: tuple[str, ...] = ()
    accuracy: dict[str, Nearness] = field(default_factory=dict)
    """Of eager and compiled code, and of that with `emulate_precision_casts`."""

    @property
    def first(self) -> DifferenceRow | None:
        """The first row beyond its bound in which the sides differ; later ones may inherit it."""
        unexplained = (row for row in self.rows if not row.is_explained)
        return next((x for x in unexplained if x.a.exceeds(x.b) or x.b.exceeds(x.a)), None)

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts()))

    def parts(self) -> list[FittedTable | str]:
        """The losses, the rows with the largest errors, where the sides part first, and notes."""
        largest = sorted(self.rows, key=lambda r: -max(r.a.arising, r.b.arising))[:SHOWN]
        return [
            f"loss: {self.losses[0]:.9g} and {self.losses[1]:.9g}",
            _table([row for row in self.rows if row in largest], len(self.rows) - len(largest)),
            _conclusion(self.first),
            *_nearer(self.accuracy),
            *(f"note: {x}" for x in self.notes),
        ]


def _table(rows: Sequence[DifferenceRow], left_out: int) -> FittedTable:
    names = (text_column("pass", 3), text_column("module"), text_column("what", 4))
    own = (figure_column("own error a"), figure_column("b"))
    inherited = (figure_column("inherited a", 1), figure_column("b", 1))
    table = FittedTable("", *names, *own, *inherited, text_column(""), elsewhere="diff.json")
    for row in rows:
        errors = (row.a.arising, row.b.arising, row.a.inherited, row.b.inherited)
        table.add_row(
            row.phase,
            (row.module or "the model") + (f" #{row.call}" if row.call else ""),
            row.what,
            *(f"{x:.1e}" for x in errors),
            "" if row.is_explained else "beyond rounding",
        )
    if left_out:
        table.caption = f"({left_out} rows with smaller errors are not shown)"
    return table


def _conclusion(first: DifferenceRow | None) -> str:
    if first is None:
        return "no error is larger than rounding to its dtype makes"
    side, error = ("a", first.a) if first.a.ratio >= first.b.ratio else ("b", first.b)
    where = f"{first.module or 'the model'} ({first.kind}), {first.phase}"
    where += f", op {first.op}" if first.op else ""
    where += f" at {first.line}" if first.line and "fused" in first.op else ""
    return f"first: {where}: in {side} {error.sentence}"


def _nearer(accuracy: Mapping[str, Nearness]) -> Iterator[str]:
    """How far each way to run a model is from float64, and which is nearer."""
    if not accuracy:
        return
    bits = {name: " (eager's bits)" if x.is_eager else "" for name, x in accuracy.items()}
    bits["eager"] = ""
    rows = [f"{n} {x.output:.1f} and {x.gradient:.1f} dB{bits[n]}" for n, x in accuracy.items()]
    gain = accuracy["compiled"].output - accuracy["eager"].output
    end = f"the output of {'compiled' if gain > 0 else 'eager'} code is nearer"
    end = end if abs(gain) >= ALIKE_DB else "neither output is nearer"
    yield f"float64 over errors of outputs and gradients: {'; '.join(rows)}: {end}"


# ---- a side, and its step ------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A model, and the casts around its call."""

    model: nn.Module
    autocast: torch.dtype | None = None
    """The dtype of an autocast region around the call."""
    region: Callable[[], AbstractContextManager[object]] | None = None
    """Another region around it."""
    low: torch.dtype | None = None
    """The dtype that `region` casts to."""
    rounds_as_eager: bool = False
    """Whether Inductor is to round where eager code does (`emulate_precision_casts`)."""

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """That of the first floating parameter."""
        floats = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return next(floats, torch.float32)

    @property
    def is_compiled(self) -> bool:
        """Whether a part of it is."""
        return any(map(is_compiled, self.model.modules()))

    def around(self) -> AbstractContextManager[object]:
        """A new region."""
        if self.region is not None:
            return self.region()
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast)


class SharedStep:
    """The same batch and loss for both sides.

    Floating tensors of the inputs of `forward(model, inputs)` are brought to each side's dtype;
    `loss(output)` is a scalar; None for that of `own_loss`.
    """

    def __init__(
        self,
        forward: Callable[[nn.Module, Any], Any],
        inputs: Any,
        loss: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self._forward, self._inputs, self._loss = forward, inputs, loss or own_loss

    def run(self, device: torch.device, dtype: torch.dtype, model: nn.Module) -> Any:
        """The output of a model for the inputs in a dtype."""
        inputs = map_tensors(
            lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), self._inputs
        )
        return self._forward(model, inputs)

    def record(self, side: Side, whole: bool = False) -> Recording:
        """A step of a side, forward and backward; `whole`: the model's own boundary alone."""
        plain = original_module(side.model)
        if whole or not side.is_compiled:
            return self._record(side, [("", side.model)] if whole else plain.named_modules())
        with without_compiled_code():
            eager = self._record(replace(side, model=plain), plain.named_modules())
        inside = CompiledBoundaries(side.rounds_as_eager)
        with ready(plain, SEED), inside.followed(plain):
            loss = self._take(side)
            return replace(_recording(plain, inside.seen(eager), loss), kernels=inside.kernels())

    def _record(self, side: Side, followed: Iterable[tuple[str, nn.Module]]) -> Recording:
        plain, boundaries = original_module(side.model), Boundaries(side.low)
        # compiled with the model, the hooks would be a part of its graphs
        around: Any = torch.compiler.disable if side.is_compiled else lambda hook: hook
        begin, end = around(boundaries.begin), around(boundaries.end)
        with ready(plain, SEED), calls_followed(followed, begin, end):
            loss = self._take(side, boundaries.end_forward)
            return _recording(plain, boundaries.ended, loss)

    def ops(self, side: Side) -> list[OpError]:
        """The ops of a side; none of a compiled one."""
        watcher = OpErrors()
        if not side.is_compiled:
            with ready(side.model, SEED), watcher.following(side.model), watcher:
                self._take(side)
        return watcher.ops

    def _take(self, side: Side, before_backward: Callable[[], None] = lambda: None) -> float:
        with side.around():
            output = self.run(side.device, side.dtype, side.model)
        loss = self._loss(output)
        before_backward()
        loss.backward()
        return float(loss.detach())


def _recording(model: nn.Module, boundaries: dict[Place, Boundary], loss: float) -> Recording:
    """A step that was taken, with the gradients and weights that the model has."""
    own = dict(model.named_parameters())
    gradients = {n: p.grad.detach().clone() for n, p in own.items() if p.grad is not None}
    weights, buffers = {n: p.detach() for n, p in own.items()}, dict(model.named_buffers())
    return Recording(boundaries, gradients, weights, buffers, loss)


def own_loss(output: Any) -> Tensor:
    """The output's own `loss`, else a fixed random projection of it: a scalar."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    generator = torch.Generator().manual_seed(SEED)
    sums = []
    for x in floating(output):
        if x.requires_grad:
            weights = torch.randn(x.shape, generator=generator).to(x.device)
            sums.append((x.to(torch.promote_types(x.dtype, torch.float32)) * weights).mean())
    if not sums:
        raise ValueError("the model's output has no floating tensor with a gradient: give a loss")
    return torch.stack(sums).sum()


def diff(
    a: nn.Module | Side,
    b: nn.Module | Side,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Difference:
    """The modules where two models part on the same batch, and which is the first.

        print(mprun.diff(model, copy.deepcopy(model).bfloat16(), batch))

    Both run in training without dropout, from the same random numbers; nothing of them changes.

    Args:
        a: a model, or `Side(model, autocast=torch.bfloat16)`, which runs it under autocast.
        b: one of the same modules, in another precision or version, or compiled.
        batch: a tensor, a tuple of arguments, or a mapping of named ones; with `loss`, a pair of
            that and the target. Floating inputs are brought to each side's dtype.
        loss: `loss(output, target)`, a scalar. None: the output's own `loss`, else a fixed random
            projection of the output, so that the backward pass is covered.

    Raises:
        TypeError: a side is no model.
        ValueError: the models have no module in common, or a batch is no pair.
    """
    for x in (a, b):
        if not issubclass(type(x), Side | nn.Module):
            kind = type(x).__name__
            raise TypeError(f"a side of type {kind}; legal: a model, or Side(model, ...)")
    first, second = (x if isinstance(x, Side) else Side(x) for x in (a, b))
    step = SharedStep(call, batch)
    if loss is not None:
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise ValueError("with loss, batch is a pair: inputs and target")
        inputs, target = batch
        step = SharedStep(call, inputs, lambda output: loss(output, target))
    reference, notes = _float64_of((first, second))
    return compare_sides(step, (first, second), reference, notes)


def _float64_of(sides: Sequence[Side]) -> tuple[nn.Module, list[str]]:
    """A float64 copy of the first side that can be copied, and why another could not."""
    reasons: list[str] = []
    for side in sides:
        try:
            twin = copied_model(original_module(side.model)).double()  # tied weights stay tied
            return twin, reasons
        except Exception as error:  # a model may refuse to be copied in any way
            reasons.append(f"{type(side.model).__name__} cannot be copied: {first_line(error)}")
    raise ValueError("; ".join(reasons))


# ---- the errors of a side ------------------------------------------------------------------------


def capture(
    step: SharedStep, side: Side, reference: nn.Module | None = None, passes: int = 1
) -> Captured:
    """Each module's own errors on one side.

    `reference` is a float64 copy of a model with the same modules; None: of the side's own. The
    bound is a multiple of the largest error of rounded passes: one, or up to `passes` of them while
    an error is beyond it.
    """
    return _captured(step, side, reference or _float64_of((side,))[0], passes)[0]


def _captured(
    step: SharedStep,
    side: Side,
    twin: nn.Module,
    passes: int = 1,
    whole: bool = False,
    only: Container[Place] | None = None,
) -> tuple[Captured, Recording]:
    """The errors of a side in all calls, or `only` these, and the step that they are of."""
    recording, note = _recorded(step, side, whole)
    calls = {x: y for x, y in recording.boundaries.items() if only is None or x in only}
    recording = replace(recording, boundaries=calls)
    errors = _calls(step, side, recording, twin, passes)
    ops = [*_kernel_errors(errors, recording)] if side.is_compiled else step.ops(side)
    about: dict[str, Any] = {"loss": recording.loss, "compiled": side.is_compiled, "note": note}
    return Captured(calls=errors, ops=ops, **about), recording


def _recorded(step: SharedStep, side: Side, whole: bool) -> tuple[Recording, str]:
    """A step of a side, and why it has the model's own boundary alone, if that was not asked."""
    reason = "its compiled code does not run Inductor's passes"
    try:
        recording = step.record(side, whole)
        if recording.boundaries or not side.is_compiled:
            return recording, ""
    except Exception as error:  # the compiler may refuse the hooks in any way
        if whole or not side.is_compiled:
            raise
        reason = first_line(error)
    note = f"only the compiled model's own outputs and gradients are seen: {reason}"
    return step.record(side, whole=True), note


def _kernel_errors(calls: Sequence[CapturedCall], recording: Recording) -> Iterator[OpError]:
    """The kernels of compiled code as ops: each has the error of what it computes."""
    for x in calls:
        for what, error in x.errors.items():
            tensor = TENSOR.fullmatch(what)  # None of a parameter's gradient
            if tensor is None:
                continue
            place = (tensor[3], 0) if tensor[3] else (x.module, x.call)
            name = named(place, tensor[2], int(tensor[4] or 0))
            kernel, lines = recording.kernels.get((tensor[1] or "") + name, ("", ""))
            if kernel:
                yield OpError(x.phase, x.module, kernel, error.dtype, error.arising, lines)


# The numbers of a side, float64's, those of rounded passes, and the true ones
Compared = tuple[Tensor, Tensor, list[Tensor], Tensor | None]


def _calls(
    step: SharedStep, side: Side, recording: Recording, twin: nn.Module, passes: int
) -> list[CapturedCall]:
    """The calls of a side, with their errors."""
    run = partial(step.run, side.device, torch.float64)
    with ready(twin, SEED):
        exact = run_forced(twin, recording, run, rounded=False)
        true = true_outputs(twin, recording, run)
    rounded, calls = list[Results](), list[CapturedCall]()
    for n in range(passes):
        # other seeds than the side's: dtypes may draw different random numbers from one seed
        with ready(twin, SEED + 1 + n):
            rounded.append(run_forced(twin, recording, run, rounded=True, seed=n))
        calls = [*_SidePasses(recording, exact, rounded, true).calls()]
        if all(error.is_explained for call in calls for error in call.errors.values()):
            break
    return calls


class _SidePasses(NamedTuple):
    """What the errors of a side are computed from."""

    recording: Recording
    exact: Results
    rounded: Sequence[Results]
    true: Mapping[Place, Sequence[Tensor]]

    def calls(self) -> Iterator[CapturedCall]:
        """The calls of the forward pass, then those of the backward pass, with their errors."""
        places = [place for place in self.recording.boundaries if place in self.exact.outputs]
        forward = [("forward", place, self.outputs(place)) for place in places]
        backward = [("backward", place, self.gradients(place)) for place in reversed(places)]
        for phase, place, numbers in (*forward, *backward):
            boundary = self.recording.boundaries[place]
            errors = {k: boundary_error(*x, boundary.rounding) for k, x in numbers.items()}
            yield CapturedCall(phase, *place, boundary.kind, errors)

    def outputs(self, place: Place) -> dict[str, Compared]:
        """What a call's own code computes."""
        own = self.true.get(place, [])
        drawn = zip(*(r.outputs[place] for r in self.rounded), strict=False)
        theirs = self.recording.boundaries[place].outputs
        rows = zip(theirs, self.exact.outputs[place], drawn, strict=False)
        return {
            f"output {n}": (x, y, [*z], own[n] if n < len(own) else None)
            for n, (x, y, z) in enumerate(rows)
            if {x.shape} == {y.shape, *(each.shape for each in z)}
        }

    def gradients(self, place: Place) -> dict[str, Compared]:
        """What its backward pass computes."""
        drawn = [r.gradients.get(place, {}) for r in self.rounded]
        rows: dict[str, Compared] = {
            f"gradient at {name}": (theirs, x, [r[name][0] for r in drawn], None)
            for name, (x, theirs) in self.exact.gradients.get(place, {}).items()
            if all(name in r for r in drawn)
        }
        for name, x in self.exact.parameters.items():
            module, _, own = name.rpartition(".")
            if module == place[0] and name in self.recording.gradients:
                moved = [r.parameters[name] for r in self.rounded]
                rows[f"gradient of {own}"] = (self.recording.gradients[name], x, moved, None)
        return rows


# ---- two sides beside each other -----------------------------------------------------------------


def compare_sides(
    step: SharedStep, sides: Sequence[Side], twin: nn.Module, notes: Sequence[str] = ()
) -> Difference:
    """Two sides beside each other; of eager and compiled code also which is nearer to float64.

    `twin` is the float64 copy for both: with one of its own, each side's fault would be in it.
    """
    if sides[0].is_compiled == sides[1].is_compiled:
        a, b = (_captured(step, x, twin)[0] for x in sides)
        return compare(a, b, notes)
    eager, compiled = sorted(sides, key=lambda x: x.is_compiled)
    b, of_b = _captured(step, compiled, twin)
    # the same calls in both: code of a call that one side has not is its caller's
    a, of_a = _captured(step, eager, twin, only=of_b.boundaries)
    found = compare(a, b, notes) if sides[1] is compiled else compare(b, a, notes)
    steps, rounding = {"eager": of_a, "compiled": of_b}, None
    if not b.note:
        side = replace(compiled, rounds_as_eager=True)
        rounding, steps[ROUNDING] = _captured(step, side, twin)
    more = [*_notes_of_compiled(found, b, rounding)]
    if rounding is not None and found.first is None:
        more += _unseen(step, sides, twin)
    set_values(twin, {**of_a.parameters, **of_a.buffers})
    true = step.record(Side(twin, region=partial(exact_arithmetic, twin)), whole=True)
    accuracy = {name: _accuracy(x, true, of_a) for name, x in steps.items()}
    return replace(found, accuracy=accuracy, notes=(*found.notes, *more))


def _notes_of_compiled(
    found: Difference, compiled: Captured, rounding: Captured | None
) -> Iterator[str]:
    """The kernels of the first row, and its error where Inductor rounds as eager code does."""
    if found.first is None:
        return
    phase, module, call = found.first.phase, found.first.module, found.first.call
    own = [x for x in compiled.ops if (x.phase, x.module) == (phase, module)]
    for op, line in dict.fromkeys((x.op, x.line) for x in own):
        yield f"compiled, {module or 'the model'} is in {op}, from {line or 'a library'}"
    calls = () if rounding is None else rounding.calls
    for x in (x for x in calls if (x.phase, x.module, x.call) == (phase, module, call)):
        if found.first.what in x.errors:
            yield f"with {ROUNDING} its own error is {x.errors[found.first.what].arising:.1e}"


def _unseen(step: SharedStep, sides: Sequence[Side], twin: nn.Module) -> Iterator[str]:
    """An error of the model as its user compiles it, where its modules have none beyond bounds."""
    a, b = (_captured(step, x, twin, whole=True)[0] for x in sides)
    first = compare(a, b).first
    if first is not None:
        error = max(first.a, first.b, key=lambda x: x.ratio)
        yield f"only where modules are not read, {first.phase}, {first.what}: {error.sentence}"


def _accuracy(side: Recording, true: Recording, eager: Recording) -> Nearness:
    outputs, exact, of_eager = (_outputs(x) for x in (side, true, eager))
    both = sorted(side.gradients.keys() & true.gradients.keys())
    gradients = ([x.gradients[n] for n in both] for x in (side, true))
    same = len(outputs) == len(of_eager) and all(map(torch.equal, outputs, of_eager))
    return Nearness(_db(outputs, exact), _db(*gradients), same)


def _outputs(step: Recording) -> list[Tensor]:
    return step.boundaries["", 0].outputs if ("", 0) in step.boundaries else []


def _db(numbers: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    pairs = [(x.double().cpu(), y.double().cpu()) for x, y in zip(numbers, true, strict=False)]
    signal, noise = sum(power(y) for _, y in pairs), sum(power(x - y) for x, y in pairs)
    return sums_db(signal, noise) if pairs else math.nan


def compare(a: Captured, b: Captured, notes: Sequence[str] = ()) -> Difference:
    """Two sides beside each other."""
    ops = (tuple(a.ops), tuple(b.ops))
    rows = tuple(_with_op(row, ops) for row in _rows(a.calls, b.calls))
    return Difference(rows, ops, (a.loss, b.loss), (*notes, *_notes(a, b)))


def _rows(a: Sequence[CapturedCall], b: Sequence[CapturedCall]) -> Iterator[DifferenceRow]:
    """The rows of the calls that both sides have, in the first one's order."""
    others = {(x.phase, x.module, x.call): x.errors for x in b}
    for x in a:
        theirs = others.get((x.phase, x.module, x.call), {})
        pairs = [(what, x.errors[what], theirs[what]) for what in x.errors if what in theirs]
        if pairs:
            worst = max(pairs, key=lambda p: (max(p[1].ratio, p[2].ratio), p[0]))
            yield DifferenceRow(x.phase, x.module, x.call, x.kind, *worst)


def _with_op(row: DifferenceRow, ops: tuple[Sequence[OpError], ...]) -> DifferenceRow:
    """The row with the op that has the largest error in its module, if it is beyond its bound."""
    if row.is_explained:
        return row
    worse, own = max((row.a, ops[0]), (row.b, ops[1]), key=lambda side: side[0].ratio)
    if worse.dtype in BLOCK_NAMES:  # the ops inside are those of its emulation
        return replace(row, op="linear")
    inside = [x for x in own if x.phase == row.phase and x.module == row.module]
    if not inside:
        inside = [x for x in own if x.phase == row.phase and x.module.startswith(f"{row.module}.")]
    largest = max(inside, key=lambda x: x.error, default=None)
    if largest is None or not largest.error:
        return row
    return replace(row, op=largest.op, line=largest.line)


def _notes(a: Captured, b: Captured) -> Iterator[str]:
    yield from (f"{name}: {side.note}" for name, side in (("a", a), ("b", b)) if side.note)
    first, second = ({(x.module, x.call) for x in side.calls} for side in (a, b))
    only = first ^ second
    if only and not (a.compiled or b.compiled):
        shown = ", ".join(sorted({path or "the model" for path, _ in only})[:3])
        yield f"a call that only one side has counts as code of its caller: {shown}"
