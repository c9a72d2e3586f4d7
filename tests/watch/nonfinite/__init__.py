"""What tests of floating-point exceptions share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mprun.watch.nonfinite.fp_exception import FpException, TensorStats
from mprun.watch.nonfinite.saved_step import StepCapture
from mprun.watch.step_events import StepHooks


def exception(**fields: Any) -> FpException:
    """An overflow in a layer, with other fields where they are given."""
    given: dict[str, Any] = {
        "verdict": "finding",
        "kind": "overflow",
        "step": 1,
        "last_step": 1,
        "op": "mul",
        "phase": "forward",
        "module": "fc",
        "module_kind": "Linear",
        "location": "model.py:3 (forward)",
        "inputs": (TensorStats("self", "float16", (2, 3), -1.0, 300.0, 0, 0),),
        "outputs": (TensorStats("result", "float16", (2, 3), -1.0, 1.0, 0, 2),),
        "in_float64": TensorStats("result", "float64", (2, 3), -1.0, 90000.0, 0, 0),
        "reached": ("the loss", "gradient of fc.weight"),
        "reached_count": 2,
    }
    return FpException(**{**given, **fields})


@contextmanager
def capturing(model: nn.Module, *optimizers: Optimizer) -> Iterator[StepCapture]:
    """The capture of a loop's steps, which follows the model while this is entered."""
    capture = StepCapture(model, optimizers)
    with StepHooks(model, optimizers, [capture]).attached():
        yield capture
