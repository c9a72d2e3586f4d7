"""AdamW, SGD and RMSprop with parameters and moments in 16 bits; which optimizer a policy needs.

Their options are those of `torch.optim`, and those of `StorageOptions` (`rounding`, ...). In 16
bits most optimizers lose small updates, so what is stored decides which object does the work:

    float32 everywhere           the class itself
    16 bits, SGD, RMSprop,       its namesake here: computes in float32, rounds once as the policy
    AdamW                        says, stores moments in the policy's dtypes
    16 bits, any other class     the class on float32 masters of the parameters (`MasterWeights`),
                                 which are rounded into the parameters as the policy says
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.optim import formulas
from mprun.optim.base import LowPrecisionOptimizer, StorageOptions, kept_in
from mprun.optim.formulas import QUOTIENTS, Results, formula, root
from mprun.optim.masters import MasterWeights, masters_of
from mprun.precision.policy import Policy, dtype_name, policy_of, torch_dtype
from mprun.precision.products import LOW
from mprun.records.policy_columns import WIDE_DTYPES

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in `typing` from Python 3.11 on


@formula
def adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, h: Tensor) -> Results:
    """AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019)."""
    # h: 1 and 2 beta1 and the rest to 1, 3 and 4 the same of beta2, 5 lr * weight_decay, 6 and 7
    # the bias corrections of m (with lr) and of the root of v, 8 eps
    m = m * h[1] + g * h[2]
    v = v * h[3] + (g * g) * h[4]
    decay = w.nan_to_num(0.0, 0.0, 0.0) * h[5]  # infinity less infinity would be NaN
    return decay + h[6] * (m / (root(v) * h[7] + h[8])), m, v


QUOTIENTS.add("adamw")


class AdamW(LowPrecisionOptimizer):
    """`torch.optim.AdamW` with low dtypes: `AdamW(model.bfloat16().parameters())`.

    `params`, `lr`, `betas`, `eps` and `weight_decay` as there, but eps is added in float32: float16
    has no 1e-8. `storage` are the `StorageOptions`. Raises `ValueError` for what is not legal.
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
    """`torch.optim.SGD` with low dtypes: `SGD(model.bfloat16().parameters(), lr=0.1)`.

    `params`, `lr`, `momentum`, `dampening`, `weight_decay` and `nesterov` as there; `storage` are
    the `StorageOptions`. Raises `ValueError` for what is not legal.
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
    """`torch.optim.RMSprop` with low dtypes: `RMSprop(model.bfloat16().parameters())`.

    `params`, `lr`, `alpha`, `eps`, `weight_decay` and `momentum` as there; `storage` are the
    `StorageOptions`. Raises `ValueError` for what is not legal.
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


# PyTorch's class, and the one of its name here, which rounds what it stores
NAMESAKES: dict[type[Optimizer], type[LowPrecisionOptimizer]] = {
    getattr(torch.optim, kind.__name__): kind for kind in (AdamW, SGD, RMSprop)
}
KERNELS = ("foreach", "fused")  # Options of PyTorch's classes that choose kernels, not results


def for_policy(
    mode: Policy | str,
    kind: type[Optimizer],
    parameters: Iterable[Any],
    *,
    seed: int = 0,
    **options: Any,
) -> Optimizer:
    """An optimizer like `kind(parameters, **options)` for parameters as the policy stores them.

    Args:
        mode: a policy or its name: `for_policy("bf16_sr", torch.optim.SGD, model.parameters())`.
        kind: a class of `torch.optim`, or another one that takes the gradients of one backward
            pass.
        parameters: as for any optimizer, of prepared models; frozen ones (`requires_grad=False`)
            are left out.
        seed: of the random bits of stochastic rounding.
        options: of `kind`. `foreach` and `fused` have no effect where mprun's own class computes.

    Raises:
        TypeError: `mode` is neither a policy nor a name.
        ValueError: no mode has this name, no parameter is trained, the parameters are float32 and
            the mode's are not (the model is not prepared), or mprun's class lacks an option.
    """
    row = policy_of(mode)
    groups = trained_groups(parameters)
    dtypes = {p.dtype for group in groups for p in group["params"]}
    if not dtypes:
        raise ValueError("no parameter is trained (requires_grad=False, or none was given)")
    if row.param_dtype != "float32" and not dtypes & {*LOW, torch.float64}:
        raise ValueError(
            f"precision={row.name} stores parameters in {row.param_dtype}, and these are float32: "
            "call precision.prepare(model) before, then pass model.parameters()"
        )
    low = bool(dtypes & {*LOW})
    if kind in NAMESAKES and (low or low_moments(row, kind, options)):
        return low_precision(row, kind, groups, seed, **_taken(kind, options, row))
    if not low:
        return kind(groups, **options)
    masters = masters_of(p for group in groups for p in group["params"])
    of = {p: master for master, p in masters.items()}
    replaced = [{**g, "params": [of.get(p, p) for p in g["params"]]} for g in groups]
    return with_masters(row, kind(replaced, **options), masters, seed)


def low_precision(
    mode: Policy,
    kind: type[Optimizer],
    parameters: Any,
    seed: int,
    engine: str | None = None,
    **options: Any,
) -> LowPrecisionOptimizer:
    """The namesake of `kind` in `NAMESAKES`, which stores and rounds as the policy says."""
    storage: StorageOptions = {
        "momentum_dtype": torch_dtype(mode.momentum_dtype),
        "rounding": mode.rounding,
        "overflow": mode.overflow,
        "seed": seed,
        "engine": engine,
    }
    if NAMESAKES[kind].second is not None:
        storage["variance_dtype"] = torch_dtype(mode.variance_dtype)
    return NAMESAKES[kind](parameters, **options, **storage)


def with_masters(
    mode: Policy, inner: Optimizer, masters: Mapping[nn.Parameter, nn.Parameter], seed: int
) -> MasterWeights:
    """`inner`, which holds the masters, around parameters that are rounded as the policy says."""
    return MasterWeights(inner, masters, rounding=mode.rounding, overflow=mode.overflow, seed=seed)


def low_moments(mode: Policy, kind: type[Optimizer], options: Mapping[str, Any]) -> bool:
    """Whether an optimizer of a class in `NAMESAKES` stores a moment in 16 bits."""
    first = bool(options.get("momentum", "momentum" not in inspect.signature(kind).parameters))
    second = NAMESAKES[kind].second is not None
    stored = [mode.momentum_dtype] * first + [mode.variance_dtype] * second
    return any(dtype not in WIDE_DTYPES for dtype in stored)


def trained_groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups of the parameters that are not frozen; names of `named_parameters()` are dropped.

    The random bits depend on the names that `Precision.prepare` gave.
    """
    given = list(parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    kept = []
    for group in groups:
        held = group["params"]
        held = [held] if isinstance(held, torch.Tensor) else list(held)
        held = [p[1] if isinstance(p, tuple) else p for p in held]
        kept.append({**group, "params": [p for p in held if p.requires_grad]})
    return [group for group in kept if group["params"]]


def _taken(kind: type[Optimizer], options: Mapping[str, Any], mode: Policy) -> dict[str, Any]:
    """The options that the namesake has; those at their default have no effect."""
    legal = [name for name in inspect.signature(NAMESAKES[kind]).parameters if name != "storage"]
    defaults = {n: p.default for n, p in inspect.signature(kind).parameters.items()}
    taken = {}
    for name, value in options.items():
        if name in legal:
            taken[name] = value
        elif name not in KERNELS and (name not in defaults or value != defaults[name]):
            raise ValueError(
                f"{name}={value}: {kind.__name__} in precision={mode.name} has no such option; "
                f"legal: {', '.join(n for n in legal if n != 'params')}"
            )
    return taken


def rounding_columns(optimizer: Optimizer, stored: Sequence[torch.dtype]) -> dict[str, str]:
    """The dtypes of an optimizer's moments, and its rounding to 16 or 8 bits.

    A moment is in uint8 if that of one parameter is: small ones keep float32. PyTorch's optimizers
    compute and store the moments in float32 here, or in float64 like the parameters.
    """
    row = {"rounding": "nearest", "rounding_scope": "update", "overflow": "infinity"}
    wide = "float64" if torch.float64 in stored else "float32"
    row |= {"momentum_dtype": wide, "variance_dtype": wide}
    if isinstance(optimizer, MasterWeights):
        return row | {"rounding": optimizer.rounding, "overflow": optimizer.overflow}
    if not isinstance(optimizer, LowPrecisionOptimizer):
        return row
    group = optimizer.param_groups[0]
    # The one whose moments are in 8 bits if those of any are: small ones are in float32
    largest = max((p for g in optimizer.param_groups for p in g["params"]), key=Tensor.numel)
    momentum, variance = (kept_in(group[f"{m}_dtype"], largest) for m in ("momentum", "variance"))
    # SGD without momentum stores none
    first = momentum if optimizer.keeps_first(group) else torch.float32
    second = torch.float32 if optimizer.second is None else variance
    low = (*LOW, formulas.DTYPE)
    row["momentum_dtype"], row["variance_dtype"] = dtype_name(first), dtype_name(second)
    rounding: str = group["rounding"]
    if not any(dtype in low for dtype in (*stored, first, second)):
        return row
    if any(dtype in LOW for dtype in stored):
        row["rounding"] = rounding
    elif second in low or rounding != "nearest":  # moments have no remainder
        row["rounding"] = "stochastic"
    row["overflow"] = group["overflow"]
    return row
