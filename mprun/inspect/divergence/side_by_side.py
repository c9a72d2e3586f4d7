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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.errors import first_line
from mprun.inspect.divergence.boundaries import (
    Boundaries,
    OpError,
    OpErrors,
    Place,
    Recording,
    Results,
    calls_followed,
    floating,
    run_forced,
    true_outputs,
)
from mprun.inspect.passes import ready
from mprun.inspect.rounding_oracle import SideError, boundary_error
from mprun.precision._torch import is_compiled, original_module
from mprun.precision.apply import call
from mprun.precision.formats import BLOCK_FORMATS
from mprun.precision.nested import copied_model, map_tensors
from mprun.records.console.fitted_table import FittedTable, figure_column, text_column

SEED = 0  # Of all passes, so that both sides draw the same random numbers
SHOWN = 12  # Rows of a printed table; diff.json has all
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


@dataclass(frozen=True)
class Difference:
    """Where two models part; printed, it is a table."""

    rows: tuple[DifferenceRow, ...]
    """In the order they ran: the forward pass, then the backward pass."""
    ops: tuple[tuple[OpError, ...], tuple[OpError, ...]]
    """The ops of either side."""
    losses: tuple[float, float]
    notes: tuple[str, ...] = ()

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
    return f"first: {where}: in {side} {error.sentence}"


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

    def record(self, side: Side) -> Recording:
        """A step of a side, forward and backward; of a compiled one the model's own boundary."""
        plain, boundaries = original_module(side.model), Boundaries(side.low)
        # hooks inside a compiled model would break its graph, and so change what is compared
        followed = [("", side.model)] if side.is_compiled else plain.named_modules()
        with ready(plain, SEED), calls_followed(followed, boundaries.begin, boundaries.end):
            loss = self._take(side, boundaries.end_forward)
            named = dict(plain.named_parameters())
            return Recording(
                boundaries.ended,
                {n: p.grad.detach().clone() for n, p in named.items() if p.grad is not None},
                {n: p.detach() for n, p in named.items()},
                dict(plain.named_buffers()),
                loss,
            )

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
    # one reference for both: with a copy of its own each side's fault would be in its reference
    return compare(capture(step, first, reference), capture(step, second, reference), notes)


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
    recording = step.record(side)
    twin = reference or _float64_of((side,))[0]
    calls = _calls(step, side, recording, twin, passes)
    return Captured(calls=calls, ops=step.ops(side), loss=recording.loss, compiled=side.is_compiled)


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
    for name, side in (("a", a), ("b", b)):
        if side.compiled:
            yield f"{name} is compiled: only the model's own inputs, outputs and gradients are seen"
    first, second = ({(x.module, x.call) for x in side.calls} for side in (a, b))
    only = first ^ second
    if only and not (a.compiled or b.compiled):
        shown = ", ".join(sorted({path or "the model" for path, _ in only})[:3])
        yield f"a call that only one side has counts as code of its caller: {shown}"
