"""The ops of a step, each with the error that arises in it.

An op's result is compared with the same op in float64 on the very inputs it read. A cast to fewer
bits is compared with what it cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mprun._torch import no_dispatch
from mprun.nested import tensors_in
from mprun.numerics.nonfinite.op_call import OpCall, in_float64, op_spec, written_arguments
from mprun.numerics.op_watcher import OpWatcher, RunOp
from mprun.precision.policy import dtype_name
from mprun.records.capture_record import OpError


class OpErrors(OpWatcher):
    """Collects the errors of ops that run while it is entered; enter `following(model)` first."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpError] = []

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        context, spec = self.tracker.context(), op_spec(func)
        looked_at = spec.makes_numbers and not spec.listwise and context.module is not None
        saved: dict[int, Tensor] = {}
        if looked_at and spec.reads_written:
            targets = tensors_in(v for _, v in written_arguments(func, args, kwargs))
            with no_dispatch(), torch.no_grad():
                saved = {id(x): x.clone() for x in targets}
        result = run()
        if looked_at:
            call = OpCall(func, args, kwargs, result, saved=saved)
            self._add(call, context.phase, context.module or "")
        return result

    def _add(self, call: OpCall, phase: str, module: str) -> None:
        exact = in_float64(call)
        if exact is None:
            return
        with no_dispatch(), torch.no_grad():
            pairs = zip((x for _, _, x in call.outputs()), exact, strict=False)
            errors = [
                (relative_rms(x, y), x.dtype)
                for x, y in pairs
                if x.is_floating_point() and x.shape == y.shape
            ]
        if errors:
            error, dtype = max(errors, key=lambda pair: pair[0])
            self.ops.append(OpError(phase, module, call.name, dtype_name(dtype), error))


def op_errors(model: nn.Module, step: Callable[[], object]) -> list[OpError]:
    """The ops of `model` in a step, in the order they ran."""
    watcher = OpErrors()
    with watcher.following(model), watcher:
        step()
    return watcher.ops


def rms(x: Tensor) -> float:
    """The root of the mean square; 0 of no numbers."""
    return float(x.detach().double().square().mean().sqrt()) if x.numel() else 0.0


def relative_rms(x: Tensor, exact: Tensor) -> float:
    """The rms of the error over that of the exact numbers; infinite if only the latter is 0."""
    error, scale = rms(x.double() - exact.double()), rms(exact)
    return 0.0 if error == 0 else error / scale if scale else float("inf")
