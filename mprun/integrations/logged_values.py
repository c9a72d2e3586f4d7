"""The values that a loop logs: losses of steps, scores of validation and test.

    run.log(loss=loss)                           the training loss of the step that was just taken
    run.log(accuracy=0.9)                        another figure of the training
    run.log(validation_loss=0.3)                 also val_ or eval_: a validation
    run.log(test_loss=0.3, test_accuracy=0.9)    the final test

A tensor on a device is read later, so that logging waits for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from torch import Tensor

from mprun.records.run_record import Scores

PREFIXES = {"validation": "validation", "val": "validation", "eval": "validation", "test": "test"}
LOWER, HIGHER = ("loss", "perplexity", "mae"), ("accuracy", "f1")
"""Metrics whose better direction is known."""


def metric_of(given: str | tuple[str, str]) -> tuple[str, bool]:
    """A metric's name, and whether higher is better.

    Raises:
        ValueError: the direction is neither known nor given.
    """
    if isinstance(given, str) and given in (*LOWER, *HIGHER):
        return given, given in HIGHER
    if not isinstance(given, str) and len(given) == 2 and given[1] in ("max", "min"):
        return given[0], given[1] == "max"
    known = ", ".join((*LOWER, *HIGHER))
    raise ValueError(
        f'metric={given!r}; legal: {known}, or a name with its better direction: ("bleu", "max")'
    )


def split_of(name: str) -> tuple[str, str]:
    """train, validation or test, and the name without the prefix."""
    for separator in ("_", "/"):
        prefix, found, rest = name.partition(separator)
        if found and rest and prefix in PREFIXES:
            return PREFIXES[prefix], rest
    return "train", name


def checked(name: str, value: object) -> Tensor | float:
    """A value that can be logged; a tensor without its graph.

    Raises:
        TypeError: it is not a number.
        ValueError: it is a tensor of several.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            shape = list(value.shape)
            raise ValueError(f"{name} has the shape {shape}; legal: a number or a scalar tensor")
        if value.device.type == "cpu":
            return float(value.detach())
        return value.detach().clone()  # loops add to their loss in place
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {type(value).__name__}; legal: a number or a scalar tensor")
    return float(value)


def as_number(value: Tensor | float) -> float:
    """The number; for a tensor on CUDA it waits."""
    return float(value)


class Means:
    """Means of training values since the last validation."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[int, float]]] = defaultdict(list)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """The values of one step."""
        for name, value in values.items():
            self._values[name].append((step, value))

    def take(self, after: int = 0) -> Scores:
        """The means over the steps after this one; counting begins again.

        A value that was logged in none of these steps is the last one that was.
        """
        means = {}
        for name, logged in self._values.items():
            last = [value for step, value in logged if step > after]
            means[name] = fmean(last or [logged[-1][1]])
        self._values.clear()
        return scores_of(means)


def scores_of(values: Mapping[str, float]) -> Scores:
    """The record of named scores."""
    rest: dict[str, Any] = {k: v for k, v in values.items() if k not in ("loss", "accuracy")}
    return Scores(
        loss=values.get("loss"), accuracy=values.get("accuracy"), samples=None, metrics=rest or None
    )


def samples_of(args: Any) -> int:
    """The first dimension of the first tensor in these arguments; 0 without one."""
    for x in args.values() if isinstance(args, Mapping) else args:
        if isinstance(x, Tensor) and x.dim():
            return int(x.shape[0])
        if isinstance(x, tuple | list | Mapping) and (count := samples_of(x)):
            return count
    return 0
