"""The composition root: from a checked configuration to the objects a run is made of.

Everything a user can still get wrong here (a recipe's own fields, a device that is not there, data
that cannot be had) raises `UsageError` before any folder is made.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from mprun._torch import FakeTensorMode
from mprun.config import Config
from mprun.config.reference import describe_type
from mprun.config.schema import LrRule, OptimizerConfig, OptimizerName, Scheduler
from mprun.data import Batches, DataRequest, Order, Splits, TensorSet
from mprun.data.batches import place
from mprun.errors import UsageError, hint
from mprun.numerics.footprint import measure
from mprun.precision import (
    AutocastCaster,
    Caster,
    ClipNorm,
    NoCaster,
    NoClip,
    NoLossScale,
    Policy,
    Precision,
)
from mprun.readings import readings_for
from mprun.recipe import Recipe
from mprun.record import BatchRow
from mprun.runner import Limits, NoObserver, Parts, Trainer
from mprun.schedule import NoSchedule, Schedule
from mprun.speed import SpeedChoice, choose
from mprun.timing import clock_for


@dataclass(frozen=True)
class Plan:
    """A run that can begin: everything is chosen, checked and loaded; nothing is trained yet."""

    config: Config
    recipe: Recipe
    policy: Policy
    device: torch.device
    execution: str
    speed: SpeedChoice
    splits: Splits
    batch: BatchRow
    lr: float
    warnings: tuple[str, ...]

    @property
    def limits(self) -> Limits:
        """When the run ends."""
        train = self.config.train
        return Limits(train.epochs, train.max_steps, train.max_time_s)


def plan(config: Config, given: Sequence[str]) -> Plan:
    """Choose, check and load.

    Args:
        config: the checked configuration.
        given: keys the user set, for warnings about those without effect in the recipe.

    Raises:
        UsageError: see the module's text.
    """
    recipe = load_recipe(config.recipe.target, config.recipe.model)
    policy = build_policy(config)
    device = choose_device(config.device.name)
    execution = choose_execution(config.execution.name, policy)
    optimizer = config.train.optimizer.name.name
    speed = choose(config.speed.name, device.type, policy.compute_dtype, optimizer)
    batch, capped = batch_sizes(config)
    splits = load_data(recipe, data_request(config))
    if not len(splits.train):
        raise UsageError(f"{splits.name} has no training sample")
    name = config.recipe.name
    warnings = [f"{k} has no effect: recipe={name} does not use it" for k in recipe.ignores]
    warnings = [w for w in warnings if w.split(" ", 1)[0] in given]
    warnings += [text for text in (capped, splits.notice) if text is not None]
    lr = config.train.lr * lr_factor(config.batch.lr_rule, config.batch.factor)
    return Plan(
        config, recipe, policy, device, execution, speed, splits, batch, lr, tuple(warnings)
    )


def load_recipe(target: str, parameters: dict[str, Any]) -> Recipe:
    """The recipe's class with the user's parameters, each checked against its annotated type."""
    kind = _import_recipe(target)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name, value in parameters.items():
        if name not in known:
            legal = ", ".join(f"recipe.model.{k}" for k in known)
            raise UsageError(
                f"'recipe.model.{name}={value}': {kind.__name__} has no such parameter"
                f"{hint(name, known)}; legal: {legal}"
            )
    schema = OmegaConf.structured(kind)
    OmegaConf.set_readonly(schema, False)  # the class is frozen, the values being merged are not
    for name, value in parameters.items():
        try:
            OmegaConf.update(schema, name, value)
        except OmegaConfBaseException:
            wanted = describe_type(get_type_hints(kind)[name])
            raise UsageError(f"'recipe.model.{name}={value}': {name} is {wanted}") from None
    try:
        recipe = OmegaConf.to_object(schema)
    except (OmegaConfBaseException, ValueError) as error:
        raise UsageError(f"recipe.model: {str(error).splitlines()[0]}") from None
    assert isinstance(recipe, Recipe)
    return recipe


def _import_recipe(target: str) -> type[Recipe]:
    """The class at an import path; a user's own module may lie in the current folder."""
    module_name, _, class_name = target.rpartition(".")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # the module is the user's: anything can be wrong with it
        raise UsageError(
            f"recipe.target={target} cannot be loaded ({type(error).__name__}: "
            f"{first_line(error)}); write module.Class of a recipe that can be imported from here"
        ) from None
    if isinstance(kind, type) and issubclass(kind, Recipe) and "__dataclass_fields__" in vars(kind):
        return kind
    raise UsageError(f"recipe.target={target} is no dataclass that extends mprun.recipe.Recipe")


def load_data(recipe: Recipe, request: DataRequest) -> Splits:
    """The recipe's samples; what fails in a recipe's own code is said in one line."""
    try:
        return recipe.data(request)
    except (ArithmeticError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"the data of {type(recipe).__name__} cannot be made: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip() or "no message").splitlines()[0]


def build_policy(config: Config) -> Policy:
    """The policy a configuration's precision section describes."""
    row: dict[str, Any] = {
        k: v.name if isinstance(v, Enum) else v for k, v in vars(config.precision).items()
    }
    try:
        return Policy(**row)
    except ValueError as error:
        raise UsageError(str(error)) from None


def choose_device(wanted: str) -> torch.device:
    """The device; `auto` is CUDA where there is one."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError("device=cuda: PyTorch finds no CUDA device here; legal: auto, cpu")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def choose_execution(wanted: str, policy: Policy) -> str:
    """native or emulated. Both modes of this version have native kernels everywhere."""
    if wanted == "emulated":
        raise UsageError(
            f"execution=emulated: precision={policy.name} runs natively on every device "
            "and has no emulation; legal: auto, native"
        )
    return "native"


def batch_sizes(config: Config) -> tuple[BatchRow, str | None]:
    """The batch sizes of a run, and a sentence where a preset capped them."""
    base, cap = config.train.batch_size, config.preset.max_batch_size
    notice = None
    if cap is not None and base > cap:
        notice = f"preset={config.preset.name} caps train.batch_size={base} at {cap}"
        base = cap
    micro = base * config.batch.factor
    accumulate = config.train.accumulate
    row: BatchRow = {
        "micro": micro,
        "accumulate": accumulate,
        "effective": micro * accumulate,
        "base": base,
        "lr_rule": config.batch.lr_rule.name,
    }
    return row, notice


def lr_factor(rule: LrRule, factor: int) -> float:
    """What a batch made `factor` times larger multiplies the learning rate by.

    linear: Goyal et al., "Accurate, Large Minibatch SGD", 2017; sqrt: Krizhevsky, "One weird
    trick", 2014.
    """
    return {LrRule.none: 1.0, LrRule.linear: float(factor), LrRule.sqrt: math.sqrt(factor)}[rule]


def data_request(config: Config) -> DataRequest:
    """The data section in plain values."""
    data = config.data
    return DataRequest(
        source=data.source.name,
        root=data.root,
        fallback=data.fallback.name == "generated",
        validation_fraction=data.validation_fraction,
        train_limit=data.train_limit,
        eval_limit=data.eval_limit,
        seed=config.seed,
    )


def build_precision(chosen: Plan) -> Precision:
    """The parts that carry the policy out."""
    policy, clip_norm = chosen.policy, chosen.config.train.clip_norm
    caster: Caster = NoCaster()
    if policy.casting == "autocast":
        caster = AutocastCaster(chosen.device.type, getattr(torch, policy.compute_dtype))
    clip = NoClip() if clip_norm is None else ClipNorm(clip_norm)
    return Precision(policy, caster, NoLossScale(), clip)


def build_parts(chosen: Plan) -> Parts:
    """Everything the loop runs on; weights are drawn on the CPU, in float32, from the seed."""
    config, recipe, device = chosen.config, chosen.recipe, chosen.device
    torch.manual_seed(config.seed)
    precision = build_precision(chosen)
    model = precision.prepare(recipe.model(), device, chosen.speed.torch_memory_format)
    optimizer = build_optimizer(config.train.optimizer, model, chosen.lr, chosen.speed)
    splits, batch = chosen.splits, chosen.batch
    order = Order(len(splits.train), config.seed, splits.shuffle)

    def batches(data: Any, size: int) -> Batches:
        def prepare(inputs: torch.Tensor) -> torch.Tensor:
            return chosen.speed.inputs(recipe.prepare(inputs))

        return Batches(place(data, device), size, prepare, device)

    train = batches(splits.train, batch["effective"])
    planned = chosen.limits.planned_steps(len(train))
    return Parts(
        recipe=recipe,
        model=model,
        optimizer=optimizer,
        scheduler=build_schedule(config.train.scheduler, optimizer, planned),
        precision=precision,
        train=train,
        order=order,
        validation=batches(splits.validation, config.train.eval_batch_size),
        test=batches(splits.test, config.train.eval_batch_size),
        micro_batch=batch["micro"],
        clock=clock_for(device),
        readings=readings_for(device),
    )


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, lr: float, speed: SpeedChoice
) -> Optimizer:
    """The optimizer with the implementation `speed` chose."""
    parameters, how = model.parameters(), speed.optimizer_options()
    decay = config.weight_decay
    if config.name is OptimizerName.sgd:
        return torch.optim.SGD(
            parameters, lr=lr, momentum=config.momentum, weight_decay=decay, **how
        )
    if config.name is OptimizerName.rmsprop:
        return torch.optim.RMSprop(
            parameters,
            lr=lr,
            alpha=config.alpha,
            eps=config.eps,
            momentum=config.momentum,
            weight_decay=decay,
            foreach=how["foreach"],
        )
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(
        parameters, lr=lr, betas=betas, eps=config.eps, weight_decay=decay, **how
    )


def build_schedule(kind: Scheduler, optimizer: Optimizer, steps: int | None) -> Schedule:
    """The learning-rate schedule over the planned optimizer steps."""
    if kind is Scheduler.none or steps is None:
        return NoSchedule()
    if kind is Scheduler.cosine:
        return CosineAnnealingLR(optimizer, T_max=steps)
    return LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)


def footprint(chosen: Plan) -> dict[str, int]:
    """Bytes alive at the peak of one training step of this plan, by category, on fake tensors."""
    splits, device = chosen.splits, chosen.device
    rows = min(chosen.batch["effective"], len(splits.train))

    def fake(like: torch.Tensor) -> torch.Tensor:
        return torch.empty(rows, *like.shape[1:], dtype=like.dtype, device=device)

    with torch.random.fork_rng(devices=[]), FakeTensorMode():
        samples = TensorSet(fake(splits.train.inputs), fake(splits.train.targets))
        none = samples.first(0)
        parts = build_parts(
            replace(chosen, splits=replace(splits, train=samples, validation=none, test=none))
        )
        batch = next(parts.train.epoch(None))
        trainer = Trainer(parts, chosen.limits, NoObserver(), lambda: False)
        return measure(
            lambda: trainer.optimizer_step(batch),
            parts.model,
            parts.optimizer,
            [batch.inputs, batch.targets],
        )
