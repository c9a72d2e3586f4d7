"""A step looked at from its beginning to its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isclose
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from mprun.numerics.exceptions.found import FpException
from mprun.numerics.exceptions.kept import Kept
from mprun.numerics.exceptions.lineage import Origin, reach
from mprun.numerics.exceptions.origins import Origins
from mprun.numerics.exceptions.tensors import limits
from mprun.numerics.exceptions.watch import Watch

OUTPUT = "the model's output"
REACHED = 50
"""Of what an exception spoiled, so much is named."""


@dataclass(frozen=True)
class Outcome:
    """What a step did."""

    step: int
    skipped: bool
    """Whether dynamic loss scaling skipped it."""
    exceptions: tuple[FpException, ...]
    """In the order they arose, each with its verdict."""

    def of(self, verdict: str) -> list[FpException]:
        """Those of a verdict."""
        return [e for e in self.exceptions if e.verdict == verdict]


class Steps:
    """Looks at one step after another.

    Args:
        model: the model that trains.
        optimizers: its optimizers; none where nothing is trained.
        saturates: whether 16-bit numbers clamped to the largest of their dtype count.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], saturates: bool = False
    ) -> None:
        self._origins = Origins(saturates, lambda x: self._kept.name_of(x))
        self._kept = Kept(model, optimizers, self._origins, saturates)
        self._looks_once = len(optimizers) < 2
        self._step = 0
        self._looked_at_gradients = False
        self.watch = Watch(model, self._origins.look, self.gradients)
        """The mode to be in."""

    def begin(self, step: int) -> None:
        """Step number `step` begins."""
        self._step, self._looked_at_gradients = step, False
        self._origins.begin(step)
        self._kept.begin()
        self.watch.begin()

    def inputs(self, given: Any) -> None:
        """The model is called with these."""
        self._kept.inputs(x for x in tree_leaves(given) if isinstance(x, Tensor))

    def outputs(self, made: Any) -> None:
        """The model returned these."""
        for x in tree_leaves(made):
            found = limits(x) if isinstance(x, Tensor) else None
            if found is not None and not found.finite:
                reach(self._origins.lineage.of(x), OUTPUT)

    def gradients(self) -> None:
        """The gradients are there; the first time counts, before they are unscaled.

        Of several optimizers each may have a backward pass of its own before it.
        """
        if not (self._looked_at_gradients and self._looks_once):
            self._looked_at_gradients = True
            self._kept.gradients(self._step)

    def finish(self, skipped: bool, loss_scale: float | None) -> Outcome:
        """The step ended.

        Args:
            skipped: whether dynamic loss scaling skipped it.
            loss_scale: what its loss was multiplied by; None where nothing, or what a scaler says.
        """
        self._kept.after_step(self._step)
        scale = loss_scale or self.watch.loss_scale
        judged = [
            _judged(origin, skipped, scale) for origin in map(self._placed, self._origins.new)
        ]
        return Outcome(self._step, skipped, tuple(e for e in judged if e is not None))

    def _placed(self, origin: Origin) -> Origin:
        """An op of the optimizer belongs to the module whose parameter it spoiled."""
        if origin.exception.phase != "optimizer" or not origin.owner:
            return origin
        reason = self._kept.eps_of(origin.owner) if _divides(origin.exception) else None
        placed = replace(
            origin.exception,
            module=origin.module,
            module_kind=self.watch.kinds.get(origin.module, ""),
            reason=reason,
        )
        return replace(origin, exception=placed)


def _judged(origin: Origin, skipped: bool, loss_scale: float | None) -> FpException | None:
    """The exception with its verdict; None for a constant that did no harm."""
    harmed = [what for what in origin.reached if not (origin.deliberate and what == OUTPUT)]
    saturated = origin.exception.kind == "saturated"
    if origin.deliberate and not harmed:
        return None
    harmful = harmed or saturated or origin.distorts
    undone = skipped and not origin.lasts and _by_loss_scale(origin.exception, loss_scale)
    return replace(
        origin.exception,
        verdict="absorbed" if not harmful else "expected" if undone else "finding",
        reached=tuple(islice(origin.reached, REACHED)),
        reached_count=len(origin.reached),
        loss_scale=loss_scale,
        wrong=origin.wrong,
    )


def _by_loss_scale(exception: FpException, loss_scale: float | None) -> bool:
    """Whether a loss scale can have caused it: the scaled loss or its backward pass overflowed.

    A NaN or an infinity that float64 has as well comes with any scale.
    """
    overflow = exception.kind == "overflow"
    if exception.phase == "backward":
        # Of a kernel that cannot be run again it is not known what float64 has.
        unknown = exception.kind in ("invalid", "infinite") and exception.in_float64 is None
        return overflow or unknown
    if loss_scale is None or not overflow or exception.phase != "other":
        return False
    factors = (x.high for x in exception.inputs if x.low == x.high and x.high is not None)
    return exception.op == "mul" and any(isclose(x, loss_scale, rel_tol=1e-6) for x in factors)


def _divides(exception: FpException) -> bool:
    """Whether an optimizer's update was divided by 0."""
    return "div" in exception.op and exception.kind in ("infinite", "invalid")
