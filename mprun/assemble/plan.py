"""What a run will be: chosen, checked and loaded, nothing trained yet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mprun.assemble import machine_choices as machine
from mprun.assemble.optimizer import engine_for, keeps_low_precision
from mprun.assemble.recipe_loading import Load, load_data, load_recipe
from mprun.config import Config
from mprun.config.schema import LrRule
from mprun.config.validate import SATURATES, loss_scale_kind, without_effect
from mprun.data import DataRequest, Splits
from mprun.doctor.speed_choices import SpeedChoice, choose
from mprun.errors import UsageError
from mprun.precision import Policy
from mprun.precision.op_lists import OpLists, Unknown
from mprun.precision.policy import torch_dtype
from mprun.recipe import Recipe
from mprun.records.run_record import BatchRow
from mprun.train.init_from import DRAWN, Weights, load_weights, range_warning
from mprun.train.loggers import check_logger
from mprun.train.loop import Limits


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
    layers: dict[str, str]
    """Modules kept in a dtype of their own: name to dtype."""
    op_lists: OpLists | None
    """Ops cast by name, or None."""
    weights: Weights
    """What the model begins with where it is not drawn (`DRAWN`)."""
    fp32_fallback: str
    """Which float16 ops a CPU computes in float32 (`Float16Fallback`): none, backward or all."""
    warnings: tuple[str, ...]
    """What the user is warned of before the run; one sentence for each field without effect."""

    @property
    def native_tf32(self) -> bool:
        """Whether the hardware's TensorFloat-32 is to be used."""
        return self.policy.tf32 and self.execution == "native"

    @property
    def choices(self) -> dict[str, str]:
        """What was chosen for this machine; a resumed run takes the same."""
        return {
            "device": self.device.type,
            "execution": self.execution,
            "memory_format": self.speed.memory_format,
            "optimizer_impl": self.speed.optimizer_impl,
            "fp32_fallback": self.fp32_fallback,
        }

    @property
    def limits(self) -> Limits:
        """When the run ends."""
        train = self.config.train
        return Limits(train.epochs, train.max_steps, train.max_time_s)


def plan(
    config: Config,
    given: Sequence[str],
    choices: Mapping[str, Any] | None = None,
    load: Load = load_data,
) -> Plan:
    """Choose, check and load.

    Args:
        config: the checked configuration.
        given: keys the user set, for warnings about those without effect in the recipe.
        choices: `Plan.choices` of the run being resumed, taken instead of choosing anew.
        load: gives a recipe's samples; `DataCache` where several runs share them.

    Raises:
        UsageError: see the module's text.
    """
    check_logger(config.logger.name)
    recipe = load_recipe(config.recipe.target, config.recipe.model)
    policy = machine.build_policy(config)
    kept = dict(choices or {})
    device = machine.choose_device(kept.get("device", config.device.name))
    execution = machine.choose_execution(
        kept.get("execution", config.execution.name), policy, device
    )
    optimizer = config.train.optimizer.name.name
    layers = machine.choose_layers(config, recipe, policy)
    op_lists = machine.choose_op_lists(config, device, resumed=bool(choices))
    if policy.overflow == "saturate" and loss_scale_kind(config, layers.values()) == "dynamic":
        raise UsageError(SATURATES)
    speed = choose(config.speed.name, device.type, policy.compute_dtype, optimizer)
    if choices:
        speed = SpeedChoice(kept["memory_format"], kept["optimizer_impl"])
    if keeps_low_precision(policy, layers, config.train.optimizer):
        engine = engine_for(config.speed.name, device, kept.get("optimizer_impl"))
        speed = replace(speed, optimizer_impl=engine)
    fp32_fallback = kept.get(
        "fp32_fallback", kept.get("by_float32")
    )  # the key in older checkpoints
    if fp32_fallback is None:
        fp32_fallback = machine.choose_fp32_fallback(config.speed.name, policy, execution, device)
    batch, capped = batch_sizes(config)
    weights = DRAWN
    if config.train.init_from is not None and not choices:  # a resumed run has its own
        weights = load_weights(config.train.init_from, recipe, config.recipe.name)
    splits = as_stored(load(recipe, data_request(config)), recipe, policy)
    if not len(splits.train):
        raise UsageError(f"{splits.name} has no training sample")
    if not config.data.test:
        splits = replace(splits, test=splits.test.first(0))
    name = config.recipe.name
    inert = {text.split(" ", 1)[0]: text for text in without_effect(config, given)}
    for key in (*given,):
        if key in recipe.ignores:
            inert[key] = f"{key} has no effect: recipe={name} does not use it"
    moved = machine.displaced_ops(config, device, resumed=bool(choices))
    notices = (capped, splits.notice, range_warning(weights, policy, layers), moved)
    warnings = [*inert.values(), *(text for text in notices if text is not None)]
    warnings += unknown_names(op_lists.unknown) if op_lists else []
    lr = config.train.lr * lr_factor(config.batch.lr_rule, config.batch.factor)
    return Plan(
        config=config,
        recipe=recipe,
        policy=policy,
        device=device,
        execution=execution,
        speed=speed,
        splits=splits,
        batch=batch,
        lr=lr,
        layers=layers,
        op_lists=op_lists,
        weights=weights,
        fp32_fallback=fp32_fallback,
        warnings=tuple(warnings),
    )


def unknown_names(unknown: Sequence[Unknown], shown: int = 20) -> list[str]:
    """A sentence for each name no op has, up to `shown`, and one for the rest."""
    rest = len(unknown) - shown
    more = [f"{rest} more names that no op has"] if rest > 0 else []
    return [*map(str, unknown[:shown]), *more]


def as_stored(splits: Splits, recipe: Recipe, policy: Policy) -> Splits:
    """Samples a recipe takes as they lie, converted once to the mode's inputs.

    So they travel to a device at half the size where the mode is a true 16-bit one.
    """
    if recipe.prepares or not splits.train.inputs.is_floating_point():
        return splits
    dtype = torch_dtype(policy.input_dtype)
    parts = {part: getattr(splits, part) for part in ("train", "validation", "test")}
    return replace(splits, **{name: part.with_inputs(dtype) for name, part in parts.items()})


def batch_sizes(config: Config) -> tuple[BatchRow, str | None]:
    """The batch sizes of a run, and a sentence where a preset capped them."""
    base, cap = config.train.batch_size, config.preset.max_batch_size
    notice = None
    if cap is not None and base > cap:
        notice = f"preset={config.preset.name} caps train.batch_size={base} at {cap}"
        base = cap
    micro = base * config.batch.factor
    accumulate = config.train.accumulate
    row: BatchRow = BatchRow(
        micro=micro,
        accumulate=accumulate,
        effective=micro * accumulate,
        base=base,
        lr_rule=config.batch.lr_rule.name,
    )
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
