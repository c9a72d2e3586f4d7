"""The precision of a loop that mprun does not own, read while it trains.

The loop has no configuration, so each column of the policy is read from what decides it: the
parameters, their gradients, the optimizer, the backend switches, and the autocast state at the
layers of the first step. The mode is the one whose row of the table fits, else `custom`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mprun._torch import is_compiled
from mprun.optim.by_policy import rounding_columns
from mprun.precision import Precision
from mprun.precision.policy import NAMED, Policy, dtype_name, policy
from mprun.precision.switches import tf32_is_on
from mprun.records.run_record import PrecisionRow

CUSTOM = "custom"
"""The name of a mode that no row of the table fits."""


class AutocastReader:
    """Which dtypes autocast has while the layers of a model run."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device_type = device_of(model).type
        self.dtypes: Counter[torch.dtype] = Counter()
        """How many calls of layers autocast would cast to a dtype."""

    def note(self) -> None:
        """Count the state of autocast now."""
        if torch.is_autocast_enabled(self._device_type):
            self.dtypes[torch.get_autocast_dtype(self._device_type)] += 1

    @property
    def dtype(self) -> torch.dtype | None:
        """The most frequent one; None without autocast."""
        return self.dtypes.most_common(1)[0][0] if self.dtypes else None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks at the layers count while this is entered; those of compiled code would be traced.

        A region that `forward` enters itself is only seen from inside.
        """
        compiled = any(map(is_compiled, self._model.modules()))
        layers = [] if compiled else [m for m in self._model.modules() if _is_layer(m)]
        handles = [layer.register_forward_pre_hook(self._hook) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, module: nn.Module, args: Any) -> None:
        self.note()


def _is_layer(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter; the CPU without any."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def observed_row(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    autocast: Counter[torch.dtype],
    precision: Precision | None = None,
) -> PrecisionRow:
    """The columns of a training.

    Args:
        model: what trains.
        optimizers: its optimizers; the first one's rounding and moments are recorded.
        autocast: see `AutocastReader`.
        precision: the loop's, if it has one, which decides the casts.
    """
    floating = [p for p in model.parameters() if p.is_floating_point()]
    param = _most(floating, lambda p: p.dtype)
    trained = [p for p in floating if p.requires_grad]
    casts = {"casting": "none", "compute_dtype": dtype_name(param)}
    if autocast:
        [(dtype, _)] = autocast.most_common(1)
        casts = {"casting": "autocast", "compute_dtype": dtype_name(dtype)}
    row: dict[str, Any] = {
        "param_dtype": dtype_name(param),
        "accum_dtype": dtype_name(_most(trained, lambda p: p.grad_dtype or p.dtype)),
        "output_dtype": casts["compute_dtype"],
        "op_lists": "none",
        "layers": {},
        "tf32": tf32_is_on(device_of(model)),
        **casts,
        **rounding_columns(optimizers[0], [p.dtype for p in floating]),
        **({} if precision is None else precision.columns),
    }
    return PrecisionRow(**row)


def _most(
    parameters: Sequence[nn.Parameter], kind: Callable[[nn.Parameter], torch.dtype]
) -> torch.dtype:
    """The dtype of most numbers; float32 without any."""
    counts: Counter[torch.dtype] = Counter()
    for p in parameters:
        counts[kind(p)] += p.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


TELLING = ("param_dtype", "compute_dtype", "casting", "rounding", "rounding_scope", "tf32")
"""The columns in which the modes differ."""


def mode_name(row: PrecisionRow) -> str:
    """The mode with these columns, or `CUSTOM`."""

    def fits(mode: Policy) -> bool:
        return all(getattr(mode, column) == getattr(row, column) for column in TELLING)

    return next((name for name in NAMED if fits(policy(name))), CUSTOM)
