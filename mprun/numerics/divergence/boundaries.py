"""What enters and leaves each module of a model in one step, forward and backward.

A tensor may be used by several modules, and its gradient is the sum of theirs. So each module gets
an alias of its inputs, and hands on an alias of its outputs: the gradient at an alias is what went
through this module alone. An alias shares the memory, so no number changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mprun._torch import in_backward, is_compiled, original_module
from mprun.nested import all_tensors, map_tensors
from mprun.precision.formats import BlockFormat
from mprun.precision.gemms import formats_of

LOWEST_FIRST = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Fewest bits first."""
Place = tuple[str, int]
"""The path of a module, and the number of the call, from 0."""


@dataclass
class Boundary:
    """One call of a module: its floating tensors, and the gradients at them."""

    place: Place
    kind: str
    """The module's class."""
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
        return str(self.dtype).removeprefix("torch.") if self.format is None else self.format.name


@dataclass
class Recording:
    """A step of one side."""

    boundaries: dict[Place, Boundary]
    """In the order in which the calls ended; the model's own call is the last one."""
    gradients: dict[str, Tensor]
    """Of the parameters, by name."""
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
    followed = [("", model)] if compiled else list(plain.named_modules())
    with ExitStack() as stack:
        for path, module in followed:
            stack.enter_context(boundaries.following(path, module))
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

    def following(self, path: str, module: nn.Module) -> ExitStack:
        """Hooks at a module, until the stack is closed."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return None if in_backward() else self._begin(path, module, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return None if in_backward() else self._end(path, output)

        stack = ExitStack()
        for handle in (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ):
            stack.callback(handle.remove)
        return stack

    def _begin(
        self, path: str, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A module is called; aliases of its arguments."""
        inputs = floating((args, kwargs))
        place = (path, self._calls[path])
        self._calls[path] += 1
        boundary = Boundary(
            place,
            type(original_module(module)).__name__,
            given_dtype(module, inputs, self._low),
            max(formats_of(original_module(module)), key=lambda f: f.half_step, default=None),
            [_kept(x) for x in inputs],
        )
        self._open.append(boundary)
        return aliased((args, kwargs), boundary.input_gradients)  # type: ignore[no-any-return]

    def _end(self, path: str, output: Any) -> Any:
        """It returned; an alias of its output."""
        boundary = self._open.pop()
        boundary.outputs = [_kept(x) for x in floating(output)]
        self.ended[boundary.place] = boundary
        return aliased(output, boundary.output_gradients)


def floating(value: Any) -> list[Tensor]:
    """The floating tensors in a nested value, in order."""
    return [x for x in all_tensors(value) if x.is_floating_point()]


def _kept(x: Tensor) -> Tensor:
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
        same = x.view_as(x)
        same.register_hook(_keeper(gradients, count))
        return same

    return map_tensors(alias, value)


def _keeper(gradients: dict[int, Tensor], number: int) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        gradients[number] = gradient.detach().clone()

    return keep


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
    return known[0] if known else torch.float32
