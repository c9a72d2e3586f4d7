"""The optimizer that a policy needs, of the class that the user wants.

An optimizer computes in the dtype of its parameters and state, so in 16 bits most lose small
updates. What is stored decides which object does the work:

    float32 everywhere           the class itself
    16 bits, SGD, RMSprop,       its namesake in `mprun.optim`: computes in float32, rounds once as
    AdamW                        the policy says, stores moments in the policy's dtypes
    16 bits, any other class     the class on float32 masters of the parameters (`MasterWeights`),
                                 which are rounded into the parameters as the policy says

A run chooses in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.optim import formulas, optimizers  # noqa: F401 (its classes are `NAMESAKES`)
from mprun.optim.base import LowPrecisionOptimizer, StorageOptions, kept_in
from mprun.optim.masters import MasterWeights, masters_of
from mprun.precision.policy import Policy, dtype_name, policy, torch_dtype
from mprun.precision.products import LOW

# PyTorch's class, and the one of its name in `optimizers`, which rounds what it stores
NAMESAKES: dict[type[Optimizer], type[LowPrecisionOptimizer]] = {
    getattr(torch.optim, kind.__name__): kind for kind in LowPrecisionOptimizer.__subclasses__()
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
        mode: a policy or its name: `precision.policy`.
        kind: a class of `torch.optim`, or another one that takes the gradients of one backward
            pass.
        parameters: as for any optimizer, of prepared models; frozen ones (`requires_grad=False`)
            are left out.
        seed: of the random bits of stochastic rounding.
        options: of `kind`. `foreach` and `fused` have no effect where mprun's own class computes.

    Raises:
        ValueError: no mode has this name, no parameter is trained, the parameters are float32 and
            the mode's are not (the model is not prepared), or mprun's class lacks an option.
    """
    row = policy(mode) if isinstance(mode, str) else mode
    groups = trained_groups(parameters)
    dtypes = {p.dtype for group in groups for p in group["params"]}
    if not dtypes:
        raise ValueError("no parameter is trained (requires_grad=False, or none was given)")
    if row.param_dtype != "float32" and not dtypes & {*LOW}:
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
    """The namesake of `kind` in `mprun.optim`, which stores and rounds as the policy says.

    Args:
        mode: the policy.
        kind: a class of `NAMESAKES`.
        parameters: as for any optimizer.
        seed, engine: see `StorageOptions`.
        options: of the formula, such as lr.
    """
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
    return any(dtype != "float32" for dtype in stored)


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

    A moment is in uint8 if that of one parameter is: small ones keep float32.

    Args:
        optimizer: PyTorch's compute and store the moments in float32 here.
        stored: dtypes of the parameters.
    """
    row = {"rounding": "nearest", "rounding_scope": "update", "overflow": "infinity"}
    row |= {"momentum_dtype": "float32", "variance_dtype": "float32"}
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
