"""One step of a model as numbers: at its modules' boundaries, in float64, and in its ops.

*Boundaries.* A tensor may be used by several modules, and its gradient is the sum of theirs. So
each module gets an alias of its inputs, and hands on an alias of its outputs: the gradient at an
alias is what went through this module alone.

*Forced runs.* An error at an output is inherited from the inputs, or is the module's own. So a
float64 copy of the model runs with every boundary forced: a module gets the inputs that the side
gave it, and its caller gets the outputs that the side's module returned. What the copy computes in
between is the module's own code without rounding. Forced tensors are leaves, so each call has a
graph of its own; it goes backward from the gradients that the side had at its ends. Once more with
results rounded and inputs moved by up to half a unit, it shows how large errors of rounding are.

*Ops.* An op's result is compared with the same op in float64 on the same inputs.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.inspect.passes import in_float64
from mprun.inspect.rounding_oracle import half_step, relative_rms
from mprun.precision import _torch
from mprun.precision.formats import BlockFormat
from mprun.precision.gemms import formats_of
from mprun.precision.nested import all_tensors, map_tensors, tensors_in
from mprun.precision.policy import dtype_name
from mprun.watch.op_watcher import (
    OpCall,
    OpWatcher,
    RunOp,
    current_line,
    op_spec,
    recomputed,
    written_arguments,
)

LOWEST_FIRST = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # Fewest bits first
Place = tuple[str, int]  # The path of a module, and the number of the call, from 0


@dataclass
class Boundary:
    """One call of a module: its floating tensors, and the gradients at them."""

    place: Place
    kind: str  # The module's class
    dtype: torch.dtype
    """The one with the fewest bits that the call was given: by autocast, inputs or parameters."""
    format: BlockFormat | None
    """Of a linear layer's products, the one with the fewest bits; None: they are in `dtype`."""
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    input_gradients: dict[int, Tensor] = field(default_factory=dict)
    """By the number of the input; those that the backward pass reached."""
    output_gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def rounding(self) -> torch.dtype | BlockFormat:
        """The format, or else the dtype."""
        return self.dtype if self.format is None else self.format

    @property
    def half_step(self) -> float:
        """By which share of itself rounding moves a number at most."""
        return half_step(self.rounding)


@dataclass
class Recording:
    """A step of one side."""

    boundaries: dict[Place, Boundary]
    """In the order in which the calls ended; the model's own call is the last one."""
    gradients: dict[str, Tensor]  # Of the parameters, by name
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    loss: float
    kernels: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Of compiled code: the kernel of a tensor and its lines of source, by `compiled.named`."""


@contextmanager
def calls_followed(
    modules: Iterable[tuple[str, nn.Module]],
    begin: Callable[[str, nn.Module, Any], Any],
    end: Callable[[str, Any], Any],
) -> Iterator[None]:
    """Follow the calls of modules, but for those inside of `torch.func` and of the backward pass.

    What `begin` returns takes the place of the pair of positional and named arguments, and what
    `end` returns that of the output, where it is not None.
    """

    def is_left_out() -> bool:  # checkpointing calls modules again in the backward pass
        return _torch.in_backward() or _torch.in_transform()

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if is_left_out() else begin(path, module, (args, kwargs))

    def after(path: str, module: nn.Module, args: Any, output: Any) -> Any:
        return None if is_left_out() else end(path, output)

    with ExitStack() as stack:
        for path, module in modules:
            begins, ends = partial(before, path), partial(after, path)
            stack.enter_context(module.register_forward_pre_hook(begins, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(ends))
        yield


class Boundaries:
    """Notes calls of modules; `low`: the dtype that a region around them casts to."""

    def __init__(self, low: torch.dtype | None) -> None:
        self._low = low
        self.ended: dict[Place, Boundary] = {}
        self._open: list[Boundary] = []
        self._calls: Counter[str] = Counter()
        self._is_over = False
        self._began: dict[Place, int] = {}
        """Calls to how many had ended when they began."""
        self._derived: set[Place] = set()
        """Calls whose code took a derivative."""

    def begin(self, path: str, module: nn.Module, arguments: Any) -> Any:
        """A module is called; aliases of its arguments."""
        inputs = floating(arguments)
        place = (path, self._calls[path])
        self._calls[path] += 1
        plain = _torch.original_module(module)
        boundary = Boundary(  # before the call: it may change its inputs in place
            place,
            type(plain).__name__,
            given_dtype(module, inputs, self._low),
            max(formats_of(plain), key=lambda f: f.half_step, default=None),
            [_copied(x) for x in inputs],
        )
        self._open.append(boundary)
        self._began[place] = len(self.ended)
        return aliased(arguments, boundary.input_gradients, self._on_gradient)

    def end(self, path: str, output: Any) -> Any:
        """It returned; an alias of its output."""
        boundary = self._open.pop()
        boundary.outputs = [_copied(x) for x in floating(output)]
        if boundary.place in self._derived:
            first = self._began[boundary.place]
            inside = [x.format for x in [*self.ended.values()][first:] if x.format is not None]
            # the code of these calls is its own now
            boundary.format = max(inside, key=lambda f: f.half_step, default=boundary.format)
            self._drop(first)
        self.ended[boundary.place] = boundary
        return aliased(output, boundary.output_gradients, self._on_gradient)

    def end_forward(self) -> None:
        """The loss is there: gradients that follow are those of the step."""
        self._is_over = True

    def _on_gradient(self) -> None:
        """A gradient arrives: before the loss it is that of a derivative which the model takes.

        The calls in between are then code of their caller: a boundary would cut its graph.
        """
        if self._is_over:
            return
        if self._open:
            self._derived.add(self._open[-1].place)
        else:  # taken by the recipe: there is no call around it
            self._drop(0)

    def _drop(self, first: int) -> None:
        for place in [*self.ended][first:]:
            del self.ended[place]


def floating(value: Any) -> list[Tensor]:
    """The floating tensors in a nested value, in order."""
    return [x for x in all_tensors(value) if x.is_floating_point()]


def _copied(x: Tensor) -> Tensor:
    """A copy: a later op may change the tensor in place."""
    return x.detach().clone()


def numbered(value: Any, change: Callable[[int, Tensor], Tensor]) -> Any:
    """`value` with another tensor for each floating one, which is made of its number and itself."""
    numbers = count()
    return map_tensors(lambda x: change(next(numbers), x) if x.is_floating_point() else x, value)


def aliased(value: Any, gradients: dict[int, Tensor], arrived: Callable[[], None]) -> Any:
    """`value` with an alias for each floating tensor; `gradients` gets what arrives at them."""

    def alias(number: int, x: Tensor) -> Tensor:
        # A leaf may be handed on to differentiate by: an alias of it would be no part of the graph
        if not x.requires_grad or x.is_leaf:
            return x
        same = x.view_as(x)  # shares the memory, so no number changes

        def note(g: Tensor) -> None:
            gradients[number] = g.detach().clone()
            arrived()

        same.register_hook(note)
        return same

    return numbered(value, alias)


def given_dtype(
    module: nn.Module, inputs: Sequence[Tensor], low: torch.dtype | None = None
) -> torch.dtype:
    """The dtype with the fewest bits among autocast's or `low`, the inputs' and the parameters'."""
    own = [p.dtype for p in module.parameters() if p.is_floating_point()]
    dtypes = [*own, *(x.dtype for x in inputs), *([] if low is None else [low])]
    device = next((x.device for x in (*inputs, *module.parameters())), torch.device("cpu"))
    if torch.is_autocast_enabled(device.type):
        dtypes.append(torch.get_autocast_dtype(device.type))
    known = [x for x in LOWEST_FIRST if x in dtypes]
    return known[0] if known else torch.float32  # a module of integers alone, or of nothing


# Ops that make no new number
COPIES = ("_to_copy", "to", "clone", "copy_", "alias", "detach", "lift_fresh")


def set_values(twin: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a float64 copy the values of these names, where it has them in the same shape."""
    own: dict[str, Tensor] = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    for name, value in values.items():
        if name in own and own[name].shape == value.shape:
            own[name].data = value.detach().to(own[name].device, own[name].dtype, copy=True)


class Exact(_torch.DispatchMode):
    """Casts return float64: a rounding that the code asks for is an error of that code here.

    Results are rounded to `dtype`, where it is not None: the error of such a pass is one that the
    dtype makes, cancellation and the growth of errors included, for which there is no formula. Sums
    inside a kernel are not rounded. Enter it with `exact_arithmetic`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = _torch.op_name(func)
        dtype = kwargs.get("dtype")
        # of a cast, of `zeros(dtype=...)` or of `sum(dtype=...)`
        if dtype is not None and dtype.is_floating_point and not dtype.is_complex:
            kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
        if self.dtype is None or name in COPIES or not op_spec(func).makes_numbers:
            return result
        if _torch.has_zeros(func, args):
            return result
        with _torch.no_dispatch(), torch.no_grad():
            return map_tensors(self._rounded, result)

    def _rounded(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64 and self.dtype is not None:
            return x.copy_(x.to(self.dtype))  # in place: an op may return one of its arguments
        return x


@contextmanager
def exact_arithmetic(twin: nn.Module) -> Iterator[Exact]:
    """Inside, a float64 copy computes without casts; set `dtype` of the result to round."""
    exact = Exact()
    # the caller's autocast region would cast float64 down
    with in_float64(twin), torch.autocast("cpu", enabled=False), exact:
        yield exact


# ---- each module's own code in float64 -----------------------------------------------------------


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

    `twin` is a float64 copy of the model, which gets the side's parameters and buffers; `run` calls
    it with any floating numbers. `rounded`: to the dtype of each call, with random moves.
    """
    set_values(twin, {**side.parameters, **side.buffers})
    if rounded:
        steps = {boundary.place[0]: boundary.half_step for boundary in side.boundaries.values()}
        for path, module in twin.named_modules():
            for p in module.parameters(recurse=False):
                if path in steps:
                    p.data = moved(p.data, steps[path], seed)
    with exact_arithmetic(twin) as exact:
        forcing = _ForcedRun(side, exact, rounded, seed)
        with calls_followed(twin.named_modules(), forcing.begin, forcing.end):
            run(twin)
        return forcing.results(dict(twin.named_parameters()))


def true_outputs(
    twin: nn.Module, side: Recording, run: Callable[[nn.Module], object]
) -> dict[Place, list[Tensor]]:
    """The outputs of each call of a pass in float64, from the batch on."""
    set_values(twin, {**side.parameters, **side.buffers})
    noted = Boundaries(None)
    followed = calls_followed(twin.named_modules(), noted.begin, noted.end)
    with followed, exact_arithmetic(twin):
        run(twin)
    return {place: boundary.outputs for place, boundary in noted.ended.items()}


def moved(x: Tensor, most: float, seed: int = 0) -> Tensor:
    """`x` in float64, each number moved at random by up to this share of itself.

    This models sums that cancel: rounding their result to nearest does not show what they lose.
    """
    wide = x.double()
    # seeded by its numbers: a sum that cancels loses nothing if both tensors are moved alike
    own = zlib.crc32(wide.detach().cpu().contiguous().numpy().data)
    generator = torch.Generator().manual_seed(own + (seed << 40))
    share = torch.empty(x.shape, dtype=torch.float32).uniform_(-most, most, generator=generator)
    return torch.addcmul(wide, wide, share.to(wide))


class _ForcedRun:
    """The hooks of `run_forced`, and the backward passes after it."""

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
        call.outputs = [_copied(x) for x in given]
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

        def leaf(number: int, x: Tensor) -> Tensor:
            if number >= len(numbers) or numbers[number].shape != x.shape:
                return x  # float64 took another path: its own numbers go on
            wide = numbers[number].to(x.device).double()
            if self._rounded and reader is not None:
                wide = moved(wide, reader.boundary.half_step, self._seed)
            forced = wide.requires_grad_()
            if reader is not None:
                which = f"{name}, tensor {number}" if number else name
                reader.starts.append((which, forced, gradients.get(number)))
            return forced.clone()  # a module may change its input in place

        return numbered(value, leaf)

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
        # other numbers may be routed elsewhere, and have other shapes
        ends = [
            (x, g) for x, g in call.ends if g is not None and x.requires_grad and x.shape == g.shape
        ]
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


# ---- the errors of ops ---------------------------------------------------------------------------


class OpError(NamedTuple):
    """One op."""

    phase: str
    module: str
    op: str
    dtype: str
    error: float  # The rms of its own error, over the rms of its exact result
    line: str = ""  # Of the code, in the forward pass


class OpErrors(OpWatcher):
    """Collects the errors of a model's ops; enter `following(model)` first."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpError] = []

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        (phase, module), spec = self.tracker.context(), op_spec(func)
        # without a module: of the loss or the caller, which the rows do not have
        if module is None or not spec.makes_numbers or spec.listwise:
            return run()
        targets = tensors_in(v for _, v in written_arguments(func, args, kwargs))
        call = OpCall(func, args, kwargs, None, saved={id(x): x for x in targets})
        with self.muted():  # before the op, which may overwrite what it reads
            exact = recomputed(call)
        result = run()
        with self.muted(), _torch.no_dispatch(), torch.no_grad():
            made = (x for _, x in call._replace(result=result).outputs())
            errors = [
                (relative_rms(x, y), dtype_name(x.dtype))
                for x, y in zip(made, exact or (), strict=False)
                if x.is_floating_point() and x.shape == y.shape
            ]
        if errors:
            error, dtype = max(errors, key=lambda pair: pair[0])
            line = current_line() or ""
            self.ops.append(OpError(phase, module, call.name, dtype, error, str(line)))
        return result
