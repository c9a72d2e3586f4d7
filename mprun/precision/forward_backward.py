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
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    share: float = 1.0,
    before_backward: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Any]:
    """Run `model` and add the gradients of its loss to the parameters' `grad`.

    Args:
        precision: the mode; it casts ops and scales the loss.
        model: the model, prepared for that mode.
        loss: `loss(output, targets)`, a scalar.
        inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        targets: the second argument of `loss`.
        share: the loss is multiplied by this: the micro-batch's share of the step's samples.
        before_backward: called with the unscaled loss; an exception in it skips the backward pass.

    Returns:
        The loss times `share`, unscaled and detached, and the model's output.
    """
    args, kwargs = call_arguments(inputs)
    output = precision.forward(model, *args, **kwargs)
    value = precision.loss(loss, output, targets, share)
    if before_backward is not None:
        before_backward(value)
    precision.backward(value)
    return value.detach(), output


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional and keyword arguments of a model for the inputs of a batch."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}
