"""A step looked at from its beginning to its verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
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
        optimizer: its optimizer; None where nothing is trained.
        saturates: whether 16-bit numbers clamped to the largest of their dtype count.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, saturates: bool = False
    ) -> None:
        self._origins = Origins(saturates)
        self._kept = Kept(model, optimizer, self._origins, saturates)
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

    def outputs(self, made: Any) -> None:
        """The model returned these."""
        for x in tree_leaves(made):
            found = limits(x) if isinstance(x, Tensor) else None
            if found is not None and not found.finite:
                reach(self._origins.lineage.of(x), OUTPUT)

    def gradients(self) -> None:
        """The gradients are there; the first time counts, before they are unscaled."""
        if not self._looked_at_gradients:
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
        if origin.exception.phase == "optimizer" and origin.module:
            kind = self.watch.kinds.get(origin.module, "")
            placed = replace(origin.exception, module=origin.module, module_kind=kind)
            return replace(origin, exception=placed)
        return origin


def _judged(origin: Origin, skipped: bool, loss_scale: float | None) -> FpException | None:
    """The exception with its verdict; None for a constant that did no harm."""
    harmed = [what for what in origin.reached if not (origin.deliberate and what == OUTPUT)]
    saturated = origin.exception.kind == "saturated"
    if origin.deliberate and not harmed:
        return None
    harmful = harmed or saturated or origin.distorts
    undone = skipped and not (origin.lasts or saturated)
    return replace(
        origin.exception,
        verdict="absorbed" if not harmful else "expected" if undone else "finding",
        reached=tuple(islice(origin.reached, REACHED)),
        reached_count=len(origin.reached),
        loss_scale=loss_scale,
    )
