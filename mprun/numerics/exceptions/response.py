"""What is done about a step's exceptions: nothing, an end, or the step as if it had not been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.numerics.exceptions.steps import Outcome

ACTIONS = ("log", "halt", "skip")
HALT_AFTER = 20
"""Steps lost in a row after which `halt` and `skip` give up: a dynamic loss scale of 65536 is 1/16
by then, and no gradient needs one below 1."""


class Response:
    """Decides after each step.

    Args:
        action: log, halt or skip.
        halt_after: how many steps in a row may be lost, skipped or dropped.

    Raises:
        ValueError: another action, or no positive number.
    """

    def __init__(self, action: str, halt_after: int = HALT_AFTER) -> None:
        if action not in ACTIONS:
            raise ValueError(f"action={action!r}; legal: {', '.join(ACTIONS)}")
        if halt_after < 1:
            raise ValueError(f"halt_after={halt_after}; legal is 1 or more")
        self.action = action
        self.in_a_row = 0
        """Steps lost in a row up to now."""
        self._halt_after = halt_after

    def drops(self, outcome: Outcome) -> bool:
        """Whether the step is to be dropped."""
        return self.action == "skip" and bool(outcome.of("finding"))

    def why_end(self, outcome: Outcome) -> str | None:
        """Why to go on is pointless, or None; to be asked once a step."""
        dropped, findings = self.drops(outcome), outcome.of("finding")
        self.in_a_row = self.in_a_row + 1 if dropped or outcome.skipped else 0
        if self.action == "halt" and findings:
            return findings[0].text()
        if self.action == "log" or self.in_a_row < self._halt_after:
            return None
        last = next((e.text() for e in (*findings, *outcome.of("expected"))), "of unknown origin")
        lost = "had exceptions and were dropped" if dropped else "overflowed and were skipped"
        return f"{self.in_a_row} steps in a row {lost}; the last one: {last}"


class Snapshot:
    """A model and its optimizer as they are now.

    Args:
        model: parameters and buffers are copied.
        optimizers: their state and options are.
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        held = [*model.parameters(), *model.buffers(), *(p for g in groups for p in g["params"])]
        tensors = {id(x): x for x in held}.values()
        self._tensors = [(x, x.detach().clone()) for x in tensors]
        self._options = [(g, {k: v for k, v in g.items() if k != "params"}) for g in groups]
        self._states = [
            (
                optimizer,
                {
                    p: {key: (value, _copy(value)) for key, value in entries.items()}
                    for p, entries in optimizer.state.items()
                },
            )
            for optimizer in optimizers
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Make them so again."""
        for tensor, saved in self._tensors:
            tensor.copy_(saved)
        for group, options in self._options:
            group.update(options)
        for optimizer, state in self._states:
            for p in [p for p in optimizer.state if p not in state]:
                del optimizer.state[p]  # made in the step
            for p, entries in state.items():
                optimizer.state[p] = {key: _restored(*pair) for key, pair in entries.items()}


class NoSnapshot:
    """For actions that never take a step back."""

    def __init__(self, *_: object) -> None:
        pass

    def restore(self) -> None:
        pass


def snapshots(action: str) -> Callable[..., Snapshot | NoSnapshot]:
    """What an action needs to keep of each step's beginning."""
    return Snapshot if action == "skip" else NoSnapshot


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _restored(value: Any, saved: Any) -> Any:
    """The tensor itself with the numbers it had: others may hold on to it."""
    return value.copy_(saved) if isinstance(value, Tensor) else saved
