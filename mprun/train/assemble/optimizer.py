"""Which optimizer and which learning-rate schedule a run gets.

An optimizer by name (`config.schema.OPTIMIZERS`) is PyTorch's, or its namesake of `mprun.optim`
that stores parameters and state in 16 bits. One that the recipe makes computes in its parameters'
dtype, so with 16-bit parameters it gets float32 masters. The schedule is the configuration's, or
the recipe's own.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
)

from mprun import optim
from mprun.config import Config
from mprun.config.schema import OPTIMIZERS, OptimizerConfig, TrainConfig
from mprun.config.validate import loss_scale_kind
from mprun.errors import UsageError
from mprun.optim import engines
from mprun.optim.optimizers import low_precision, with_masters
from mprun.precision import Policy, disable_casts
from mprun.precision._torch import eager_optimizer
from mprun.precision.apply import needs_closure
from mprun.precision.layers import convert, layer_precisions
from mprun.precision.policy import torch_dtype
from mprun.recipe import Recipe
from mprun.records.layer_values import layer_dtypes
from mprun.records.policy_columns import WIDE_DTYPES
from mprun.train.loop import Schedule
from mprun.train.machine.speed_choices import SpeedChoice
from mprun.train.user_code import outline_of


def made_by_name(
    parameters: Any, config: OptimizerConfig, lr: float, implementation: str
) -> Optimizer:
    """PyTorch's optimizer of a name, with the implementation: forloop, foreach or fused."""
    kind = class_of(config)
    taken = inspect.signature(kind).parameters
    # both are set: PyTorch picks foreach by itself on a GPU where neither is named
    kernels = {name: implementation == name for name in ("foreach", "fused") if name in taken}
    options: dict[str, Any] = {"lr": lr, **options_of(config), **kernels}
    # without the import of the compiler, 1.5 s
    return eager_optimizer(kind)(parameters, **options)  # type: ignore[arg-type]


def check_warmup(train: TrainConfig, steps: int | None, given: Sequence[str]) -> None:
    """Raise `UsageError` for a warm-up of the user's that is longer than the optimizer steps."""
    if "train.warmup_steps" in given and steps is not None and train.warmup_steps > steps:
        raise UsageError(
            f"train.warmup_steps={train.warmup_steps}: the run has {steps} optimizer steps "
            f"(train.epochs, train.max_steps); legal is at most {steps}"
        )


def build_schedule(
    train: TrainConfig, recipe: Recipe, optimizer: Optimizer, steps: int | None
) -> Schedule:
    """The recipe's own schedule, or the configuration's over the planned optimizer steps."""
    if recipe.makes_schedule:
        return Schedule(_recipes_schedule(recipe, optimizer))
    if train.warmup_steps or train.min_lr:
        lowest = 0.0 if train.scheduler == "none" else train.min_lr
        curve = CURVES[train.scheduler]
        # LambdaLR takes factors, so the lowest rate is one relative to that of each group
        bases = [float(group["lr"]) for group in optimizer.param_groups]
        # steps is None with scheduler=none, whose curve does not read it, and in `check_optimizer`
        factors = [factor(curve, train.warmup_steps, steps or 1, lowest / base) for base in bases]
        return Schedule(LambdaLR(optimizer, factors))
    if train.scheduler == "none" or steps is None:
        return Schedule()
    if train.scheduler == "cosine":
        return Schedule(CosineAnnealingLR(optimizer, T_max=steps))
    return Schedule(LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps))


# The share of the fall that is left, by the share of the steps after the warm-up
CURVES: dict[str, Callable[[float], float]] = {
    "none": lambda _: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


def factor(
    curve: Callable[[float], float], warmup: int, steps: int, lowest: float
) -> Callable[[int], float]:
    """What the learning rate is multiplied by in a step, counted from 0.

    It is (step + 1) / warmup in the warm-up. Then it falls along the curve from 1 to `lowest`,
    which it would reach one step after the last.
    """

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        # max: a run that ends with its warm-up; min: the scheduler steps once after the last step
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return lowest + (1 - lowest) * curve(done)

    return at


def _recipes_schedule(recipe: Recipe, optimizer: Optimizer) -> LRScheduler:
    schedule = recipe.schedule(optimizer)
    # ReduceLROnPlateau needs a score, and mprun steps a schedule after each optimizer step
    if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
        raise UsageError(
            f"schedule(optimizer) of {type(recipe).__name__} gave a {type(schedule).__name__}; "
            "legal is a scheduler of torch.optim.lr_scheduler that needs no score"
        )
    return schedule


def class_of(config: OptimizerConfig) -> type[Optimizer]:
    """The class of an optimizer by name."""
    return getattr(torch.optim, OPTIMIZERS[config.name].kind)  # type: ignore[no-any-return]


def options_of(config: OptimizerConfig) -> dict[str, Any]:
    """The arguments of its class without lr: the fields of its name."""
    values = {**vars(config), "betas": (config.beta1, config.beta2)}
    return {name: values[name] for name in OPTIMIZERS[config.name].arguments}


def stores_low_precision(
    policy: Policy, layers: Mapping[str, str], config: OptimizerConfig
) -> bool:
    """Whether the optimizer writes anything in 16 bits: parameters, layers or moments."""
    moments = {getattr(policy, f"{moment}_dtype") for moment in config.stored_moments}
    own = filter(None, (layer_dtypes(value, policy.casting) for value in layers.values()))
    return not {policy.param_dtype, *moments, *(x for x, _ in own)} <= {*WIDE_DTYPES}


OPTIMIZER_KEYS = (
    "train.lr",
    "batch.lr_rule",
    *(f"train.optimizer.{f.name}" for f in fields(OptimizerConfig)),
)
SCHEDULE_KEYS = ("train.scheduler", "train.warmup_steps", "train.min_lr")


def optimizer_name(config: OptimizerConfig, recipe: Recipe) -> str:
    """The name of a run's optimizer, or the recipe's class that makes it."""
    return f"{type(recipe).__name__}.optimizer" if recipe.makes_optimizer else config.name


def unused_by(recipe: Recipe) -> dict[str, str]:
    """Keys without effect because the recipe makes its own optimizer or schedule, and which."""
    own = dict.fromkeys(OPTIMIZER_KEYS, "optimizer") if recipe.makes_optimizer else {}
    return own | (dict.fromkeys(SCHEDULE_KEYS, "schedule") if recipe.makes_schedule else {})


def check_optimizer(
    config: Config,
    recipe: Recipe,
    policy: Policy,
    layers: Mapping[str, str],
    speed: SpeedChoice,
    lr: float,
) -> None:
    """Make the optimizer and its schedule of an outline of the model, to report mistakes early.

    An optimizer by name is made of values that were checked: only the model is looked at. What
    cannot be made of a model without numbers is found out by the run.
    """
    try:
        model = outline_of(recipe)
        check_trainable(model, recipe)
        if not recipe.makes_optimizer and not recipe.makes_schedule:
            return
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # the run itself shows them
            stored = {n: row.stored for n, row in layer_precisions(layers, policy).items()}
            (device,) = {p.device for p in model.parameters()}
            convert(model, device, torch_dtype(policy.param_dtype), layers=stored)
            section = config.train.optimizer
            optimizer = build_optimizer(section, recipe, model, lr, policy, speed, config.seed)
            if needs_closure(optimizer):
                check_closure(config, layers, type(optimizer).__name__)
            build_schedule(config.train, recipe, optimizer, steps=None)
    except UsageError:
        raise
    except Exception:  # the user's model or optimizer may need values: then the run reports it
        return


def check_closure(config: Config, layers: Mapping[str, str], name: str) -> None:
    """Refuse what an optimizer that computes the loss several times in a step cannot have."""
    scale, clip_norm = loss_scale_kind(config, layers.values()), config.train.clip_norm
    refused = {
        f"train.clip_norm={clip_norm}": clip_norm is not None,
        f"loss_scale={scale}": scale != "none",
        f"parallel={config.parallel.name}": config.parallel.world_size > 1,
        f"debug.fp_exceptions={config.debug.fp_exceptions}": config.debug.fp_exceptions != "off",
    }
    for text in (text for text, is_set in refused.items() if is_set):
        raise UsageError(
            f"{text} with {name}, which computes the loss several times in a step; legal: without "
            "it, or another optimizer"
        )


def build_optimizer(
    config: OptimizerConfig,
    recipe: Recipe,
    model: nn.Module,
    lr: float,
    policy: Policy,
    speed: SpeedChoice,
    seed: int,
) -> Optimizer:
    """The optimizer of the parameters that are not frozen, with the implementation in `speed`."""
    check_trainable(model, recipe)
    engine = speed.optimizer_impl
    if engine in engines.ENGINES:
        kind = class_of(config)
        given = {"lr": lr, **options_of(config)}
        return low_precision(policy, kind, trained(model), seed, engine, **given)
    if engine == "masters":
        return _with_masters(recipe, model, policy, seed)
    if recipe.makes_optimizer:
        return _recipes_optimizer(recipe, model)
    return made_by_name(trained(model), config, lr, engine)


SHARE = 8  # Parts of the gradients of which one is held at a time


class StepsInBackward:
    """Updates parameters while the backward pass goes on, and frees their gradients.

    Each parameter takes one step with its whole gradient, so the bits are those of a step at the
    end. Gradients are collected to an eighth of all: a call for each would cost the host more
    (torchtune's `optimizer_in_bwd` makes one). What is left is for the step at the end.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._is_on = optimizer, False
        self._pending: list[Tensor] = []
        self._pending_bytes = 0
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._most_bytes = sum(p.nbytes for p in params) / SHARE
        for p in params:
            p.register_post_accumulate_grad_hook(self._add)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context around the one backward pass of a step."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on, self._pending, self._pending_bytes = False, [], 0

    def _add(self, p: Tensor) -> None:
        if not self._is_on:
            return
        self._pending.append(p)
        self._pending_bytes += p.nbytes
        if self._pending_bytes < self._most_bytes:
            return
        with disable_casts():
            self._optimizer.step()
        for group in self._optimizer.param_groups:
            if "attempts" in group:  # of a step: its random bits are numbered once
                group["attempts"] -= 1
        for x in self._pending:
            x.grad = None
        self._pending, self._pending_bytes = [], 0


def check_in_backward(
    config: Config, recipe: Recipe, scale: str, accumulate: int, execution: str
) -> None:
    """Raise `UsageError` where parameters are to be updated in the backward pass and cannot be."""
    reasons = {
        "train.clip_norm needs the norm of all gradients": config.train.clip_norm is not None,
        "a step with a loss scale may be skipped": scale != "none",
        f"gradients of {accumulate} passes are added up": accumulate > 1,
        "several processes exchange gradients": config.parallel.world_size > 1,
        "emulated arithmetic would round the updates": execution == "emulated",
        "debug.fp_exceptions inspects gradients": config.debug.fp_exceptions != "off",
        "the recipe's own optimizer may need all gradients": recipe.makes_optimizer,
    }
    reason = next((reason for reason, is_so in reasons.items() if is_so), None)
    if config.speed.optimizer_in_backward and reason is not None:
        raise UsageError(f"speed.optimizer_in_backward=true: {reason}; legal is false")


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


def _recipes_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    name = f"optimizer(model) of {type(recipe).__name__}"
    optimizer = recipe.optimizer(model)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"{name} gave a {type(optimizer).__name__}; legal is a torch.optim.Optimizer"
        )
    known = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(p) in known for p in held):
        raise UsageError(f"{name} holds no parameter of the model that it was given")
    for group in optimizer.param_groups:  # a frozen parameter never has a gradient, nor needs state
        group["params"] = [p for p in group["params"] if p.requires_grad]
    return optimizer


def _with_masters(recipe: Recipe, model: nn.Module, policy: Policy, seed: int) -> Optimizer:
    """The recipe's optimizer, on float32 masters of the 16-bit parameters."""
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
        inner = _recipes_optimizer(recipe, model)
    if needs_closure(inner):
        raise UsageError(
            f"precision={policy.name} with {type(inner).__name__}, which searches along a line: "
            "parameters in 16 bits would round each trial; legal: precision=fp64, fp32, bf16_mixed"
        )
    if isinstance(inner, optim.LowPrecisionOptimizer):
        name = type(inner).__name__
        raise UsageError(
            f"mprun.optim.{name} stores 16 bits itself and needs no float32 masters; legal is "
            f"train.optimizer.name={name.lower()}"
        )
    return with_masters(policy, inner, masters, seed)
