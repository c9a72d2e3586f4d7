"""Quantities: what is taken from a trained model besides its loss, in the mode and in float64.

Forces, the residual of an equation, an eigenvalue of the Hessian: a loss does not show whether they
are right. `Recipe.quantities` names them. On held-out samples x, with the weights w of the run,

    arithmetic error   |q(w, x) in the mode - q(w, x) in float64| / |q(w, x) in float64|
    error              |q(w, x) in the mode - truth| / |truth|, where the recipe knows the truth

in the 2-norm over all entries. float64 is the mode `fp64` of the same recipe: what the model's own
code casts to float32 stays there. A comparison sets the arithmetic error beside the spread over
seeds, which training leaves open.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.errors import RunFailedError, UsageError
from mprun.precision import Precision
from mprun.precision.nested import all_tensors
from mprun.recipe import Recipe
from mprun.records.run_record import MOST_ENTRIES, QuantityRow
from mprun.train.data import MicroBatch
from mprun.train.loss_terms import shown
from mprun.train.recipe_metrics import checked_name

BATCHES = 16  # Of held-out samples: enough for a mean, and derivatives take several passes each


class Quantity(NamedTuple):
    """What a recipe names."""

    of: Callable[[nn.Module, Any], Any]
    truth: Callable[[Any], Any] | None = None  # Of the batch as it was


def quantities_of(recipe: Recipe) -> dict[str, Quantity]:
    """The quantities of a recipe.

    Raises:
        UsageError: one of them is neither a function nor a pair of functions, or has no legal name.
    """
    given: Any = recipe.quantities()
    if not isinstance(given, Mapping):
        raise UsageError(f"quantities() returned {shown(given)}; legal is a dict of functions")
    named = {}
    for name, value in given.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        if len(parts) not in (1, 2) or not all(map(callable, parts)):
            raise UsageError(
                f"quantities()[{name!r}] is {shown(value)}; legal: a function of (model, batch), "
                "or a pair (function, truth), where truth is a function of the batch"
            )
        named[checked_name(name, "quantities() names a quantity")] = Quantity(*parts)
    return named


@dataclass(frozen=True)
class Values:
    """A quantity over some batches, as float64 on the CPU."""

    entries: Tensor
    truth: Tensor | None
    is_scalar: bool  # One entry for each batch

    @property
    def size(self) -> float:
        """The mean of a scalar over batches; the root mean square of a tensor's entries."""
        mean = self.entries.mean() if self.is_scalar else self.entries.square().mean().sqrt()
        return float(mean)

    def powers(self, exact: Tensor) -> tuple[float, float]:
        """The sums of squares of an exact answer, and of the difference from it."""
        return float(exact.square().sum()), float((self.entries - exact).square().sum())

    def error(self, exact: Tensor | None) -> float | None:
        """The relative error in the 2-norm; None without an exact answer that is not zero."""
        signal, noise = (0.0, 0.0) if exact is None else self.powers(exact)
        return (noise / signal) ** 0.5 if signal else None


@torch.enable_grad()
def values_of(
    quantities: Mapping[str, Quantity],
    precision: Precision,
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
) -> dict[str, Values]:
    """Each quantity of a model in evaluation, over pairs of a batch for `forward` and as it was.

    Raises:
        RunFailedError: one returned no real tensor, or its truth has another shape.
    """
    modes = [(module, module.training) for module in model.modules()]
    pairs, made = list(batches), {}
    try:
        model.eval()
        for name, (of, truth) in quantities.items():
            parts = [_entries(name, precision.forward(partial(of, model), x)) for x, _ in pairs]
            true = [] if truth is None else [_entries(name, truth(content)) for _, content in pairs]
            if any(x.shape != y.shape for x, y in zip(parts, true, strict=False)):
                raise RunFailedError(f"quantity {name!r}: value and truth have other shapes")
            exact = _joined(true) if true else None
            made[name] = Values(_joined(parts), exact, all(x.numel() == 1 for x in parts))
    finally:
        for module, training in modes:
            module.training = training
    return made


def _entries(name: str, value: Any) -> Tensor:
    if isinstance(value, int | float):
        value = torch.tensor(value)
    if not isinstance(value, Tensor) or value.is_complex() or not value.numel():
        raise RunFailedError(f"quantity {name!r} is {shown(value)}; legal is a real tensor")
    return value.detach().cpu().double()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in parts])


def quantity_row(
    split: str, batches: Sequence[MicroBatch], own: Values, exact: Values | None, note: str
) -> QuantityRow:
    """The record of a quantity: `own` of the mode, `exact` in float64, or why that is missing."""
    stride = -(-own.entries.numel() // MOST_ENTRIES)
    digest = 0
    for tensor in all_tensors([part.content for part in batches]):
        digest = zlib.crc32(tensor.detach().cpu().double().contiguous().numpy().tobytes(), digest)
    return QuantityRow(
        split=split,
        value=own.size,
        error=own.error(own.truth),
        arithmetic_error=None if exact is None else own.error(exact.entries),
        entries=own.entries[::stride].tolist(),
        samples_crc=digest,
        note=note,
    )
