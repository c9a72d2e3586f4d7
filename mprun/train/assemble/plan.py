"""The plan of a run: all choices made and checked, the data loaded, nothing trained yet."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from mprun.config import Config
from mprun.config.validate import SATURATES, loss_scale_kind, without_effect
from mprun.errors import UsageError, as_usage_error
from mprun.optim import engines
from mprun.precision import Policy, backend_flags, devices
from mprun.precision.execution import ExecutionChoice, choose_execution, choose_fp32_fallback
from mprun.precision.layers import LayerRow, layer_rows
from mprun.precision.nested import to_dtype
from mprun.precision.op_lists import OpLists
from mprun.precision.policy import torch_dtype
from mprun.recipe import Recipe
from mprun.records.run_record import BatchRow
from mprun.train.assemble.dtype_choices import (
    build_policy,
    choose_layers,
    choose_op_lists,
    with_formats,
)
from mprun.train.assemble.optimizer import (
    check_in_backward,
    check_optimizer,
    check_warmup,
    stores_low_precision,
    unused_by,
)
from mprun.train.assemble.recipe_loading import (
    Load,
    RecipeSource,
    load_data,
    recipe_of,
    record_of,
    source_of,
)
from mprun.train.data import DataRequest, Splits
from mprun.train.init_from import DRAWN, Weights, load_weights, range_warning
from mprun.train.loggers import check_logger, unused_fields
from mprun.train.loop import Limits
from mprun.train.machine.conditions import steady_heap
from mprun.train.machine.machine import has_amx
from mprun.train.machine.speed_choices import SpeedChoice, choose
from mprun.train.recipe_metrics import metrics_of
from mprun.train.user_code import explain_mistakes


@dataclass(frozen=True)
class Plan:
    """A run that can start: everything is decided, checked and loaded, and nothing is trained."""

    config: Config
    recipe: Recipe
    recipe_source: RecipeSource | None  # The recipe's file; None for a recipe by name
    policy: Policy
    device: torch.device
    execution: str
    why_emulated: str | None
    """Why emulation was chosen; None for native execution, and where the user chose."""
    speed: SpeedChoice
    splits: Splits
    batch: BatchRow
    lr: float
    layers: dict[str, str]  # Modules with a dtype of their own: name to dtype
    op_lists: OpLists | None  # Ops cast by name, or None
    weights: Weights  # The initial weights; `DRAWN` if the model draws its own
    fp32_fallback: str
    """Which float16 ops a CPU computes in float32 (`Float16Fallback`): none, backward or all."""
    warnings: tuple[str, ...]  # Warnings to print before the run, a sentence each
    why_not_compiled: str | None = None
    """Why the model cannot be compiled in this mode; None where it can."""
    untrusted: Path | None = None  # A folder whose code is not run
    speed_reason: str | None = None  # How `speed` was chosen, a sentence; None by the table

    @property
    def native_tf32(self) -> bool:
        """Whether the hardware's TensorFloat-32 is to be used."""
        return self.policy.tf32 and self.execution == "native"

    @property
    def choices(self) -> dict[str, Any]:
        """The automatic choices on this machine; a resumed run repeats them."""
        return {
            "device": self.device.type,
            "execution": self.execution,
            "memory_format": self.speed.memory_format,
            "optimizer_impl": self.speed.optimizer_impl,
            "compile": self.speed.compile,
            "linear_impl": self.speed.linear_impl,
            "fp32_fallback": self.fp32_fallback,
            "effective_batch": self.batch.effective,
        }

    @property
    def limits(self) -> Limits:
        """When the run ends."""
        return limits_of(self.config)

    @property
    def planned_steps(self) -> int | None:
        """Optimizer steps if time does not run out, or None if only time ends the run."""
        return planned_steps(self.config, self.splits, self.batch)

    def backend_flags(self) -> AbstractContextManager[None]:
        """Set PyTorch's process-wide switches by the policy; restore them at the end."""
        return backend_flags(self.policy, self.native_tf32)

    def layer_rows(self, model: nn.Module) -> list[LayerRow]:
        """The dtypes of the layers of a prepared model; empty without `precision.layers`."""
        return layer_rows(model, self.layers, self.policy) if self.layers else []


def limits_of(config: Config) -> Limits:
    """When a run ends."""
    return Limits(config.train.epochs, config.train.max_steps, config.train.max_time_s)


def planned_steps(config: Config, splits: Splits, batch: BatchRow) -> int | None:
    """Optimizer steps if time does not run out, or None if only time ends the run."""
    micro_batches = splits.train.batches(batch.micro)
    per_step = batch.accumulate * config.parallel.world_size
    # the last step of an epoch takes the micro-batches that remain, so the quotient is rounded up
    per_epoch = None if micro_batches is None else -(-micro_batches // per_step)
    return limits_of(config).planned_steps(per_epoch)


class Request(NamedTuple):
    """What is planned: the checked configuration, its recipe, and the choices of an earlier run."""

    config: Config
    given: Sequence[str]  # The keys that the user set
    recipe: Recipe
    earlier: Mapping[str, Any]  # `Plan.choices` of the run that is resumed, which are repeated
    resumed: bool
    untrusted: Path | None  # A folder whose code is not run


@explain_mistakes("the run cannot be planned", only_users=True)
def make_plan(
    config: Config,
    given: Sequence[str],
    choices: Mapping[str, Any] | None = None,
    load: Load = load_data,
    untrusted: Path | None = None,
    resumed: bool | None = None,
    recipe: Recipe | None = None,
) -> Plan:
    """Choose, check and load, in five steps: policy, device, execution, data, schedule.

    Each takes the request and what the steps before it chose. A mistake of the user is reported by
    one of them, before anything is timed.

    Args:
        config: the checked configuration.
        given: keys the user set, for warnings about those without effect in the recipe.
        choices: `Plan.choices` of the run that is resumed, which are repeated.
        load: gives a recipe's samples; a `DataCache` if several runs share them.
        untrusted: a folder whose code is not run: by default that of `run.resume`, unless
            `run.trust` is set.
        resumed: whether a run is resumed, with its own weights; None: where there are `choices`.
        recipe: in place of the configuration's.
    """
    check_logger(config.logger.name, config.logger.mode == "online")
    if untrusted is None and config.run.resume is not None and not config.run.trust:
        untrusted = record_of(Path(config.run.resume))
    # before the recipe is imported: a file that was changed since the run began must not run
    source = source_of(config)
    recipe = recipe or recipe_of(config, untrusted)
    resumed = bool(choices) if resumed is None else resumed
    request = Request(config, given, recipe, choices or {}, resumed, untrusted)

    policy, layers = plan_precision(config, recipe)
    device = choose_device(request.earlier.get("device", config.device))
    # speed=plain times no kernel: here only an execution that is impossible is reported
    choose_carrier(request, policy, layers, device, "plain")
    op_lists = choose_op_lists(config, device, resumed)
    speed = choose_speed(request, policy, layers, device)
    data = plan_data(request, policy, layers, load)
    lr = plan_schedule(request, policy, layers, speed, data)

    carrier = choose_carrier(request, policy, layers, device, config.speed.name)
    fallback = request.earlier.get("fp32_fallback")
    if fallback is None:
        fallback = choose_fp32_fallback(config.speed.name, policy, carrier.name, device)
    not_compiled = why_not_compiled(config, carrier.name, fallback)
    scale, accumulate = loss_scale_kind(config, layers.values()), data.batch.accumulate
    check_in_backward(config, recipe, scale, accumulate, carrier.name)
    # op lists for another version of PyTorch may have hundreds
    unknown = [] if op_lists is None else op_lists.unknown
    notices = [
        *_fields_without_effect(request, policy),
        f"not compiled: {not_compiled}" if speed.compile and not_compiled is not None else None,
        carrier.why_emulated if carrier.is_choice else None,
        *map(str, unknown[:20]),
        f"{len(unknown) - 20} more names of unknown ops" if len(unknown) > 20 else None,
        *data.notices,
        *_decided_by_loader(given, data.splits),
        *_without_places(request, data),
    ]
    return Plan(
        config=config,
        recipe=recipe,
        recipe_source=source,
        policy=policy,
        device=device,
        execution=carrier.name,
        why_emulated=carrier.why_emulated,
        speed=replace(speed, compile=speed.compile and not_compiled is None),
        splits=data.splits,
        batch=data.batch,
        lr=lr,
        layers=layers,
        op_lists=op_lists,
        weights=data.weights,
        fp32_fallback=fallback,
        warnings=tuple(text for text in notices if text is not None),
        why_not_compiled=not_compiled,
        untrusted=untrusted,
    )


def plan_precision(config: Config, recipe: Recipe) -> tuple[Policy, dict[str, str]]:
    """Step 1: the policy, and the modules with a precision of their own."""
    policy = build_policy(config)
    layers = choose_layers(config, recipe, policy)
    policy = with_formats(policy, recipe, layers)
    # a dynamic scale falls at an overflow, and numbers that saturate show none
    if policy.overflow == "saturate" and loss_scale_kind(config, layers.values()) == "dynamic":
        raise UsageError(SATURATES)
    check_parallel(config, recipe, policy)
    return policy, layers


@as_usage_error()
def choose_device(wanted: str) -> torch.device:
    """Step 2: the device; `auto` is the accelerator if there is one."""
    return devices.find(wanted)


@as_usage_error()
def choose_carrier(
    request: Request, policy: Policy, layers: Mapping[str, str], device: torch.device, speed: str
) -> ExecutionChoice:
    """Step 3: native kernels or emulation; `speed` other than plain times kernels."""
    wanted = request.earlier.get("execution", request.config.execution)
    return choose_execution(wanted, policy, device, speed, layers.values())


class PlannedData(NamedTuple):
    """Step 4: what the run trains on and starts from."""

    weights: Weights
    splits: Splits
    batch: BatchRow
    notices: list[str | None]


def plan_data(
    request: Request, policy: Policy, layers: Mapping[str, str], load: Load
) -> PlannedData:
    """Step 4: initial weights, samples and the sizes of batches."""
    config, recipe, weights = request.config, request.recipe, DRAWN
    if config.speed.name != "plain":
        steady_heap()  # for the process's memory from here on, so before the first large tensors
    if config.train.init_from is not None and not request.resumed:  # a resumed run has its own
        weights = load_weights(config.train.init_from, recipe, config.recipe.name)
    splits = as_stored(load(recipe, data_request(config)), recipe, policy)
    if splits.train.is_empty:
        raise UsageError(f"{splits.name} has no training sample")
    own = splits.train.own_batch_size
    batch, capped = batch_sizes(config, own)
    if (whole := request.earlier.get("effective_batch")) is not None:
        batch = with_effective(batch, whole, config.parallel.world_size, own)
    if not config.data.test:
        splits = replace(splits, test=splits.test.first(0))
    notices = [capped, splits.notice, range_warning(weights, policy, layers)]
    return PlannedData(weights, splits, batch, notices)


def plan_schedule(
    request: Request,
    policy: Policy,
    layers: Mapping[str, str],
    speed: SpeedChoice,
    data: PlannedData,
) -> float:
    """Step 5: the learning rate of an optimizer and a schedule that are possible."""
    config, train = request.config, request.config.train
    if (
        train.scheduler != "none"
        and train.max_steps is None
        and data.splits.train.batches(1) is None
    ):
        raise UsageError(
            f"train.scheduler={train.scheduler} needs a planned number of steps, and the training "
            "data do not say how many batches an epoch has: set train.max_steps"
        )
    factor = config.batch.factor
    by_rule = {
        "none": 1.0,
        "linear": float(factor),  # Goyal et al., "Accurate, Large Minibatch SGD", 2017
        "sqrt": math.sqrt(factor),  # Krizhevsky, "One weird trick", 2014
    }
    lr = train.lr * by_rule[config.batch.lr_rule]
    # after the data, because the functions of a recipe's file may share what data() has read
    check_optimizer(config, request.recipe, policy, layers, speed, lr)
    check_warmup(train, planned_steps(config, data.splits, data.batch), request.given)
    return lr


def choose_speed(
    request: Request, policy: Policy, layers: Mapping[str, str], device: torch.device
) -> SpeedChoice:
    """Memory format and optimizer kernels; a resumed run repeats its own."""
    config, recipe, earlier = request.config, request.recipe, request.earlier
    optimizer = config.train.optimizer
    low = stores_low_precision(policy, layers, optimizer)
    speed = choose(config.speed.name, device.type, policy.compute_dtype, optimizer.name, has_amx())
    if earlier:
        known = [f.name for f in fields(SpeedChoice) if f.name in earlier]
        speed = SpeedChoice(**{name: earlier[name] for name in known})
    else:
        # "auto" is decided by the trial of `with_fastest`, and does not compile without one
        speed = replace(speed, compile=config.speed.compile is True)
    if recipe.makes_optimizer:
        return replace(speed, optimizer_impl="masters" if low else "own")
    if not low and speed.optimizer_impl not in engines.ENGINES:
        return speed
    # All engines give the same bits on one device; eager needs no compiler.
    if config.speed.name == "plain" or earlier.get("optimizer_impl") == "eager":
        return replace(speed, optimizer_impl="eager")
    return replace(speed, optimizer_impl=engines.fastest(device, optimizer.name))


def why_not_compiled(config: Config, execution: str, fp32_fallback: str) -> str | None:
    """Why the model is not compiled in this mode; None where it can be."""
    # the first reason that applies; the user reads one
    if execution == "emulated":
        return "emulated arithmetic rounds op by op, which compiled code does not do"
    if fp32_fallback != "none":
        return "this CPU's float16 ops are computed in float32 op by op"
    if config.parallel.world_size > 1 and config.parallel.name == "fsdp2":
        return "parallel=fsdp2 gathers parameters between modules, which was not tried compiled"
    if config.debug.fp_exceptions != "off":
        return "debug.fp_exceptions inspects single ops, which compiled code does not run"
    # where PyTorch's Inductor looks for a compiler of its CPU code
    if not (os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++", "cl")))):
        return "torch.compile needs a C++ compiler, and there is none"
    return None


def check_parallel(config: Config, recipe: Recipe, policy: Policy) -> None:
    """Raise `UsageError` for what several processes cannot do together."""
    parallel = config.parallel
    if parallel.world_size == 1:
        return
    action = config.debug.fp_exceptions
    if parallel.name == "fsdp2" and action != "off":
        raise UsageError(
            f"debug.fp_exceptions={action} with parallel=fsdp2: gradients change their tensors "
            "between the backward pass and the step, so what they come from is not known; legal: "
            "off, or parallel=ddp"
        )
    if policy.accum_dtype != policy.param_dtype:
        raise UsageError(
            f"precision.accum_dtype={policy.accum_dtype} with parallel={parallel.name}: "
            "PyTorch's DDP and FSDP2 keep gradients in the parameters' dtype, "
            f"{policy.param_dtype}; legal: that (precision.reduce_dtype is the dtype of the sum "
            "over processes)"
        )
    for name, metric in metrics_of(recipe).items():
        if not callable(getattr(metric.metric, "merge_state", None)):
            raise UsageError(
                f"metric {name!r} has no merge_state(other), and each of {parallel.world_size} "
                "processes sees other samples; legal: a metric that adds another one's batches to "
                "its own by merge_state, as those of torchmetrics and of mprun.metrics do"
            )


def _fields_without_effect(request: Request, policy: Policy) -> Iterable[str]:
    """A sentence for each field that the user set without effect; the recipe's reason wins."""
    config, given, recipe = request.config, request.given, request.recipe
    # by the field, with which each sentence begins: later reasons replace earlier ones
    sentences = {text.split(" ", 1)[0]: text for text in without_effect(config, given)}
    sentences |= unused_fields(config.logger.name, given)
    unused = unused_by(recipe)
    for key in given:
        name = f"recipe={config.recipe.name}"
        if key in recipe.ignores:
            sentences[key] = f"{key} has no effect: {name} does not use it"
        elif maker := unused.get(key):
            sentences[key] = f"{key} has no effect: {name} makes its own {maker}"
    return sentences.values()


def _decided_by_loader(given: Sequence[str], splits: Splits) -> Iterable[str]:
    """A sentence for each field that the user set and that the recipe's own loaders decide."""
    evaluated = [part for part in (splits.validation, splits.test) if not part.is_empty]
    loaders = {
        "train.batch_size": [splits.train],
        "train.eval_batch_size": evaluated,
        "data.workers": [splits.train, *evaluated],
    }
    for key, parts in loaders.items():
        if key in given and parts and all(part.own_batch_size is not None for part in parts):
            yield f"{key} has no effect: the recipe's DataLoader has its own"


def _without_places(request: Request, data: PlannedData) -> Iterable[str]:
    """A sentence for each evaluation at planned steps that the user set and that there is none of.

    Without planned steps it has no place, without samples no score.
    """
    steps = planned_steps(request.config, data.splits, data.batch)
    held_out = [data.splits.validation]
    scored = {"train.validations": held_out, "train.average_weights": [*held_out, data.splits.test]}
    for key, parts in scored.items():
        if key in request.given and steps is None:
            reason = "the number of steps is not planned; train.max_steps plans it"
            yield f"{key} has no effect: {reason}"
        elif key in request.given and all(part.is_empty for part in parts):
            yield f"{key} has no effect: there are no samples to score"


def as_stored(splits: Splits, recipe: Recipe, policy: Policy) -> Splits:
    """Inputs that neither `prepare` nor the loss reads, converted once to the mode's input dtype.

    In a true 16-bit mode they then go to the device at half the size.
    """
    # `prepare` and the loss get the samples as they are stored, so that modes differ only after it
    if recipe.prepares or recipe.loss_reads_inputs:
        return splits
    convert = partial(to_dtype, dtype=torch_dtype(policy.input_dtype))
    parts = {part: getattr(splits, part) for part in ("train", "validation", "test")}
    return replace(splits, **{name: part.with_inputs(convert) for name, part in parts.items()})


def batch_sizes(config: Config, own: int | None = None) -> tuple[BatchRow, str | None]:
    """The batch sizes of a run, and a sentence if a preset capped them.

    Batches of a recipe's loader, of its `own` size, are not cut: a doubled batch accumulates two.
    """
    base, cap = config.train.batch_size, config.preset.max_batch_size
    notice, factor, accumulate = None, config.batch.factor, config.train.accumulate
    if own is not None:
        base = micro = own
        accumulate *= factor  # the loader's batches are not joined, so more of them make a step
    else:
        if cap is not None and base > cap:
            notice = f"preset={config.preset.name} caps train.batch_size={base} at {cap}"
            base = cap
        micro = base * factor
    row = BatchRow(
        micro=micro,
        accumulate=accumulate,
        effective=micro * accumulate * config.parallel.world_size,
        base=base,
        lr_rule=config.batch.lr_rule,
    )
    return row, notice


def with_effective(
    batch: BatchRow, effective: int, world_size: int, own: int | None = None
) -> BatchRow:
    """The sizes with which another number of processes takes the same global batches.

    A process takes as many micro-batches as it needs; one that is too large is cut, unless a
    recipe's loader has batches of its `own` size.
    """
    if batch.effective == effective:
        return batch
    each, rest = divmod(effective, world_size)
    if rest or not each or (own is not None and each % own):
        units = effective // (own or 1)
        # up to 64, so that the message stays one line
        legal = [n for n in range(1, min(units, 64) + 1) if units % n == 0]
        raise UsageError(
            f"the run's batch of {effective} samples cannot be split evenly over {world_size} "
            f"processes; legal numbers of processes: {', '.join(map(str, legal))}"
        )
    # divides the share evenly and is no larger than the planned one, so it fits the memory
    micro = math.gcd(batch.micro, each)
    return replace(batch, micro=micro, accumulate=each // micro, effective=effective)


def data_request(config: Config) -> DataRequest:
    """The data section in plain values."""
    data = config.data
    return DataRequest(
        source=data.source,
        root=data.root,
        fallback=data.fallback == "generated",
        validation_fraction=data.validation_fraction,
        train_limit=data.train_limit,
        eval_limit=data.eval_limit,
        seed=config.seed,
    )
