"""The composition root: from a checked configuration to the objects a run is made of.

Everything a user can still get wrong here (a recipe's own fields, a device that is not there, data
that cannot be had) raises `UsageError` before any folder is made.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import torch
import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from mprun._torch import FakeTensorMode
from mprun.config import Config
from mprun.config.reference import describe_type
from mprun.config.schema import LayerDType, LrRule, Scheduler
from mprun.config.validate import loss_scale_kind
from mprun.data import Batches, DataRequest, Order, Splits, TensorSet
from mprun.data.batches import place
from mprun.errors import UsageError, hint
from mprun.loggers import check_logger
from mprun.numerics.footprint import measure
from mprun.observer import NoObserver
from mprun.optimizers import build_optimizer, engine_for, keeps_low_precision
from mprun.precision import (
    Arithmetic,
    AutocastCaster,
    BlockedConvolutions,
    Caster,
    ClipNorm,
    DynamicLossScale,
    DynamicRule,
    Emulated16,
    EmulatedTf32,
    Float16ByFloat32,
    LossScale,
    NativeArithmetic,
    NoCaster,
    NoClip,
    NoLossScale,
    Policy,
    Precision,
    StaticLossScale,
    accelerated,
    has_tf32,
)
from mprun.precision.convert import convert
from mprun.precision.layers import LAYER_DTYPES, resolve
from mprun.precision.policy import torch_dtype
from mprun.readings import readings_for
from mprun.recipe import Recipe
from mprun.record import BatchRow
from mprun.runner import Limits, Parts, Trainer
from mprun.schedule import NoSchedule, Schedule, TorchSchedule
from mprun.speed import SpeedChoice, choose
from mprun.timing import clock_for
from mprun.weights import DRAWN, Weights, load_weights, range_warning

DEFAULT_STATIC = 1024.0
DEFAULT_INITIAL = 2.0**16


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
    weights: Weights
    """What the model begins with where it is not drawn (`DRAWN`)."""
    by_float32: str
    """Which float16 ops a CPU computes in float32 (`Float16ByFloat32`): none, backward or all."""
    warnings: tuple[str, ...]

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
            "by_float32": self.by_float32,
        }

    @property
    def limits(self) -> Limits:
        """When the run ends."""
        train = self.config.train
        return Limits(train.epochs, train.max_steps, train.max_time_s)


def plan(config: Config, given: Sequence[str], choices: Mapping[str, Any] | None = None) -> Plan:
    """Choose, check and load.

    Args:
        config: the checked configuration.
        given: keys the user set, for warnings about those without effect in the recipe.
        choices: `Plan.choices` of the run being resumed, taken instead of choosing anew.

    Raises:
        UsageError: see the module's text.
    """
    check_logger(config.logger.name)
    recipe = load_recipe(config.recipe.target, config.recipe.model)
    policy = build_policy(config)
    kept = dict(choices or {})
    device = choose_device(kept.get("device", config.device.name))
    execution = choose_execution(kept.get("execution", config.execution.name), policy, device)
    optimizer = config.train.optimizer.name.name
    layers = choose_layers(config, recipe, policy)
    speed = choose(config.speed.name, device.type, policy.compute_dtype, optimizer)
    if choices:
        speed = SpeedChoice(kept["memory_format"], kept["optimizer_impl"])
    if keeps_low_precision(policy, layers):
        engine = engine_for(config.speed.name, device, kept.get("optimizer_impl"))
        speed = replace(speed, optimizer_impl=engine)
    by_float32 = kept.get("by_float32")
    if by_float32 is None:
        by_float32 = choose_by_float32(config.speed.name, policy, execution, device)
    batch, capped = batch_sizes(config)
    weights = DRAWN
    if config.train.init_from is not None and not choices:  # a resumed run has its own
        weights = load_weights(config.train.init_from, recipe, config.recipe.name)
    splits = load_data(recipe, data_request(config))
    if not len(splits.train):
        raise UsageError(f"{splits.name} has no training sample")
    name = config.recipe.name
    warnings = [f"{k} has no effect: recipe={name} does not use it" for k in recipe.ignores]
    warnings = [w for w in warnings if w.split(" ", 1)[0] in given]
    notices = (capped, splits.notice, range_warning(weights, policy, layers))
    warnings += [text for text in notices if text is not None]
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
        weights=weights,
        by_float32=by_float32,
        warnings=tuple(warnings),
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
        k: v.name if isinstance(v, Enum) else v
        for k, v in vars(config.precision).items()
        if not k.startswith("layers")
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


def choose_execution(wanted: str, policy: Policy, device: torch.device) -> str:
    """native or emulated: what was asked for, else native where that can be."""
    can, reason = _executions(policy, device)
    if wanted != "auto" and wanted not in can:
        raise UsageError(f"execution={wanted}: {reason}; legal: auto, {', '.join(can)}")
    return can[0] if wanted == "auto" else wanted


def _executions(policy: Policy, device: torch.device) -> tuple[tuple[str, ...], str]:
    """How a policy can be carried out, the best first, and why not otherwise."""
    emulated, both = ("emulated",), ("native", "emulated")
    if policy.rounding_scope == "all":
        return emulated, (
            "precision.rounding_scope=all rounds every result stochastically, and what a kernel "
            "returns is already rounded to nearest"
        )
    if policy.partials_dtype == "float16" and device.type != "cuda":
        return emulated, (
            "precision.partials_dtype=float16: CPU kernels accumulate in float32 and have no switch"
        )
    if policy.tf32:
        no = f"{device.type} here has no TensorFloat-32"
        return (both, "") if has_tf32(device) else (emulated, no)
    if policy.is_low:
        return both, ""
    no = f"precision={policy.name} runs natively on every device and has no emulation"
    return ("native",), no


def choose_layers(config: Config, recipe: Recipe, policy: Policy) -> dict[str, str]:
    """`precision.layers` over `precision.layers_file`, each key resolved to modules' names.

    On a fake model, which is brought to its dtypes to see whether that can be done.
    """
    wanted = {key: dtype.name for key, dtype in config.precision.layers.items()}
    if config.precision.layers_file is not None:
        wanted = {**_layers_file(Path(config.precision.layers_file)), **wanted}
    if not wanted:
        return {}
    with torch.random.fork_rng(devices=[]), FakeTensorMode():
        model = recipe.model()
        try:
            found = resolve(model, wanted)
            if policy.casting == "none":
                dtypes = {name: LAYER_DTYPES[dtype] for name, dtype in found.items()}
                convert(model, torch.device("cpu"), torch_dtype(policy.param_dtype), layers=dtypes)
        except ValueError as error:
            raise UsageError(str(error)) from None
    return found


def _layers_file(path: Path) -> dict[str, str]:
    """The mapping in a file, checked: names to dtypes."""
    legal = list(LayerDType.__members__)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = first_line(error)
        raise UsageError(f"precision.layers_file={path} cannot be read ({reason})") from None
    if not isinstance(found, dict) or not all(v in legal for v in found.values()):
        raise UsageError(
            f"precision.layers_file={path}: a line for each module, 'name: dtype', "
            f"with dtype one of {', '.join(legal)}"
        )
    return {str(key): value for key, value in found.items()}


def choose_by_float32(speed: str, policy: Policy, execution: str, device: torch.device) -> str:
    """Which float16 ops a CPU computes in float32: none, backward (convolutions') or all.

    `speed=plain` keeps every kernel, and emulation has none. Else it depends on whether float16
    matmuls have instructions of their own here, which is measured.
    """
    native = execution == "native" and policy.compute_dtype == "float16"
    if speed == "plain" or not native or device.type != "cpu":
        return "none"
    # Kernels with their own instructions run near float32's speed, reference loops 50 times slower.
    return "backward" if accelerated(torch.float16, device, tolerance=4.0) else "all"


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
    return Precision(
        policy,
        caster,
        build_arithmetic(chosen),
        build_loss_scale(chosen.config, chosen.layers, chosen.device),
        NoClip() if clip_norm is None else ClipNorm(clip_norm),
        layers=chosen.layers,
    )


def build_arithmetic(chosen: Plan) -> Arithmetic:
    """Whose kernels compute: PyTorch's, or mprun's stand-ins."""
    if chosen.policy.tf32 and chosen.execution == "emulated":
        return EmulatedTf32()
    policy = chosen.policy
    if chosen.execution == "emulated":
        everywhere = policy.rounding_scope == "all"
        return Emulated16(
            policy.rounding if everywhere else "nearest",
            policy.overflow,
            policy.partials_dtype,
            chosen.config.seed,
        )
    if policy.partials_dtype == "float16":
        return BlockedConvolutions()
    if chosen.by_float32 != "none":
        return Float16ByFloat32(matmuls=chosen.by_float32 == "all")
    return NativeArithmetic()


def build_loss_scale(config: Config, layers: Mapping[str, str], device: torch.device) -> LossScale:
    """The loss scale the configuration asks for, or the mode or one of its layers needs."""
    scale, kind = config.loss_scale, loss_scale_kind(config, layers.values())
    if kind == "static":
        return StaticLossScale(DEFAULT_STATIC if scale.value is None else scale.value, device)
    if kind == "dynamic":
        rule = DynamicRule(
            scale.growth_factor, scale.backoff_factor, scale.growth_interval, scale.floor
        )
        initial = DEFAULT_INITIAL if scale.value is None else scale.value
        return DynamicLossScale(initial, rule, device)
    return NoLossScale()


def build_parts(chosen: Plan) -> Parts:
    """Everything the loop runs on.

    Weights are drawn on the CPU, in float32, from the seed, and replaced by the plan's, if any.
    """
    config, recipe, device = chosen.config, chosen.recipe, chosen.device
    torch.manual_seed(config.seed)
    precision = build_precision(chosen)
    model = recipe.model()
    chosen.weights.load_into(model)  # after the draw: random numbers stay those of a run without
    model = precision.prepare(model, device, chosen.speed.torch_memory_format)
    optimizer = build_optimizer(
        config.train.optimizer, model, chosen.lr, chosen.policy, chosen.speed, config.seed
    )
    splits, batch = chosen.splits, chosen.batch
    order = Order(len(splits.train), config.seed, splits.shuffle)

    def batches(data: TensorSet, size: int) -> Batches:
        def prepare(inputs: torch.Tensor) -> torch.Tensor:
            return chosen.speed.inputs(recipe.prepare(inputs).to(precision.input_dtype))

        return Batches(place(stored(data), device), size, prepare, device)

    def stored(data: TensorSet) -> TensorSet:
        """Samples the recipe takes as they lie are converted once, before they travel."""
        as_they_lie = type(recipe).prepare is Recipe.prepare and data.inputs.is_floating_point()
        return data.with_inputs(precision.input_dtype) if as_they_lie else data

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


def build_schedule(kind: Scheduler, optimizer: Optimizer, steps: int | None) -> Schedule:
    """The learning-rate schedule over the planned optimizer steps."""
    if kind is Scheduler.none or steps is None:
        return NoSchedule()
    if kind is Scheduler.cosine:
        return TorchSchedule(CosineAnnealingLR(optimizer, T_max=steps))
    return TorchSchedule(LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps))


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
            replace(
                chosen,
                splits=replace(splits, train=samples, validation=none, test=none),
                execution="native",  # what a mode needs, not what emulating it takes
                by_float32="none",
                weights=DRAWN,  # fake tensors have no values to load into
            )
        )
        batch = next(parts.train.epoch(None))
        trainer = Trainer(parts, chosen.limits, NoObserver(), lambda: False)
        return measure(
            lambda: trainer.optimizer_step(batch),
            parts.model,
            parts.optimizer,
            [batch.inputs, batch.targets],
        )
