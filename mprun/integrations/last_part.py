"""The last part of a training: what it is judged by, and whether the model still trained in it.

A mean of the losses of all steps hides what a model became, and a loss that is NaN has no mean. So
a training is judged by its last tenth, at least 20 steps; and one that is dead there has failed:

    the loss is not finite to the end, in a step that was taken or for the whole last part
    no step is taken in the last part: the loss scale skips all of them
"""

from __future__ import annotations

from math import ceil, isfinite

SHARE, LEAST_STEPS = 0.1, 20


def last_steps(steps: int) -> int:
    """How many steps of a training with so many are its last part."""
    return min(steps, max(LEAST_STEPS, ceil(steps * SHARE)))


class LastPart:
    """Follows the steps to the end of a training."""

    def __init__(self) -> None:
        self._steps = 0
        self._skipped_from: int | None = None
        """The first of the steps that were skipped, all of them since."""
        self._broken_from: int | None = None
        """The first step whose loss was not finite, as no known loss has been since."""
        self._broken_loss = 0.0
        self._took_broken = False
        """Whether a step with such a loss was taken."""

    def add(self, step: int, loss: float | None, skipped: bool) -> None:
        """The next step.

        Args:
            step: its number.
            loss: NaN or infinite where any loss was; None where it is not known.
            skipped: whether the loss scale skipped it.
        """
        self._steps = step
        self._skipped_from = (self._skipped_from or step) if skipped else None
        if loss is None:
            return
        if isfinite(loss):
            self._broken_from, self._took_broken = None, False
            return
        self._broken_from, self._broken_loss = self._broken_from or step, loss
        self._took_broken |= not skipped

    def failure(self) -> str:
        """Why the model does not train at the end; empty if it does."""
        last, least = self._steps, last_steps(self._steps)
        since = self._broken_from
        if since is not None and (self._took_broken or last - since + 1 >= least):
            skipped = "" if self._took_broken else "; the loss scale skips them, and cannot help"
            where = f"from step {since} to" if since < last else "at"
            return f"the loss is {self._broken_loss} {where} the last step, {last}{skipped}"
        since = self._skipped_from
        if since is not None and last - since + 1 >= least:
            return (
                f"no step was taken from step {since} to the last one, {last}: their gradients "
                "overflowed, and the loss scale skipped them"
            )
        return ""
