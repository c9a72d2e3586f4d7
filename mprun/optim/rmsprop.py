"""RMSprop over parameters and moments in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mprun.optim.base import Keep, LowPrecisionOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in `typing` from Python 3.11 on


class RMSprop(LowPrecisionOptimizer):
    """`torch.optim.RMSprop` that keeps parameters and moments in low dtypes.

    How they are kept (`rounding`, `momentum_dtype`, ...): see `Keep`.
    """

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
        **keep: Unpack[Keep],
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
            **keep,
        )

    def formula_of(self, group: dict[str, Any]) -> str:
        return "rmsprop"

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
