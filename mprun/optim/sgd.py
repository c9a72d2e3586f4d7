"""SGD with momentum over parameters and momentum in 16 bits."""

from __future__ import annotations

from typing import Any

import torch

from mprun.optim.base import LowPrecisionOptimizer


class SGD(LowPrecisionOptimizer):
    """`torch.optim.SGD` that keeps parameters and momentum in low dtypes.

    Arguments from `rounding` on as for `LowPrecisionOptimizer`.
    """

    formula = "sgd"
    first = "momentum_buffer"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        rounding: str = "stochastic",
        momentum_dtype: torch.dtype = torch.float32,
        overflow: str = "infinity",
        seed: int = 0,
        engine: str | None = None,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov},
            rounding=rounding,
            momentum_dtype=momentum_dtype,
            variance_dtype=torch.float32,
            overflow=overflow,
            seed=seed,
            engine=engine,
        )

    def keeps_first(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"])

    def hyper(self, group: dict[str, Any], step: Any) -> list[Any]:
        ahead = group["nesterov"]
        momentum = group["momentum"]
        return [
            group["weight_decay"],
            momentum,
            float(group["lr"]),
            1.0 if ahead else 0.0,
            momentum if ahead else 1.0,
        ]
