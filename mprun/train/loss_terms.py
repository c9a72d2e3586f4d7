"""The loss of a recipe as the loop takes it: one scalar that was checked, and its named parts.

A recipe's `loss` returns a scalar, or a dict of named scalars whose sum is trained, or nothing in
an evaluation that is judged by a metric. This is the only place where that is looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor

from mprun.errors import RunFailedError, definition
from mprun.precision.nested import all_tensors
from mprun.recipe import Recipe

PREFIX = "loss."  # Before the name of a part in records
_LEGAL = (
    "legal is a scalar tensor of a floating dtype, or a dict of named ones, whose sum is trained"
)


class LossTerms:
    """`loss(output, batch)` of a recipe, checked; its metric decides if evaluations need it."""

    def __init__(self, recipe: Recipe) -> None:
        self._loss = recipe.loss
        self._recipe = recipe
        self._metric = recipe.METRIC[0]
        self._is_brought = type(recipe).loss is Recipe.loss
        self._parts: dict[str, Tensor] = {}

    def __call__(self, output: Any, batch: Any) -> Tensor:
        """The loss, a scalar; None in an evaluation that has none and is judged by a metric.

        Raises:
            RunFailedError: it is something else.
        """
        try:
            value = self._loss(output, batch)
        except Exception as error:
            if output is None:  # the cause of any error of the loss
                raise RunFailedError(self._no_output) from error
            raise
        is_scalar = type(value) is Tensor and not value.dim() and value.is_floating_point()
        if is_scalar and value.requires_grad:
            return cast(Tensor, value)  # at once: the checks below would be part of the step's time
        if isinstance(value, Mapping):
            value = self._sum(value)
        is_judged = self._metric == "loss" or self._metric.startswith(PREFIX)
        if value is None and not torch.is_grad_enabled() and not is_judged:
            return cast(Tensor, None)
        return self._checked(value, output)

    def zero_loss(self, output: Any, batch: Any) -> Tensor:
        """A loss of 0 that depends on every floating output, with parts of 0.

        It is for a process without samples of its own: the recipe's loss would be a mean over
        nothing.
        """
        # Only for the names of the parts, which all processes add up; a loss may differentiate
        self(output, batch)
        self._parts = {name: torch.zeros_like(part) for name, part in self._parts.items()}
        tensors = [x for x in all_tensors(output) if x.is_floating_point() and x.requires_grad]
        # every output: then each parameter gets its gradient of 0, which the others wait for
        return sum((x.float().sum() * 0.0 for x in tensors), torch.zeros(()))

    def take_parts(self) -> dict[str, Tensor]:
        """The named parts of the last loss, detached; empty if it had none."""
        if not self._parts:
            return self._parts
        parts, self._parts = self._parts, {}
        return parts

    @property
    def _no_output(self) -> str:
        forward = type(self._recipe).forward
        place = "" if forward is Recipe.forward else _at(forward)
        return f"the model returned None{place}: let forward end with a return"

    def _failed(self, text: str) -> RunFailedError:
        """With the place of the user's loss."""
        return RunFailedError(text + _at(type(self._recipe).loss))

    def _sum(self, parts: Mapping[Any, Any]) -> Tensor:
        if not parts:
            raise self._failed(f"loss returned an empty dict; {_LEGAL}")
        for name, part in parts.items():
            if not isinstance(name, str) or not name.isprintable():
                raise self._failed(f"loss returned a dict with the key {name!r}; {_LEGAL}")
            if reason := _refusal(part):
                raise self._failed(f"loss returned {shown(part)} as {name!r}: {reason}; {_LEGAL}")
        if self._metric.startswith(PREFIX) and self._metric.removeprefix(PREFIX) not in parts:
            raise self._failed(
                f"METRIC names {self._metric!r}, but loss returned a dict with "
                f"{', '.join(map(repr, parts))}; legal: a METRIC that names one of them"
            )
        self._parts = {name: part.detach().reshape(()) for name, part in parts.items()}
        # not `sum`: it begins with the int 0, an addition more in the graph of the step
        return cast(Tensor, reduce(operator.add, parts.values()))

    def _checked(self, value: Any, output: Any) -> Tensor:
        if value is None:
            raise self._failed(self._missing(output))
        reason = _refusal(value)
        if not reason and torch.is_grad_enabled() and not value.requires_grad:
            reason = (
                "no gradient leads from it to the model; compute it from the output, without "
                "detach, item, numpy or torch.no_grad, and leave a parameter to train"
            )
        if reason:
            raise self._failed(f"loss returned {shown(value)}: {reason}; {_LEGAL}")
        return cast(Tensor, value.reshape(()) if value.dim() else value)

    def _missing(self, output: Any) -> str:
        if torch.is_grad_enabled():
            when = ""
        else:
            when = f" in evaluation, and METRIC names {self._metric!r}; name one of metrics() there"
        if output is None:
            return self._no_output
        if self._is_brought:
            return (
                "the recipe has no function loss, and the model's output, "
                f"{shown(output)}, brings none{when}: write loss(output, batch), or return an "
                "output with output.loss or output['loss']; or call mprun.check(model, batch, loss)"
            )
        return f"loss returned None{when}; {_LEGAL}"


def _at(function: object) -> str:
    place = definition(function)
    return f" ({place})" if place else ""


def _refusal(value: Any) -> str:
    """Why a value is no scalar to train on; empty if it is one."""
    if not isinstance(value, Tensor):
        return "it is no tensor"
    if value.numel() != 1:
        return "it is not a scalar: take its mean"
    if not value.is_floating_point():
        return "its dtype is not floating"
    return ""


def shown(value: Any) -> str:
    """A value in a message: a tensor's shape and dtype, a mapping's keys, else its type."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a tensor of shape {list(value.shape)} ({dtype})"
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, list(value)[:8]))
        return f"a {type(value).__name__} with {keys}"
    if isinstance(value, bool | int | float | str):
        return f"{value!r:.40} ({type(value).__name__})"
    return "None" if value is None else f"a {type(value).__name__}"


def checked_count(recipe: Recipe) -> Callable[[Any], float] | None:
    """`count(batch)` of a recipe, checked; None for a recipe whose loss averages over samples."""
    if not recipe.counts:
        return None
    where = _at(type(recipe).count)

    def count(batch: Any) -> float:
        value: Any = recipe.count(batch)  # a user's code may return anything
        is_scalar = isinstance(value, Tensor) and value.numel() == 1
        number = value.item() if is_scalar else value
        # a bool is an int of Python: `count` that returns a comparison is a mistake
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise RunFailedError(f"count returned {shown(value)}; {_LEGAL_COUNT}{where}")
        if not 0 <= number < float("inf"):  # false for NaN too
            raise RunFailedError(f"count returned {number}; {_LEGAL_COUNT}{where}")
        return float(number)

    return count


_LEGAL_COUNT = (
    "legal is the number of items that the loss of the batch averages over, 0 or more, such as "
    "int(mask.sum())"
)
