"""One forward and backward pass: the order of its parts, written once.

The training loop, `mprun numerics` and `mprun search-ops` all take their steps with it, so that
what they measure is what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from mprun.precision import Precision


def forward_backward(
    precision: Precision,
    forward: Callable[[Any], Any],
    loss: Callable[[Any, Any], Tensor],
    inputs: Any,
    batch: Any,
    share: float = 1.0,
    before_backward: Callable[[Tensor], None] | None = None,
    run: Callable[[Callable[[], tuple[Tensor, Any]]], tuple[Tensor, Any]] = lambda f: f(),
) -> tuple[Tensor, Any]:
    """Run a model and add the gradients of its loss to the parameters' `grad`.

    Args:
        precision: the mode; it casts ops and scales the loss.
        forward: gives the output for `inputs`, by the model that is prepared for that mode.
        loss: `loss(output, batch)`, a scalar.
        inputs: the argument of `forward`.
        batch: the second argument of `loss`.
        share: the loss is multiplied by this: the micro-batch's share of the step.
        before_backward: called with the unscaled loss; an exception in it skips the backward pass.
        run: runs the forward pass; several processes prepare for its backward pass there.

    Returns:
        The loss times `share`, unscaled and detached, and the output.
    """

    def forward_pass() -> tuple[Tensor, Any]:
        output = precision.forward(forward, inputs)
        return precision.loss(loss, output, batch, share=share), output

    value, output = run(forward_pass)
    if before_backward is not None:
        before_backward(value)
    precision.backward(value)
    return value.detach(), output


def call(model: nn.Module, inputs: Any) -> Any:
    """The output of `model` for a tensor, a tuple of arguments, or a mapping of named ones."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
