"""SGD with momentum over parameters and momentum in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mprun.optim.base import Keep, LowPrecisionOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in `typing` from Python 3.11 on


class SGD(LowPrecisionOptimizer):
    """`torch.optim.SGD` that keeps parameters and momentum in low dtypes.

    How they are kept (`rounding`, `momentum_dtype`, ...): see `Keep`.
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
        **keep: Unpack[Keep],
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov},
            **keep,
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
