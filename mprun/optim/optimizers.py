"""AdamW, SGD and RMSprop over parameters and moments in 16 bits, each with its formula.

Their options are those of `torch.optim`, and those of `StorageOptions` (`rounding`, ...).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mprun.optim.base import LowPrecisionOptimizer, StorageOptions
from mprun.optim.formulas import QUOTIENTS, Results, formula, root

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in `typing` from Python 3.11 on


@formula
def adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Tensor) -> Results:
    """AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019)."""
    # h: 1 and 2 beta1 and the rest to 1, 3 and 4 the same of beta2, 5 lr * weight_decay, 6 and 7
    # the bias corrections of m (with lr) and of the root of v, 8 eps
    m = m * h[1] + g * h[2]
    v = v * h[3] + (g * g) * h[4]
    decay = torch.where(torch.isfinite(w), w * h[5], 0.0)  # infinity less infinity would be NaN
    return decay + h[6] * (m / (root(v) * h[7] + h[8])), m, v


QUOTIENTS.add("adamw")


class AdamW(LowPrecisionOptimizer):
    """`torch.optim.AdamW` with parameters and moments in low dtypes.

    eps is added in float32: float16 has no 1e-8.
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
        **storage: Unpack[StorageOptions],
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}; legal is 0 or more and below 1, each")
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **storage
        )

    def formula_of(self, group: dict[str, Any]) -> str:
        return "adamw"

    def hyper(self, group: dict[str, Any], step: Any) -> list[Any]:
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        decays = [beta1, 1 - beta1, beta2, 1 - beta2, lr * group["weight_decay"]]
        # As in PyTorch, the root is corrected before eps is added
        return [*decays, lr / (1 - beta1**step), (1 - beta2**step) ** -0.5, group["eps"]]


@formula
def sgd(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Tensor) -> Results:
    """SGD with momentum, as in PyTorch."""
    # h: 1 weight_decay, 2 momentum, 3 lr, 4 one less dampening
    g = g + w * h[1]
    m = m * h[2] + g * h[4]
    return h[3] * m, m, v


@formula
def nesterov(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Tensor) -> Results:
    """SGD with Nesterov's momentum (Sutskever et al., 2013, as in PyTorch)."""
    g = g + w * h[1]
    m = m * h[2] + g
    return h[3] * (g + m * h[2]), m, v


class SGD(LowPrecisionOptimizer):
    """`torch.optim.SGD` with parameters and momentum in low dtypes."""

    first = "momentum_buffer"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **storage: Unpack[StorageOptions],
    ) -> None:
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(
                f"nesterov with momentum={momentum}, dampening={dampening}; legal is a momentum "
                "above 0 without dampening"
            )
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening}
        defaults |= {"weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults, **storage)

    def formula_of(self, group: dict[str, Any]) -> str:
        return "nesterov" if group["nesterov"] else "sgd"

    def hyper(self, group: dict[str, Any], step: Any) -> list[Any]:
        # As in PyTorch, the first step adds the whole gradient to the momentum, and without
        # momentum nothing is dampened.
        later = (step > 1).to(step.dtype) if isinstance(step, Tensor) else step > 1
        undamped = 1 - group["dampening"] * later if group["momentum"] else 1.0
        return [group["weight_decay"], group["momentum"], float(group["lr"]), undamped]


@formula
def rmsprop(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Tensor) -> Results:
    """RMSprop (Hinton, lecture 6e, 2012), eps outside the root, momentum as in PyTorch."""
    # h: 1 weight_decay, 2 and 3 alpha and the rest to 1, 4 momentum, 5 eps, 6 lr
    g = g + w * h[1]
    v = v * h[2] + (g * g) * h[3]
    m = m * h[4] + g / (root(v) + h[5])
    return h[6] * m, m, v


class RMSprop(LowPrecisionOptimizer):
    """`torch.optim.RMSprop` with parameters and moments in low dtypes."""

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
        **storage: Unpack[StorageOptions],
    ) -> None:
        defaults = {"lr": lr, "alpha": alpha, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, defaults, **storage)

    def formula_of(self, group: dict[str, Any]) -> str:
        return "rmsprop"

    def hyper(self, group: dict[str, Any], step: Any) -> list[Any]:
        alpha, lr = group["alpha"], float(group["lr"])
        return [group["weight_decay"], alpha, 1 - alpha, group["momentum"], group["eps"], lr]
