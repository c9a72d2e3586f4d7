"""Each module's own code in float64, on the very numbers that a side gave it.

An error at a module's output is inherited from its inputs, or arises in it. To tell them apart, a
float64 copy of the model runs with every boundary forced: a module gets the inputs that the side
gave it, and its caller gets the outputs that the side's module returned. What the copy computes in
between is the module's own code without rounding, and its difference from the side's numbers is
the error that arose there. One pass gives this for all modules.

The forced tensors are leaves, so the graph of the copy falls into pieces, one for each call. A
piece goes backward from the gradients that the side had at its ends, and its results are compared
with those that the side had at its other ends and at its parameters.

Run once more with results rounded to the dtype of each call, and what a piece reads moved at
random by up to half a unit of it, the pieces show which errors that dtype explains. Moving what is
read models sums that cancel: rounding their result to nearest does not show what they lose.

The result, `Difference`, has a row for each module and pass, with the errors of both sides, and
names the first that the dtypes do not explain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mprun.inspect.diff_result import OpError, SideError
from mprun.inspect.divergence.boundaries import (
    Boundary,
    Exact,
    Place,
    Recording,
    calls_followed,
    exact_arithmetic,
    floating,
    set_values,
)
from mprun.precision.nested import map_tensors
from mprun.records.console.fitted_table import FittedTable, figure_column, text_column


@dataclass
class Piece:
    """A module's own code of one call, between its boundary and those of its children."""

    boundary: Boundary
    starts: list[tuple[str, Tensor, Tensor | None]] = field(default_factory=list)
    """What it reads: a name, a leaf, and the side's gradient there (None: nothing arrived)."""
    ends: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    """What it computes: a tensor, and the side's gradient there."""
    outputs: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Results:
    """What float64 makes of a side's numbers."""

    outputs: dict[Place, list[Tensor]]  # What each call's own code computes
    gradients: dict[Place, dict[str, tuple[Tensor, Tensor]]]
    """Call to the gradients that its backward pass computes, by name, each with the side's."""
    parameters: dict[str, Tensor]
    """The gradients of the parameters: sums over the calls that use them."""


def forced(
    twin: nn.Module,
    side: Recording,
    run: Callable[[nn.Module], object],
    rounded: bool,
    seed: int = 0,
) -> Results:
    """Run the pieces of a side.

    Args:
        twin: a float64 copy of the model; it gets the side's parameters and buffers.
        side: the recording.
        run: calls the copy, with any floating numbers.
        rounded: round to the dtype of each call.
        seed: of the random moves.
    """
    set_values(twin, {**side.parameters, **side.buffers})
    if rounded:
        _move_parameters(twin, side, seed)
    with exact_arithmetic(twin) as exact:
        forcing = _ForcedRun(side, exact, rounded, seed)
        with calls_followed(twin.named_modules(), forcing.begin, forcing.end):
            run(twin)
        return forcing.results(dict(twin.named_parameters()))


def _move_parameters(twin: nn.Module, side: Recording, seed: int) -> None:
    steps = {boundary.place[0]: boundary.half_step for boundary in side.boundaries.values()}
    for path, module in twin.named_modules():
        for p in module.parameters(recurse=False):
            if path in steps:
                p.data = moved(p.data, steps[path], seed)


def moved(x: Tensor, most: float, seed: int = 0) -> Tensor:
    """`x` in float64, each number moved at random by up to this share of itself."""
    generator = torch.Generator().manual_seed(x.numel() + (seed << 40))
    share = torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return x.double() * (1 + share.to(x.device) * most)


class _ForcedRun:
    def __init__(self, side: Recording, exact: Exact, rounded: bool, seed: int) -> None:
        self._side, self._exact, self._rounded, self._seed = side, exact, rounded, seed
        self._calls: Counter[str] = Counter()
        self._open: list[Piece | None] = []
        self._pieces: list[Piece] = []

    def begin(self, path: str, module: nn.Module, arguments: Any) -> Any:
        """A module is called: the arguments that the side gave it, as leaves of its piece."""
        boundary = self._side.boundaries.get((path, self._calls[path]))
        self._calls[path] += 1
        given = floating(arguments)
        if boundary is None or len(given) != len(boundary.inputs):
            self._open.append(None)  # the side has no such call: its code belongs to the caller
            return None
        caller = self._caller()
        if caller is not None:
            caller.ends += [(x, boundary.input_gradients.get(n)) for n, x in enumerate(given)]
        piece = Piece(boundary)
        self._open.append(piece)
        self._pieces.append(piece)
        self._enter(piece)
        return self._replaced(arguments, boundary.inputs, boundary.input_gradients, piece, "input")

    def end(self, path: str, output: Any) -> Any:
        """It returned: the outputs that the side had, as leaves of the caller's piece."""
        piece = self._open.pop()
        if piece is None:
            return None
        boundary, given = piece.boundary, floating(output)
        piece.outputs = [x.detach().clone() for x in given]
        piece.ends += [(x, boundary.output_gradients.get(n)) for n, x in enumerate(given)]
        caller = self._caller()
        self._enter(caller)
        name = f"output of {boundary.place[0] or 'the model'}"
        return self._replaced(output, boundary.outputs, boundary.output_gradients, caller, name)

    def _caller(self) -> Piece | None:
        return next((piece for piece in reversed(self._open) if piece is not None), None)

    def _enter(self, piece: Piece | None) -> None:
        if self._rounded and piece is not None:
            self._exact.dtype = piece.boundary.dtype

    def _replaced(
        self,
        value: Any,
        numbers: list[Tensor],
        gradients: dict[int, Tensor],
        reader: Piece | None,
        name: str,
    ) -> Any:
        """`value` with the side's numbers, as leaves of the piece that reads them."""
        count = -1

        def leaf(x: Tensor) -> Tensor:
            nonlocal count
            if not x.is_floating_point():
                return x
            count += 1
            if count >= len(numbers) or numbers[count].shape != x.shape:
                return x
            wide = numbers[count].to(x.device).double()
            if self._rounded and reader is not None:
                wide = moved(wide, reader.boundary.half_step, self._seed)
            forced = wide.requires_grad_()
            if reader is not None:
                which = f"{name}, tensor {count}" if count else name
                reader.starts.append((which, forced, gradients.get(count)))
            return forced.clone()  # a module may change its input in place

        return map_tensors(leaf, value)

    def results(self, parameters: dict[str, nn.Parameter]) -> Results:
        """Go backward through each piece, the last call first."""
        outputs = {piece.boundary.place: piece.outputs for piece in self._pieces}
        gradients: dict[Place, dict[str, tuple[Tensor, Tensor]]] = {}
        total: dict[str, Tensor] = {}
        for piece in reversed(self._pieces):
            self._enter(piece)
            rows = gradients.setdefault(piece.boundary.place, {})
            for name, computed, theirs in self._backward(piece, parameters):
                if theirs is not None:
                    rows[name] = (computed, theirs)
                elif name in parameters:
                    total[name] = total[name] + computed if name in total else computed
        return Results(outputs, gradients, total)

    def _backward(
        self, piece: Piece, parameters: dict[str, nn.Parameter]
    ) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """The gradients at the starts and parameters of a piece, with the side's at the starts."""
        ends = [(x, g) for x, g in piece.ends if g is not None and x.requires_grad]
        if not ends:
            return
        starts = [(name, x, g) for name, x, g in piece.starts if g is not None]
        trained = [(name, p, None) for name, p in parameters.items() if p.requires_grad]
        wanted: list[tuple[str, Tensor, Tensor | None]] = [*starts, *trained]
        most = piece.boundary.half_step
        sent = [moved(g, most, self._seed) if self._rounded else g.double() for _, g in ends]
        computed = torch.autograd.grad(
            [x for x, _ in ends],
            [x for _, x, _ in wanted],
            [g.to(x.device) for g, (x, _) in zip(sent, ends, strict=True)],
            allow_unused=True,
            retain_graph=True,
        )
        for (name, _, theirs), x in zip(wanted, computed, strict=True):
            if x is not None:
                yield name, x.detach(), theirs


def true_outputs(
    twin: nn.Module, recording: Recording, run: Callable[[nn.Module], object]
) -> dict[Place, list[Tensor]]:
    """The outputs of each call of a pass in float64, from the batch on.

    Args:
        twin: as in `forced`.
        recording: the side whose parameters it gets.
        run: calls the copy in float64.
    """
    set_values(twin, {**recording.parameters, **recording.buffers})
    calls: Counter[str] = Counter()
    outputs: dict[Place, list[Tensor]] = {}

    def begin(path: str, module: nn.Module, arguments: Any) -> None:
        pass

    def end(path: str, output: Any) -> None:
        outputs[path, calls[path]] = [x.detach().clone() for x in floating(output)]
        calls[path] += 1

    with calls_followed(twin.named_modules(), begin, end), torch.no_grad(), exact_arithmetic(twin):
        run(twin)
    return outputs


SHOWN = 12  # Rows of a printed table


@dataclass(frozen=True)
class DifferenceRow:
    """A module's own code in one pass."""

    phase: str
    """forward or backward."""
    module: str
    """A name of `named_modules()`; empty for the model itself."""
    call: int
    """The number of the module's call, from 0."""
    kind: str
    """The module's class."""
    what: str
    """Where the error is the furthest from what its dtype explains: an output, the gradient at an
    input, or a parameter's gradient."""
    a: SideError
    b: SideError
    op: str = ""
    """Of a row that is not explained: the op with the largest error, if ops are visible."""

    @property
    def is_explained(self) -> bool:
        """Whether the dtypes explain both sides' errors."""
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
        """The first row that the dtypes do not explain, and in which the sides differ."""
        return next((row for row in self.rows if not row.is_explained and _part(row)), None)

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
    table = FittedTable(
        "",
        text_column("pass", 3),
        text_column("module"),
        text_column("what", 4),
        figure_column("arises in a"),
        figure_column("in b"),
        figure_column("inherited a", 1),
        figure_column("b", 1),
        text_column(""),
        elsewhere="diff.json",
    )
    for row in rows:
        table.add_row(
            row.phase,
            (row.module or "the model") + (f" #{row.call}" if row.call else ""),
            row.what,
            *(f"{x:.1e}" for x in (row.a.arising, row.b.arising)),
            *(f"{x:.1e}" for x in (row.a.inherited, row.b.inherited)),
            "" if row.is_explained else "not explained",
        )
    if left_out:
        table.caption = f"({left_out} rows with smaller errors are not shown)"
    return table


def _conclusion(first: DifferenceRow | None) -> str:
    if first is None:
        return "no error is larger than its dtype explains"
    side, error = ("a", first.a) if excess(first.a) >= excess(first.b) else ("b", first.b)
    op = f", op {first.op}" if first.op else ""
    return (
        f"first: {first.module or 'the model'} ({first.kind}), {first.phase}{op}: an error of "
        f"{error.arising:.1e} arises in {side}; {error.dtype} explains {error.explained:.1e}"
    )


def excess(error: SideError) -> float:
    """How many times as large as explained the arising error is."""
    if error.arising == 0:
        return 0.0
    return error.arising / error.explained if error.explained else float("inf")


def _part(row: DifferenceRow) -> bool:
    """Whether one side's excess is larger than the other's by a factor of 2."""
    low, high = sorted((excess(row.a), excess(row.b)))
    return high > 2 * low
