"""AdamW over parameters and moments in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mprun.optim.base import Keep, LowPrecisionOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in `typing` from Python 3.11 on


class AdamW(LowPrecisionOptimizer):
    """`torch.optim.AdamW` that keeps parameters and moments in low dtypes.

    eps is added in float32: float16 has no 1e-8.

    How they are kept (`rounding`, `momentum_dtype`, ...): see `Keep`.
    """

    first = "exp_avg"
    second = "exp_avg_sq"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **keep: Unpack[Keep],
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}; legal is 0 or more and below 1, each")
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            **keep,
        )

    def formula_of(self, group: dict[str, Any]) -> str:
        return "adamw"

    def hyper(self, group: dict[str, Any], step: Any) -> list[Any]:
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
        return [
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            lr * group["weight_decay"],
            lr / (1 - beta1**step),
            (1 - beta2**step) ** -0.5,
            group["eps"],
        ]
