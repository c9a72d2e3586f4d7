"""Each module's own code in float64, on the same numbers that a side gave it.

An error at a module's output is inherited from its inputs, or is its own. To separate them, a
float64 copy of the model runs with every boundary forced: a module gets the inputs that the side
gave it, and its caller gets the outputs that the side's module returned. What the copy computes in
between is the module's own code without rounding, and its difference from the side's numbers is the
module's own error. One pass gives this for all modules.

The forced tensors are leaves, so the graph of the copy has a part of its own for each call. A call
goes backward from the gradients that the side had at its ends, and its results are compared with
those that the side had at its starts and at its parameters.

Run once more with results rounded to the dtype of each call, and its inputs moved at random by up
to half a unit, the same calls show how large errors of rounding are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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


@dataclass
class ForcedCall:
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


def run_forced(
    twin: nn.Module,
    side: Recording,
    run: Callable[[nn.Module], object],
    rounded: bool,
    seed: int = 0,
) -> Results:
    """Run each module's own code on a side's numbers.

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
    """`x` in float64, each number moved at random by up to this share of itself.

    This models sums that cancel: rounding their result to nearest does not show what they lose.
    """
    # the number of elements is part of the seed: tensors of one size are moved alike
    generator = torch.Generator().manual_seed(x.numel() + (seed << 40))
    share = torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return x.double() * (1 + share.to(x.device) * most)


class _ForcedRun:
    def __init__(self, side: Recording, exact: Exact, rounded: bool, seed: int) -> None:
        self._side, self._exact, self._rounded, self._seed = side, exact, rounded, seed
        self._calls: Counter[str] = Counter()
        self._open: list[ForcedCall | None] = []
        self._forced: list[ForcedCall] = []

    def begin(self, path: str, module: nn.Module, arguments: Any) -> Any:
        """A module is called: the arguments that the side gave it, as leaves of its graph."""
        boundary = self._side.boundaries.get((path, self._calls[path]))
        self._calls[path] += 1
        given = floating(arguments)
        if boundary is None or len(given) != len(boundary.inputs):
            self._open.append(None)  # the side has no such call: its code belongs to the caller
            return None
        caller = self._caller()
        if caller is not None:
            caller.ends += [(x, boundary.input_gradients.get(n)) for n, x in enumerate(given)]
        call = ForcedCall(boundary)
        self._open.append(call)
        self._forced.append(call)
        self._enter(call)
        return self._replaced(arguments, boundary.inputs, boundary.input_gradients, call, "input")

    def end(self, path: str, output: Any) -> Any:
        """It returned: the outputs that the side had, as leaves of the caller's graph."""
        call = self._open.pop()
        if call is None:
            return None
        boundary, given = call.boundary, floating(output)
        call.outputs = [x.detach().clone() for x in given]
        call.ends += [(x, boundary.output_gradients.get(n)) for n, x in enumerate(given)]
        caller = self._caller()
        self._enter(caller)
        name = f"output of {boundary.place[0] or 'the model'}"
        return self._replaced(output, boundary.outputs, boundary.output_gradients, caller, name)

    def _caller(self) -> ForcedCall | None:
        return next((call for call in reversed(self._open) if call is not None), None)

    def _enter(self, call: ForcedCall | None) -> None:
        if self._rounded and call is not None:
            self._exact.dtype = call.boundary.dtype  # ops that follow are rounded to it

    def _replaced(
        self,
        value: Any,
        numbers: list[Tensor],
        gradients: dict[int, Tensor],
        reader: ForcedCall | None,
        name: str,
    ) -> Any:
        """`value` with the side's numbers, as leaves of the call that reads them."""
        count = -1

        def leaf(x: Tensor) -> Tensor:
            nonlocal count
            if not x.is_floating_point():
                return x
            count += 1
            if count >= len(numbers) or numbers[count].shape != x.shape:
                return x  # float64 took another path: its own numbers go on
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
        """Go backward through each call, the last one first."""
        outputs = {call.boundary.place: call.outputs for call in self._forced}
        gradients: dict[Place, dict[str, tuple[Tensor, Tensor]]] = {}
        total: dict[str, Tensor] = {}
        for call in reversed(self._forced):
            self._enter(call)
            rows = gradients.setdefault(call.boundary.place, {})
            for name, computed, theirs in self._backward(call, parameters):
                if theirs is not None:
                    rows[name] = (computed, theirs)
                elif name in parameters:
                    total[name] = total[name] + computed if name in total else computed
        return Results(outputs, gradients, total)

    def _backward(
        self, call: ForcedCall, parameters: dict[str, nn.Parameter]
    ) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """The gradients at the starts and parameters of a call, with the side's at the starts."""
        ends = [(x, g) for x, g in call.ends if g is not None and x.requires_grad]
        if not ends:
            return
        starts = [(name, x, g) for name, x, g in call.starts if g is not None]
        trained = [(name, p, None) for name, p in parameters.items() if p.requires_grad]
        wanted: list[tuple[str, Tensor, Tensor | None]] = [*starts, *trained]
        most = call.boundary.half_step
        sent = [moved(g, most, self._seed) if self._rounded else g.double() for _, g in ends]
        computed = torch.autograd.grad(
            [x for x, _ in ends],
            [x for _, x, _ in wanted],
            [g.to(x.device) for g, (x, _) in zip(sent, ends, strict=True)],
            allow_unused=True,
            retain_graph=True,  # calls share the graph of weights that are computed once
        )
        for (name, _, theirs), x in zip(wanted, computed, strict=True):
            if x is not None:
                yield name, x.detach(), theirs


def true_outputs(
    twin: nn.Module, recording: Recording, run: Callable[[nn.Module], object]
) -> dict[Place, list[Tensor]]:
    """The outputs of each call of a pass in float64, from the batch on.

    Args:
        twin: as in `run_forced`.
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
