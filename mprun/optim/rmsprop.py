"""RMSprop over parameters and moments in 16 bits."""

from __future__ import annotations

from typing import Any

import torch

from mprun.optim.base import LowPrecisionOptimizer


class RMSprop(LowPrecisionOptimizer):
    """`torch.optim.RMSprop` that keeps parameters and moments in low dtypes.

    Arguments from `rounding` on as for `LowPrecisionOptimizer`.
    """

    formula = "rmsprop"
    first = "momentum_buffer"
    second = "square_avg"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        *,
        rounding: str = "stochastic",
        momentum_dtype: torch.dtype = torch.float32,
        variance_dtype: torch.dtype = torch.float32,
        overflow: str = "infinity",
        seed: int = 0,
        engine: str | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "alpha": alpha,
                "eps": eps,
                "weight_decay": weight_decay,
                "momentum": momentum,
            },
            rounding=rounding,
            momentum_dtype=momentum_dtype,
            variance_dtype=variance_dtype,
            overflow=overflow,
            seed=seed,
            engine=engine,
        )

    def keeps_first(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"])

    def hyper(self, group: dict[str, Any], step: Any) -> list[Any]:
        alpha = group["alpha"]
        return [
            group["weight_decay"],
            alpha,
            1 - alpha,
            group["momentum"],
            group["eps"],
            float(group["lr"]),
        ]
