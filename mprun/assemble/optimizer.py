"""Which optimizer a run gets: PyTorch's, or the one that stores parameters and state in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mprun import optim
from mprun.config.schema import OptimizerConfig, OptimizerName
from mprun.config.validate import kept_moments
from mprun.doctor.speed_choices import SpeedChoice
from mprun.optim import engines
from mprun.precision import Policy
from mprun.precision.layers import layer_precision
from mprun.precision.policy import torch_dtype


def keeps_low_precision(policy: Policy, layers: Mapping[str, str], config: OptimizerConfig) -> bool:
    """Whether the optimizer writes anything in 16 bits: parameters, layers or moments."""
    moments = {getattr(policy, f"{moment}_dtype") for moment in kept_moments(config)}
    in_layers = {layer_precision(value, policy.casting).stored for value in layers.values()}
    return {policy.param_dtype, *moments} != {"float32"} or not in_layers <= {torch.float32}


def engine_for(speed: str, device: torch.device, earlier: str | None = None) -> str:
    """The engine of a low-precision optimizer; all of them give the same bits on one device.

    Args:
        speed: `plain` takes the one without a compiler.
        device: where the parameters are.
        earlier: the engine that a resumed run had; taken again where it is available.
    """
    if speed == "plain" or earlier == "eager":
        return "eager"
    return engines.fastest(device)


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    lr: float,
    policy: Policy,
    speed: SpeedChoice,
    seed: int,
) -> Optimizer:
    """The optimizer, with the implementation `speed` chose."""
    if speed.optimizer_impl in engines.ENGINES:
        return _low_precision(config, model, lr, policy, speed.optimizer_impl, seed)
    return _torch(config, model, lr, speed)


def _torch(config: OptimizerConfig, model: nn.Module, lr: float, speed: SpeedChoice) -> Optimizer:
    parameters = model.parameters()
    how: dict[str, Any] = speed.optimizer_options()
    options = _options(config, lr)
    if config.name is OptimizerName.sgd:
        return torch.optim.SGD(parameters, **options, **how)
    if config.name is OptimizerName.rmsprop:
        return torch.optim.RMSprop(parameters, **options, foreach=how["foreach"])
    return torch.optim.AdamW(parameters, **options, **how)


def _low_precision(
    config: OptimizerConfig, model: nn.Module, lr: float, policy: Policy, engine: str, seed: int
) -> Optimizer:
    kinds: dict[OptimizerName, Any] = {
        OptimizerName.sgd: optim.SGD,
        OptimizerName.rmsprop: optim.RMSprop,
        OptimizerName.adamw: optim.AdamW,
    }
    moments = {"momentum_dtype": torch_dtype(policy.momentum_dtype)}
    if config.name is not OptimizerName.sgd:
        moments["variance_dtype"] = torch_dtype(policy.variance_dtype)
    made: Optimizer = kinds[config.name](
        model.parameters(),
        **_options(config, lr),
        **moments,
        rounding=policy.rounding,
        overflow=policy.overflow,
        seed=seed,
        engine=engine,
    )
    return made


def _options(config: OptimizerConfig, lr: float) -> dict[str, Any]:
    """The constructor's arguments, the same for PyTorch's class and ours."""
    shared = {"lr": lr, "weight_decay": config.weight_decay}
    if config.name is OptimizerName.sgd:
        return {**shared, "momentum": config.momentum}
    if config.name is OptimizerName.rmsprop:
        return {**shared, "momentum": config.momentum, "alpha": config.alpha, "eps": config.eps}
    return {**shared, "betas": (config.beta1, config.beta2), "eps": config.eps}
