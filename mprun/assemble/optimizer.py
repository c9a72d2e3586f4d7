"""Which optimizer a run gets: PyTorch's, or the one that stores parameters and state in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mprun import optim
from mprun.config.schema import OptimizerConfig, OptimizerName
from mprun.config.validate import stored_moments
from mprun.doctor.speed_choices import SpeedChoice
from mprun.optim import engines
from mprun.precision import Policy
from mprun.precision.layers import layer_precision
from mprun.precision.policy import torch_dtype

CLASSES: dict[OptimizerName, tuple[type[Optimizer], type[optim.LowPrecisionOptimizer]]] = {
    OptimizerName.sgd: (torch.optim.SGD, optim.SGD),
    OptimizerName.rmsprop: (torch.optim.RMSprop, optim.RMSprop),
    OptimizerName.adamw: (torch.optim.AdamW, optim.AdamW),
}
"""PyTorch's class, and the one that rounds what it stores."""


def stores_low_precision(
    policy: Policy, layers: Mapping[str, str], config: OptimizerConfig
) -> bool:
    """Whether the optimizer writes anything in 16 bits: parameters, layers or moments."""
    moments = {getattr(policy, f"{moment}_dtype") for moment in stored_moments(config)}
    in_layers = {layer_precision(value, policy.casting).stored for value in layers.values()}
    return {policy.param_dtype, *moments} != {"float32"} or not in_layers <= {torch.float32}


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    lr: float,
    policy: Policy,
    speed: SpeedChoice,
    seed: int,
) -> Optimizer:
    """The optimizer, with the implementation in `speed`."""
    in_torch, low_precision = CLASSES[config.name]
    options: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay}
    if config.name is OptimizerName.adamw:
        options |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
    else:
        options["momentum"] = config.momentum
    if config.name is OptimizerName.rmsprop:
        options |= {"alpha": config.alpha, "eps": config.eps}
    if speed.optimizer_impl not in engines.ENGINES:
        options |= speed.optimizer_options()
        if config.name is OptimizerName.rmsprop:
            del options["fused"]  # RMSprop has no fused kernels
        return in_torch(model.parameters(), **options)
    options["momentum_dtype"] = torch_dtype(policy.momentum_dtype)
    if config.name is not OptimizerName.sgd:
        options["variance_dtype"] = torch_dtype(policy.variance_dtype)
    options |= {"rounding": policy.rounding, "overflow": policy.overflow}
    return low_precision(model.parameters(), **options, seed=seed, engine=speed.optimizer_impl)
