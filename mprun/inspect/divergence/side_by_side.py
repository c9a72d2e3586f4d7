"""The errors of two sides of a model with their bounds, and the first that is beyond.

    print(mprun.diff(model, copy.deepcopy(model).bfloat16(), batch))

`difference.py` has the columns. The bound is that of the call's dtype: bfloat16 under autocast is
no finding, and a float32 module that rounds to bfloat16 inside is one. A linear layer whose
products have a format of 8 bits or fewer (`precision=mxfp8`) has the bound of that format.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.errors import first_line
from mprun.inspect.divergence.boundaries import (
    Place,
    Recording,
    floating,
    op_errors,
    record,
    relative_rms,
    rms,
)
from mprun.inspect.divergence.difference import (
    CapturedCall,
    CaptureRecord,
    Difference,
    DifferenceRow,
    OpError,
    SideError,
    error_ratio,
)
from mprun.inspect.divergence.forced_run import run_forced, true_outputs
from mprun.inspect.passes import ready
from mprun.precision._torch import is_compiled, original_module
from mprun.precision.apply import call
from mprun.precision.formats import BLOCK_FORMATS
from mprun.precision.nested import map_tensors

SEED = 0  # Of all passes, so that both sides draw the same random numbers


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

    Args:
        forward: `forward(model, inputs)`, the output.
        inputs: floating tensors are brought to each side's dtype.
        loss: `loss(output)`, a scalar; None for that of `own_loss`.
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

    def exactly(self, side: Side) -> Callable[[nn.Module], Any]:
        """Runs a float64 model on the device of a side."""
        return partial(self.run, side.device, torch.float64)

    def record(self, side: Side) -> Recording:
        """A step of a side."""
        run = partial(self.run, side.device, side.dtype, side.model)
        with ready(original_module(side.model), SEED):
            return record(side.model, run, self._loss, side.around(), side.low)

    def ops(self, side: Side) -> list[OpError]:
        """The ops of a side; none of a compiled one."""
        if side.is_compiled:
            return []

        def step() -> None:
            with side.around():
                output = self.run(side.device, side.dtype, side.model)
            self._loss(output).backward()

        with ready(side.model, SEED):
            return op_errors(side.model, step)


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


# By how much an own error may exceed the largest of the rounded passes. The sums inside a kernel of
# float32 are not rounded there: up to sqrt(K) units for K terms (Higham, Accuracy and Stability of
# Numerical Algorithms, chapter 4), and 64 are enough for 4096 terms.
MARGINS = {torch.float32: 64.0, torch.float64: 64.0}
MARGIN = 4.0  # Of 16-bit dtypes, whose kernels add up in float32
BLOCK_NAMES = {form.name for form in BLOCK_FORMATS}
FORMAT_MARGIN = 2.0  # Of formats of 8 bits or fewer: four times their steps would allow anything


def diff(
    a: nn.Module | Side,
    b: nn.Module | Side,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Difference:
    """Find where two models part on the same batch, and which module is the first.

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
    sides = [x if isinstance(x, Side) else Side(x) for x in (a, b)]
    if loss is None:
        return diff_sides(SharedStep(call, batch), *sides)
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise ValueError("with loss, batch is a pair: inputs and target")
    inputs, target = batch
    return diff_sides(SharedStep(call, inputs, lambda output: loss(output, target)), *sides)


def diff_sides(step: SharedStep, a: Side, b: Side) -> Difference:
    """`diff` for a step of any form."""
    reference, notes = _float64_of((a, b))
    # one reference for both: with a copy of its own each side's fault would be in its reference
    return compare(capture(step, a, reference), capture(step, b, reference), notes)


class Captured(NamedTuple):
    """What a comparison needs of a side."""

    calls: list[CapturedCall]
    ops: list[OpError]
    loss: float
    compiled: bool


def capture(
    step: SharedStep,
    side: Side,
    reference: nn.Module | None = None,
    passes: int = 1,
) -> Captured:
    """Each module's own errors on one side.

    Args:
        step: its step.
        side: the side.
        reference: a float64 copy of a model with the same modules; None: of the side's own.
        passes: rounded passes; the bound is a multiple of the largest of their errors.
    """
    recording = step.record(side)
    twin = reference or _float64_of((side,))[0]
    calls = list(_calls(_SideResults(step, side, recording, twin, passes)))
    return Captured(calls, step.ops(side), recording.loss, side.is_compiled)


def compare(
    a: Captured | CaptureRecord, b: Captured | CaptureRecord, notes: Sequence[str] = ()
) -> Difference:
    """Two sides beside each other."""
    ops = (tuple(a.ops), tuple(b.ops))
    rows = tuple(_with_op(row, ops) for row in _rows(a.calls, b.calls))
    return Difference(rows, ops, (a.loss, b.loss), (*notes, *_notes(a, b)))


def _float64_of(sides: Sequence[Side]) -> tuple[nn.Module, list[str]]:
    """A float64 copy of the first side that can be copied, and why another could not."""
    reasons: list[str] = []
    for side in sides:
        try:
            twin = copy.deepcopy(original_module(side.model)).double()  # tied weights stay tied
            return twin, reasons
        except Exception as error:  # a model may refuse to be copied in any way
            reasons.append(f"{type(side.model).__name__} cannot be copied: {first_line(error)}")
    raise ValueError("; ".join(reasons))


class _SideResults:
    """A side's numbers beside float64's."""

    def __init__(
        self, step: SharedStep, side: Side, recording: Recording, twin: nn.Module, passes: int
    ) -> None:
        self.recording = recording
        run = step.exactly(side)
        with ready(twin, SEED):
            self.exact = run_forced(twin, recording, run, rounded=False)
            self.true = true_outputs(twin, recording, run)
        self.rounded = []
        for n in range(passes):
            # other seeds than the side's: dtypes may draw different random numbers from one seed
            with ready(twin, SEED + 1 + n):
                self.rounded.append(run_forced(twin, recording, run, rounded=True, seed=n))


def _calls(side: _SideResults) -> Iterator[CapturedCall]:
    """The calls of a side, with their errors."""
    boundaries = side.recording.boundaries
    places = [place for place in boundaries if place in side.exact.outputs]
    for phase, numbers, ordered in (
        ("forward", _forward, places),
        ("backward", _backward, places[::-1]),
    ):
        for place in ordered:
            errors = {k: _error(side, place, x) for k, x in numbers(side, place).items()}
            yield CapturedCall(phase, *place, boundaries[place].kind, errors)


def _rows(a: Sequence[CapturedCall], b: Sequence[CapturedCall]) -> Iterator[DifferenceRow]:
    """The rows of the calls that both sides have, in the first one's order."""
    others = {(x.phase, x.module, x.call): x.errors for x in b}
    for x in a:
        theirs = others.get((x.phase, x.module, x.call), {})
        pairs = [(what, x.errors[what], theirs[what]) for what in x.errors if what in theirs]
        if pairs:
            worst = max(pairs, key=lambda p: (max(error_ratio(p[1]), error_ratio(p[2])), p[0]))
            yield DifferenceRow(x.phase, x.module, x.call, x.kind, *worst)


# A side's tensor, the exact one, those rounded to the dtype, and the true one
Quadruple = tuple[Tensor, Tensor, list[Tensor], Tensor | None]
Numbers = dict[str, Quadruple]  # By name


def _forward(side: _SideResults, place: Place) -> Numbers:
    theirs = side.recording.boundaries[place].outputs
    rounded = zip(*(r.outputs[place] for r in side.rounded), strict=False)
    rows = zip(theirs, side.exact.outputs[place], rounded, strict=False)
    true = side.true.get(place, [])
    return {
        f"output {n}": (x, y, [*z], true[n] if n < len(true) else None)
        for n, (x, y, z) in enumerate(rows)
        if {x.shape} == {y.shape, *(each.shape for each in z)}
    }


def _backward(side: _SideResults, place: Place) -> Numbers:
    rounded = [r.gradients.get(place, {}) for r in side.rounded]
    rows: Numbers = {
        f"gradient at {name}": (theirs, x, [r[name][0] for r in rounded], None)
        for name, (x, theirs) in side.exact.gradients.get(place, {}).items()
        if all(name in r for r in rounded)
    }
    path = place[0]
    for name, x in side.exact.parameters.items():
        if name.rpartition(".")[0] == path and name in side.recording.gradients:
            theirs = side.recording.gradients[name]
            rows[f"gradient of {name.rpartition('.')[2]}"] = (
                theirs,
                x,
                [r.parameters[name] for r in side.rounded],
                None,
            )
    return rows


def _error(side: _SideResults, place: Place, numbers: Quadruple) -> SideError:
    theirs, exact = (x.double().cpu() for x in numbers[:2])
    true = None if numbers[3] is None else numbers[3].double().cpu()
    largest = max(relative_rms(x.double().cpu(), exact) for x in numbers[2])
    boundary = side.recording.boundaries[place]
    margin = MARGINS.get(boundary.dtype, MARGIN) if boundary.format is None else FORMAT_MARGIN
    scale = rms(exact)
    # half a unit at least: a rounded pass may be exact by chance
    explained = margin * max(largest, boundary.half_step)
    return SideError(
        dtype=boundary.rounding,
        arising=relative_rms(theirs, exact),
        inherited=0.0 if true is None or true.shape != exact.shape else relative_rms(exact, true),
        bias=float((theirs - exact).mean()) / scale if scale and theirs.numel() else 0.0,
        explained=explained,
    )


def _with_op(row: DifferenceRow, ops: tuple[Sequence[OpError], ...]) -> DifferenceRow:
    """The row with the op that has the largest error in its module, if it is beyond its bound."""
    if row.is_explained:
        return row
    worse, own = max((row.a, ops[0]), (row.b, ops[1]), key=lambda side: error_ratio(side[0]))
    if worse.dtype in BLOCK_NAMES:  # the ops inside are those of its emulation
        return replace(row, op="linear")
    inside = [x for x in own if x.phase == row.phase and x.module == row.module]
    if not inside:
        inside = [x for x in own if x.phase == row.phase and x.module.startswith(f"{row.module}.")]
    largest = max(inside, key=lambda x: x.error, default=None)
    if largest is None or largest.error == 0:
        return row
    return replace(row, op=largest.op)


def _notes(a: Captured | CaptureRecord, b: Captured | CaptureRecord) -> Iterator[str]:
    for name, side in (("a", a), ("b", b)):
        if side.compiled:
            yield f"{name} is compiled: only the model's own inputs, outputs and gradients are seen"
    first, second = ({(x.module, x.call) for x in side.calls} for side in (a, b))
    only = first ^ second
    if only and not (a.compiled or b.compiled):
        shown = ", ".join(sorted({path or "the model" for path, _ in only})[:3])
        yield f"a call that only one side has counts as code of its caller: {shown}"
