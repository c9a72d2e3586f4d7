"""Which optimizer a run gets.

By name, PyTorch's, or the one of `mprun.optim` that stores parameters and state in 16 bits. By
import path, or made by the recipe, any other: one that computes in its parameters' dtype, so with
16-bit parameters it gets float32 masters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mprun import optim
from mprun._torch import eager_optimizer
from mprun.assemble import optimizer_class
from mprun.assemble.learning_rate import build_schedule
from mprun.config import Config
from mprun.config.schema import OptimizerConfig, OptimizerName
from mprun.config.validate import stored_moments
from mprun.doctor.speed_choices import SpeedChoice
from mprun.errors import UsageError
from mprun.numerics.memory_recorder import fake_tensors
from mprun.optim import engines
from mprun.optim.by_policy import low_precision, with_masters
from mprun.precision import Policy
from mprun.precision.convert import convert
from mprun.precision.layers import layer_precisions, own_precisions
from mprun.precision.policy import torch_dtype
from mprun.recipe import Recipe
from mprun.train.user_code import model_of

CLASSES: dict[OptimizerName, type[Optimizer]] = {
    OptimizerName.sgd: torch.optim.SGD,
    OptimizerName.rmsprop: torch.optim.RMSprop,
    OptimizerName.adamw: torch.optim.AdamW,
}


def stores_low_precision(
    policy: Policy, layers: Mapping[str, str], config: OptimizerConfig
) -> bool:
    """Whether the optimizer writes anything in 16 bits: parameters, layers or moments."""
    moments = {getattr(policy, f"{moment}_dtype") for moment in stored_moments(config)}
    in_layers = {x.stored for x in own_precisions(layers.values(), policy.casting)}
    return {policy.param_dtype, *moments} != {"float32"} or not in_layers <= {torch.float32}


FUSED = ("torch.optim.Adam", "torch.optim.AdamW")
"""Import paths of classes with the fused kernel that was measured."""

OPTIMIZER_KEYS = (
    "train.lr",
    "batch.lr_rule",
    *(f"train.optimizer.{f.name}" for f in fields(OptimizerConfig)),
)
SCHEDULE_KEYS = ("train.scheduler", "train.warmup_steps", "train.min_lr")


def optimizer_name(config: OptimizerConfig, recipe: Recipe) -> str:
    """The name of a run's optimizer, its import path, or the recipe's class that makes it."""
    if recipe.makes_optimizer:
        return f"{type(recipe).__name__}.optimizer"
    return config.name.name if config.target is None else config.target


def unused_by(recipe: Recipe) -> dict[str, str]:
    """Keys without effect because the recipe makes its own optimizer or schedule, and which."""
    own = dict.fromkeys(OPTIMIZER_KEYS, "optimizer") if recipe.makes_optimizer else {}
    return own | (dict.fromkeys(SCHEDULE_KEYS, "schedule") if recipe.makes_schedule else {})


def unused_weight_decay(
    config: OptimizerConfig, recipe: Recipe, given: Sequence[str]
) -> str | None:
    """A sentence if the user set a weight decay that the class at the import path does not take."""
    key = "train.optimizer.weight_decay"
    if key not in given or config.target is None or recipe.makes_optimizer:
        return None
    if optimizer_class.takes(optimizer_class.optimizer_class(config.target), "weight_decay"):
        return None
    return f"{key} has no effect: {config.target} takes none"


def check_optimizer(
    config: Config,
    recipe: Recipe,
    policy: Policy,
    layers: Mapping[str, str],
    speed: SpeedChoice,
    lr: float,
) -> None:
    """Make the optimizer and its schedule of a model on fake tensors, to report mistakes early.

    A model or an optimizer that reads values cannot be made like this; then the run finds out. An
    optimizer by name is made of values that were checked, so only the model is looked at, on the
    meta device, which imports less than fake tensors.

    Raises:
        UsageError: see `build_optimizer` and `build_schedule`.
    """
    is_named = config.train.optimizer.target is None and not recipe.makes_optimizer
    try:
        if is_named and not recipe.makes_schedule:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                check_trainable(model_of(recipe), recipe)
            return
        with fake_tensors():
            warnings.simplefilter("ignore")  # the run itself shows them
            model = model_of(recipe)
            stored = {n: row.stored for n, row in layer_precisions(layers, policy).items()}
            dtype = torch_dtype(policy.param_dtype)
            convert(model, torch.device("cpu"), dtype, layers=stored)
            section = config.train.optimizer
            optimizer = build_optimizer(section, recipe, model, lr, policy, speed, config.seed)
            build_schedule(config.train, recipe, optimizer, steps=None)
    except UsageError:
        raise
    except Exception:  # the model or the optimizer is the user's, and may need values
        return


def choose_implementation(
    config: OptimizerConfig,
    recipe: Recipe,
    low: bool,
    chosen: str,
    untrusted: Path | None = None,
) -> str | None:
    """The implementation of an optimizer that has no name in mprun: masters, own, or PyTorch's.

    Args:
        config: the optimizer section.
        recipe: the recipe, which may make its own.
        low: whether parameters are stored in 16 bits.
        chosen: what was measured to be the fastest.
        untrusted: a folder whose code is not run.

    Returns:
        None for one with a name.

    Raises:
        UsageError: there is no such class, or it does not take the arguments.
    """
    if recipe.makes_optimizer:
        return "masters" if low else "own"
    if config.target is None:
        return None
    kind = optimizer_class.optimizer_class(config.target, untrusted)
    optimizer_class.check_arguments(kind, config.args)
    if low and issubclass(kind, torch.optim.SparseAdam):
        raise UsageError(
            f"train.optimizer.target={config.target} takes sparse gradients, and parameters in 16 "
            "bits have none; legal: another optimizer, or precision=bf16_mixed"
        )
    return "masters" if low else optimizer_class.implementation(kind, config.args, chosen)


def build_optimizer(
    config: OptimizerConfig,
    recipe: Recipe,
    model: nn.Module,
    lr: float,
    policy: Policy,
    speed: SpeedChoice,
    seed: int,
) -> Optimizer:
    """The optimizer of the parameters that are not frozen, with the implementation in `speed`.

    Raises:
        UsageError: all are frozen, the recipe's `optimizer` gives something else, or the class
            does not take its arguments.
    """
    check_trainable(model, recipe)
    if not recipe.makes_optimizer and config.target is None:
        return _named(config, model, lr, policy, speed, seed)

    def make() -> Optimizer:
        if recipe.makes_optimizer:
            return _recipes_own(recipe, model)
        kind = optimizer_class.optimizer_class(str(config.target))
        return optimizer_class.make(kind, trained(model), config, lr, speed.optimizer_impl)

    if speed.optimizer_impl != "masters":
        return make()
    return _with_masters(make, model, policy, seed)


def check_trainable(model: nn.Module, recipe: Recipe) -> None:
    """Raise `UsageError` where all parameters of a recipe's model are frozen."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            f"all parameters of the model of {type(recipe).__name__} are frozen "
            "(requires_grad=False): there is nothing to train; leave one unfrozen"
        )


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def _recipes_own(recipe: Recipe, model: nn.Module) -> Optimizer:
    name = f"optimizer(model) of {type(recipe).__name__}"
    optimizer = recipe.optimizer(model)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"{name} gave {optimizer_class.article(optimizer)}; legal is a torch.optim.Optimizer"
        )
    optimizer_class.refuse_closures(type(optimizer), name)
    known = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(p) in known for p in held):
        raise UsageError(f"{name} holds no parameter of the model that it was given")
    for group in optimizer.param_groups:  # frozen ones never have a gradient
        group["params"] = [p for p in group["params"] if p.requires_grad]
    return optimizer


def _with_masters(
    make: Callable[[], Optimizer], model: nn.Module, policy: Policy, seed: int
) -> Optimizer:
    """What `make` gives, on float32 masters of the 16-bit parameters."""
    if policy.rounding == "split":
        raise UsageError(
            "precision.rounding=split with an optimizer that gets float32 masters; legal: "
            "precision.rounding=nearest, or train.optimizer.name"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(
                f"precision={policy.name}: {name or type(module).__name__} makes sparse gradients "
                "(sparse=True), and parameters in 16 bits have none; legal: sparse=False, or "
                "precision=bf16_mixed"
            )
    with optim.float32_masters(model) as masters:
        inner = make()
    if isinstance(inner, optim.LowPrecisionOptimizer):
        inner_kind = f"mprun.optim.{type(inner).__name__}"
        raise UsageError(
            f"{inner_kind} stores 16 bits itself and needs no float32 masters; "
            f"legal is train.optimizer.name={type(inner).__name__.lower()}"
        )
    return with_masters(policy, inner, masters, seed)


def _named(
    config: OptimizerConfig,
    model: nn.Module,
    lr: float,
    policy: Policy,
    speed: SpeedChoice,
    seed: int,
) -> Optimizer:
    kind = CLASSES[config.name]
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
        return eager_optimizer(kind)(trained(model), **options)  # type: ignore[arg-type]
    return low_precision(policy, kind, trained(model), seed, speed.optimizer_impl, **options)
