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

    first = "momentum_buffer"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **keep: Unpack[Keep],
    ) -> None:
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(
                f"nesterov with momentum={momentum}, dampening={dampening}; legal is a momentum "
                "above 0 without dampening"
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
            },
            **keep,
        )

    def formula_of(self, group: dict[str, Any]) -> str:
        return "nesterov" if group["nesterov"] else "sgd"

    def keeps_first(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"])

    def hyper(self, group: dict[str, Any], step: Any) -> list[Any]:
        # The first step takes the whole gradient for the momentum, as PyTorch's does; without
        # momentum nothing is dampened.
        kept = 1 - group["dampening"] * (step > 1) if group["momentum"] else 1.0
        return [group["weight_decay"], group["momentum"], float(group["lr"]), kept]
