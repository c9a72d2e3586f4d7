"""One step of a model as numbers: at its modules' boundaries, and in its ops.

*Boundaries.* A tensor may be used by several modules, and its gradient is the sum of theirs. So
each module gets an alias of its inputs, and hands on an alias of its outputs: the gradient at an
alias is what went through this module alone. An alias shares the memory, so no number changes.

*Exact arithmetic.* A rounding that a model's code asks for (`x.bfloat16().float()`) is an error of
that code here, so casts between floating dtypes return float64. Each result may be rounded to a
dtype: the error of such a pass is one that the dtype makes, cancellation and the growth of errors
included, for which there is no formula. Sums inside a kernel are not rounded.

*Ops.* An op's result is compared with the same op in float64 on the same inputs. A cast to fewer
bits is compared with what it cast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mprun.inspect.divergence.difference import OpError
from mprun.inspect.passes import in_float64
from mprun.precision._torch import (
    DispatchMode,
    in_backward,
    is_compiled,
    no_dispatch,
    op_name,
    original_module,
    tree_map,
)
from mprun.precision.formats import BlockFormat
from mprun.precision.gemms import formats_of
from mprun.precision.nested import all_tensors, map_tensors, tensors_in
from mprun.precision.policy import dtype_name
from mprun.watch.op_watcher import (
    OpCall,
    OpWatcher,
    RunOp,
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
    def half_step(self) -> float:
        """By which share of itself rounding moves a number at most."""
        return torch.finfo(self.dtype).eps / 2 if self.format is None else self.format.half_step

    @property
    def rounding(self) -> str:
        """The name of the format, or else of the dtype."""
        return dtype_name(self.dtype) if self.format is None else self.format.name


@dataclass
class Recording:
    """A step of one side."""

    boundaries: dict[Place, Boundary]
    """In the order in which the calls ended; the model's own call is the last one."""
    gradients: dict[str, Tensor]  # Of the parameters, by name
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    loss: float


def record(
    model: nn.Module,
    run: Callable[[], Any],
    loss: Callable[[Any], Tensor],
    region: AbstractContextManager[object],
    low: torch.dtype | None,
) -> Recording:
    """Run a step of a model forward and backward.

    Args:
        model: in training, without gradients. Of a compiled one only the model's own boundary is
            seen.
        run: calls it once.
        loss: of what `run` returns.
        region: the casts around the call.
        low: the dtype that the region casts to; None for autocast's, or without casts.
    """
    plain, boundaries = original_module(model), Boundaries(low)
    compiled = any(map(is_compiled, model.modules()))
    # hooks inside a compiled model would break its graph, and so change what is compared
    followed = [("", model)] if compiled else plain.named_modules()
    with calls_followed(followed, boundaries.begin, boundaries.end):
        with region:
            output = run()
        value = loss(output)
        value.backward()
    named = dict(plain.named_parameters())
    return Recording(
        boundaries.ended,
        {n: p.grad.detach().clone() for n, p in named.items() if p.grad is not None},
        {n: p.detach() for n, p in named.items()},
        dict(plain.named_buffers()),
        float(value.detach()),
    )


@contextmanager
def calls_followed(
    modules: Iterable[tuple[str, nn.Module]],
    begin: Callable[[str, nn.Module, Any], Any],
    end: Callable[[str, Any], Any],
) -> Iterator[None]:
    """Follow the calls of modules, but for those that recompute in the backward pass.

    Args:
        modules: by path.
        begin: is given path, module, and the pair of positional and named arguments; what it
            returns takes the place of the pair, where it is not None.
        end: is given path and output; what it returns takes the place of the output.
    """

    def hooks(path: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # checkpointing calls modules again in the backward pass
            return None if in_backward() else begin(path, module, (args, kwargs))

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return None if in_backward() else end(path, output)

        return before, after

    with ExitStack() as stack:
        for path, module in modules:
            before, after = hooks(path)
            for handle in (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ):
                stack.callback(handle.remove)
        yield


class Boundaries:
    """Notes calls of modules.

    Args:
        low: see `record`.
    """

    def __init__(self, low: torch.dtype | None) -> None:
        self._low = low
        self.ended: dict[Place, Boundary] = {}
        self._open: list[Boundary] = []
        self._calls: Counter[str] = Counter()

    def begin(self, path: str, module: nn.Module, arguments: Any) -> Any:
        """A module is called; aliases of its arguments."""
        inputs = floating(arguments)
        place = (path, self._calls[path])
        self._calls[path] += 1
        boundary = Boundary(  # before the call: it may change its inputs in place
            place,
            type(original_module(module)).__name__,
            given_dtype(module, inputs, self._low),
            max(formats_of(original_module(module)), key=lambda f: f.half_step, default=None),
            [_copied(x) for x in inputs],
        )
        self._open.append(boundary)
        return aliased(arguments, boundary.input_gradients)

    def end(self, path: str, output: Any) -> Any:
        """It returned; an alias of its output."""
        boundary = self._open.pop()
        boundary.outputs = [_copied(x) for x in floating(output)]
        self.ended[boundary.place] = boundary
        return aliased(output, boundary.output_gradients)


def floating(value: Any) -> list[Tensor]:
    """The floating tensors in a nested value, in order."""
    return [x for x in all_tensors(value) if x.is_floating_point()]


def _copied(x: Tensor) -> Tensor:
    """A copy: a later op may change the tensor in place."""
    return x.detach().clone()


def aliased(value: Any, gradients: dict[int, Tensor]) -> Any:
    """`value` with an alias for each floating tensor; `gradients` gets what arrives at them."""
    count = -1

    def alias(x: Tensor) -> Tensor:
        nonlocal count
        if not x.is_floating_point():
            return x
        count += 1
        if not x.requires_grad:
            return x
        same = x.view_as(x)  # shares the memory, so no number changes
        same.register_hook(_storing_hook(gradients, count))
        return same

    return map_tensors(alias, value)


def _storing_hook(gradients: dict[int, Tensor], number: int) -> Callable[[Tensor], None]:
    def store(gradient: Tensor) -> None:
        gradients[number] = gradient.detach().clone()

    return store


def given_dtype(
    module: nn.Module, inputs: Sequence[Tensor], low: torch.dtype | None = None
) -> torch.dtype:
    """The dtype with the fewest bits among the region's, the inputs' and the parameters'.

    Args:
        low: the region's, if it is not autocast's.
    """
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


class Exact(DispatchMode):
    """Casts return float64. Results are rounded to `dtype`, where it is not None.

    Enter it with `exact_arithmetic`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype: torch.dtype | None = None
        self.only: str | None = None
        """The name of the ops whose results are rounded; None for all."""
        self.ops: set[str] = set()
        """The names of the ops that made numbers so far."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = op_name(func)
        if name == "_to_copy" and args[0].is_floating_point():
            dtype = kwargs.get("dtype")
            kwargs["dtype"] = torch.float64 if dtype and dtype.is_floating_point else dtype
        result = func(*args, **kwargs)
        if name in COPIES or not op_spec(func).makes_numbers:
            return result
        self.ops.add(name)
        if self.dtype is None or self.only not in (None, name):
            return result
        with no_dispatch(), torch.no_grad():
            return tree_map(self._rounded, result)

    def _rounded(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype is torch.float64 and self.dtype is not None:
            return x.copy_(x.to(self.dtype))  # in place: an op may return one of its arguments
        return x


@contextmanager
def exact_arithmetic(twin: nn.Module) -> Iterator[Exact]:
    """Inside, a float64 copy computes without casts; set `dtype` of the result to round."""
    exact = Exact()
    # the caller's autocast region would cast float64 down
    with in_float64(twin), torch.autocast("cpu", enabled=False), exact:
        yield exact


class OpErrors(OpWatcher):
    """Collects the errors of a model's ops; enter `following(model)` first."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpError] = []

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        spec, saved = op_spec(func), dict[int, Tensor]()
        if not spec.makes_numbers or spec.listwise or not spec.runs_again:
            return run()  # nothing to compare with: copies, the optimizer's lists, random numbers
        if spec.reads_written:  # `add_` reads what it overwrites: its exact result needs a copy
            targets = tensors_in(v for _, v in written_arguments(func, args, kwargs))
            with self.muted(), torch.no_grad():
                saved = {id(x): x.clone() for x in targets}
        result = run()
        with self.muted(), torch.no_grad():
            self._compare(OpCall(func, args, kwargs, result, saved=saved))
        return result

    def _compare(self, call: OpCall) -> None:
        context = self.tracker.context()
        # without a module: of the loss or the caller, which the rows do not have
        exact = None if context.module is None else recomputed(call)
        if exact is None:
            return
        with no_dispatch():
            pairs = zip((x for _, x in call.outputs()), exact, strict=False)
            errors = [
                (relative_rms(x, y), x.dtype)
                for x, y in pairs
                if x.is_floating_point() and x.shape == y.shape
            ]
        if errors:
            error, dtype = max(errors, key=lambda pair: pair[0])
            where = context.phase, context.module or ""
            self.ops.append(OpError(*where, call.name, dtype_name(dtype), error))


def op_errors(model: nn.Module, step: Callable[[], object]) -> list[OpError]:
    """The ops of `model` in a step, in the order they ran."""
    watcher = OpErrors()
    with watcher.following(model), watcher:
        step()
    return watcher.ops


def rms(x: Tensor) -> float:
    """The root of the mean square; 0 of no numbers."""
    return float(x.detach().double().square().mean().sqrt()) if x.numel() else 0.0


def relative_rms(x: Tensor, exact: Tensor) -> float:
    """The rms of the error over that of the exact numbers; infinite if only the latter is 0."""
    error, scale = rms(x.double() - exact.double()), rms(exact)
    return 0.0 if error == 0 else error / scale if scale else float("inf")
