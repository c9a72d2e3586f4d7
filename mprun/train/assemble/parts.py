"""From a plan to the objects of a run: precision, model, optimizer, batches, loggers.

`effective` reads the precision of a run from these objects, because a requested value can have no
effect: an optimizer without momentum stores none in any dtype, and float32 parameters are not
rounded. So each column comes from the object that decides it: the parameters, their gradient
buffers, the optimizer, the caster, the arithmetic, the backend switches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.config import Config
from mprun.config.validate import loss_scale_kind, without_inert
from mprun.optim.optimizers import rounding_columns
from mprun.precision import Arithmetic, Caster, DynamicRule, LossScale, Precision, devices
from mprun.precision._torch_switches import tf32_is_on
from mprun.precision.caster import caster_of
from mprun.precision.execution import arithmetic_for
from mprun.precision.layers import dtype_of
from mprun.precision.loss_scale import ALONE, Combine, loss_scale_of_kind
from mprun.precision.nested import all_tensors, map_tensors, to_dtype
from mprun.precision.op_lists import CastLog, Watcher
from mprun.precision.policy import dtype_name, most_used, torch_dtype
from mprun.records.run_config import variant_hash
from mprun.records.run_record import (
    BackendRow,
    DataRow,
    FpExceptionsRow,
    LossScaleRow,
    Metric,
    ParallelRow,
    PrecisionRow,
    Summary,
)
from mprun.train.assemble.optimizer import (
    StepsInBackward,
    build_optimizer,
    build_schedule,
    unused_by,
)
from mprun.train.assemble.plan import Plan
from mprun.train.callbacks import Messages
from mprun.train.checkpoint import seed_process
from mprun.train.clock import clock_for
from mprun.train.data import (
    Batches,
    BatchForm,
    LoadedSet,
    LoaderBatches,
    LoaderOrder,
    Order,
    TensorBatches,
    TensorOrder,
    TensorSet,
)
from mprun.train.data.batches import WHOLE, BatchSplit, MicroBatch, place
from mprun.train.data.loader_sets import Reading
from mprun.train.data.random_numbers import seed_all
from mprun.train.init_from import DRAWN
from mprun.train.logger import LoggedRun, Logger, run_tags
from mprun.train.loggers import build_loggers
from mprun.train.loop import TrainingComponents
from mprun.train.loss_terms import checked_count
from mprun.train.machine.conditions import allocator
from mprun.train.machine.speed_choices import use_onednn
from mprun.train.parallel.layouts import Layout
from mprun.train.parallel.ranks import Ranks
from mprun.train.recorder import new_summary, of_all_processes
from mprun.train.sums import readback_for
from mprun.train.user_code import model_of
from mprun.watch.memory_recorder import fake_tensors
from mprun.watch.nonfinite import RunExceptions, WatchedRunExceptions


def build_precision(
    plan: Plan,
    caster: Caster | None = None,
    arithmetic: Arithmetic | None = None,
    make: Callable[..., Precision] = Precision,
    combine: Combine = ALONE,
) -> Precision:
    """What carries out the plan's policy, with its caster and arithmetic unless others are given.

    `make` has the arguments of `Precision`; processes with shards agree on norms and overflows by
    `combine`.
    """
    return make(
        plan.policy,
        device=plan.device,
        execution=arithmetic or build_arithmetic(plan),
        loss_scale=build_loss_scale(plan.config, plan.layers, plan.device),
        max_norm=plan.config.train.clip_norm,
        combine=combine,
        layers=plan.layers,
        op_lists=caster or build_caster(plan),
    )


def build_exceptions(plan: Plan, ranks: Ranks | None = None) -> RunExceptions:
    """The detection of floating-point exceptions that `debug.fp_exceptions` asks for."""
    debug = plan.config.debug
    if debug.fp_exceptions == "off":
        return RunExceptions()
    share = partial(of_all_processes, ranks or Ranks())
    return WatchedRunExceptions(debug.fp_exceptions, debug.halt_after, share)


def build_caster(plan: Plan, watcher: Watcher | None = None) -> Caster:
    """What decides the dtypes of ops; `watcher` is notified of the casts of op lists."""
    several = plan.batch.accumulate > 1  # then a weight is cast once for all passes of a step
    return caster_of(plan.policy, plan.device.type, plan.op_lists, keep=several, watcher=watcher)


def build_arithmetic(plan: Plan, ranks: Ranks | None = None) -> Arithmetic:
    """Whose kernels compute: PyTorch's or mprun's."""
    ranks = ranks or Ranks()
    # Each process rounds its samples' results with bits of its own; a seed of a run has 32 bits.
    seed = plan.config.seed + (ranks.rank << 32)
    return arithmetic_for(plan.policy, plan.execution, plan.fp32_fallback, seed)


def build_loss_scale(config: Config, layers: Mapping[str, str], device: torch.device) -> LossScale:
    """The loss scale of the configuration, or the one that the mode or a layer needs."""
    scale, kind = config.loss_scale, loss_scale_kind(config, layers.values())
    rule = DynamicRule(
        scale.growth_factor, scale.backoff_factor, scale.growth_interval, scale.floor
    )
    return loss_scale_of_kind(kind, scale.value, device, rule)


def build_run(
    plan: Plan, report: Callable[[str], None], layout: Layout
) -> tuple[TrainingComponents, RunExceptions]:
    """The parts of a run, and the detection of floating-point exceptions in them.

    With `op_lists.verbose` each cast is given to `report`, which prints a line.
    """
    exceptions = build_exceptions(plan, layout.ranks)
    verbose = plan.op_lists is not None and plan.config.op_lists.verbose
    caster = build_caster(plan, CastLog(report) if verbose else None)
    arithmetic = build_arithmetic(plan, layout.ranks)
    precision = build_precision(plan, caster, arithmetic, exceptions.precision, layout.combine)
    parts = build_parts(plan, precision, layout)
    # after the weights, which all processes draw alike: from here on dropout differs
    seed_process(plan.config.seed, layout.ranks)
    if plan.speed.compile:
        compile_model(parts.model)
    return parts, exceptions


def compile_model(model: nn.Module) -> None:
    """Compile a model, each shape for itself.

    With dynamic shapes the code that runs on a batch would depend on the shapes seen before it
    (those of an evaluation), and a resumed run may not repeat the bits of an uninterrupted one.
    """
    model.compile(dynamic=False)


def compiled_model(model: nn.Module) -> nn.Module:
    """The same, as a module of its own around the model, which stays as it is."""
    return cast(nn.Module, torch.compile(model, dynamic=False))


def build_parts(
    plan: Plan, precision: Precision | None = None, layout: Layout | None = None
) -> TrainingComponents:
    """Everything the loop runs on, with the plan's precision unless one is given.

    Weights are drawn on the CPU, in float32, from the seed, and replaced by the plan's, if any.
    Without a layout, one process takes its own part of each batch alone.
    """
    config, recipe, device = plan.config, plan.recipe, plan.device
    precision, layout = precision or build_precision(plan), layout or Layout()
    model, optimizer = build_model(plan, precision, layout)
    splits, size = plan.splits, config.train.eval_batch_size
    split = BatchSplit(layout.ranks.rank, layout.ranks.size)

    def evaluated(data: TensorSet | LoadedSet) -> Batches:
        return build_batches(plan, data, size, size, shuffle=False, split=split)[0]

    per_process = plan.batch.micro * plan.batch.accumulate
    train, order = build_batches(
        plan, splits.train, per_process, plan.batch.micro, splits.shuffle, split
    )
    early = config.speed.optimizer_in_backward
    return TrainingComponents(
        recipe=recipe,
        model=model,
        optimizer=optimizer,
        scheduler=build_schedule(config.train, recipe, optimizer, plan.planned_steps),
        precision=precision,
        train=train,
        order=order,
        validation=evaluated(splits.validation),
        test=evaluated(splits.test),
        clock=clock_for(device),
        readback=readback_for(device),
        layout=layout,
        backward=StepsInBackward(optimizer).backward if early else nullcontext,
    )


def first_samples(plan: Plan, at_most: int) -> MicroBatch:
    """The first samples of the training data, in the stored order: a batch, or `at_most`."""
    size = min(plan.config.train.batch_size or at_most, at_most)
    batches, _ = build_batches(plan, plan.splits.train, size, size, shuffle=False)
    with closing(iter(batches)) as stream:  # ends a loader's processes
        return next(stream).parts[0]


def build_batches(
    plan: Plan,
    data: TensorSet | LoadedSet,
    size: int,
    micro: int,
    shuffle: bool,
    split: BatchSplit = WHOLE,
) -> tuple[Batches, Order]:
    """The batches of a part of the plan's data, and the order of its epochs.

    A batch has `size` samples in each process, a forward pass `micro`; `shuffle` visits them in
    random order, and `split` says which part of each batch is this process's.
    """
    form, device, seed = batch_form(plan), plan.device, plan.config.seed
    if isinstance(data, TensorSet):
        # floating samples that are prepared stay on the host: all modes prepare the same numbers
        is_floating = any(x.is_floating_point() for x in all_tensors(data.inputs))
        placed = data if is_floating and plan.recipe.prepares else place(data, device)
        whole = size * split.of
        in_memory: Batches = TensorBatches(placed, whole, form, device, micro, split)
        return in_memory, TensorOrder(len(data), seed, shuffle)
    generator = torch.Generator()
    reading = Reading(micro, shuffle, plan.config.data.workers, devices.backend(device).pins)
    batches = LoaderBatches(data, reading, generator, form, device, size // micro, split)
    return batches, LoaderOrder(generator, seed)


def batch_form(plan: Plan) -> BatchForm:
    """How a batch of the plan's recipe is prepared and brought to the mode's input dtype.

    Inputs that the loss does not read have that dtype and format in the batch itself.
    """
    recipe, dtype = plan.recipe, torch_dtype(plan.policy.input_dtype)
    forwards_target = recipe.forwards_target

    def one(x: Tensor) -> Tensor:
        return plan.speed.inputs(x.to(dtype) if x.is_floating_point() else x)

    def convert(content: Any) -> Any:
        if forwards_target or not isinstance(content, tuple | list) or len(content) < 2:
            return map_tensors(one, content)
        *inputs, target = content
        return (*map_tensors(one, tuple(inputs)), target)

    form = BatchForm(recipe.prepare, convert, checked_count(recipe))
    if dtype == torch.float64:
        return replace(form, widen=partial(to_dtype, dtype=dtype))
    if recipe.loss_reads_inputs:
        return form
    return BatchForm(lambda inputs: map_tensors(one, recipe.prepare(inputs)), count=form.count)


def build_model(
    plan: Plan, precision: Precision, layout: Layout | None = None
) -> tuple[nn.Module, Optimizer]:
    """The model, drawn from the seed and prepared by `precision`, and its optimizer."""
    layout = layout or Layout()
    config, model = plan.config, prepared_model(plan, precision)
    if plan.speed.linear_impl == "onednn":
        use_onednn(model)
    layout.arrange(model, plan.policy)
    with layout.trainable(model):
        section, given = config.train.optimizer, (plan.lr, plan.policy, plan.speed, config.seed)
        optimizer = build_optimizer(section, plan.recipe, model, *given)
    return model, optimizer


def prepared_model(plan: Plan, precision: Precision) -> nn.Module:
    """The model, drawn from the seed and prepared by `precision`."""
    seed_all(plan.config.seed)  # here, so that data and metrics do not change the weights drawn
    model = model_of(plan.recipe)
    plan.weights.load_into(model)  # after drawing, so that later random numbers do not change
    return precision.prepare(model, plan.device, plan.speed.torch_memory_format)


def run_loggers(
    plan: Plan,
    resolved: dict[str, Any],
    summary: Summary,
    folder: Path,
    first_step: int | None,
    messages: Messages,
) -> list[Logger]:
    """The run's loggers; nothing is written before the first step."""
    config = plan.config.logger
    logged = LoggedRun(
        folder=folder,
        project=config.project or summary.recipe,
        name=config.run_name or f"{summary.variant} seed {summary.seed}",
        configuration=resolved,
        tags={**config.tags, **run_tags(summary)},
        uri=config.uri,
        online=config.mode == "online",
        first_step=first_step,
        log_every=plan.config.train.log_every,
    )
    return build_loggers(config.name, logged, messages.warn, messages.report)


# ---- the precision that is carried out -----------------------------------------------------------


def requested(plan: Plan) -> PrecisionRow:
    """The policy as the configuration asks for it."""
    extra: dict[str, Any] = {"op_lists": plan.config.op_lists.name, "layers": plan.layers}
    return PrecisionRow(**extra, **plan.policy.columns())


def planned(plan: Plan) -> PrecisionRow:
    """`effective` of the plan's objects on fake tensors, before the run builds its own.

    It is the requested row if the model cannot be built like this (it reads values of tensors).
    """
    try:
        with fake_tensors(), plan.backend_flags():
            precision = build_precision(plan)
            # fake tensors have no values, so no weights are loaded into them
            model, optimizer = build_model(replace(plan, weights=DRAWN), precision)
            return effective(plan, model, optimizer, precision)
    except Exception:
        return requested(plan)


def effective(
    plan: Plan, model: nn.Module, optimizer: Optimizer, precision: Precision
) -> PrecisionRow:
    """The columns of the built objects; call it with the run's backend switches set.

    `param_dtype` and `accum_dtype` are those of the parameters outside of `precision.layers`. A
    moment that the optimizer does not store is computed in float32, so it is float32 here.
    """
    row: dict[str, Any] = {**vars(requested(plan)), "tf32": tf32_is_on(plan.device)}
    named = [(n, p) for n, p in model.named_parameters() if p.is_floating_point()]
    outside = [p for n, p in named if dtype_of(n, plan.layers, "") == ""]
    if outside := outside or [p for _, p in named]:
        stored = most_used((p.dtype, p.numel()) for p in outside)
        row["param_dtype"] = row["compute_dtype"] = dtype_name(stored)
    if trained := [p for p in outside if p.requires_grad]:
        accumulated = most_used((p.grad_dtype or p.dtype, p.numel()) for p in trained)
        row["accum_dtype"] = dtype_name(accumulated)
    row.update(rounding_columns(optimizer, [p.dtype for _, p in named]))
    row.update(precision.columns)
    if plan.config.parallel.world_size == 1:  # no gradient is sent, so none is sent in 16 bits
        row["reduce_dtype"] = "float64" if plan.policy.name == "fp64" else "float32"
    if row["casting"] != "op_lists":
        row["op_lists"] = "none"
    return PrecisionRow(**row)


# ---- the summary of a run that starts ------------------------------------------------------------


def initial_summary(
    plan: Plan,
    resolved: dict[str, Any],
    elapsed_s: float = 0.0,
    effective: PrecisionRow | None = None,
) -> Summary:
    """The summary of a run before its first step, `elapsed_s` after its start-up began.

    `effective` is the precision that is carried out; None: that of the plan's objects.
    """
    config, splits = plan.config, plan.splits
    unused = {*plan.recipe.ignores, *unused_by(plan.recipe)}
    # on the CPU, where reading the value waits for no GPU
    scale = build_loss_scale(config, plan.layers, torch.device("cpu"))
    initial = 1.0 if scale.tensor is None else scale.tensor.item()
    action = config.debug.fp_exceptions
    return new_summary(
        plan.device,
        [plan.policy.compute_dtype] if plan.policy.is_low else [],
        elapsed_s,
        sum(part.nbytes for part in (splits.train, splits.validation, splits.test)),
        recipe=config.recipe.name,
        recipe_sha256=None if plan.recipe_source is None else plan.recipe_source.sha256,
        seed=config.seed,
        precision=plan.policy.name,
        variant=variant_label(plan),
        variant_hash=variant_hash(without_inert(config, resolved, unused)),
        requested=requested(plan),
        effective=effective or planned(plan),
        execution=plan.execution,
        backend=BackendRow(
            memory_format=plan.speed.memory_format,
            optimizer_impl=plan.speed.optimizer_impl,
            compile=plan.speed.compile,
            linear_impl=plan.speed.linear_impl,
            optimizer_in_backward=plan.config.speed.optimizer_in_backward,
            threads=torch.get_num_threads(),
            allocator=allocator(),
            speed_trial=plan.speed_reason,
        ),
        data=DataRow(
            name=splits.name,
            source=splits.source,
            train_samples=splits.train.samples,
            validation_samples=splits.validation.samples,
            test_samples=splits.test.samples,
        ),
        batch=plan.batch,
        batch_size=plan.batch.effective,
        loss_scale=LossScaleRow(kind=scale.kind, initial=initial, final=initial),
        fp_exceptions=None
        if action == "off"
        else FpExceptionsRow(action=action, finding=0, expected=0, absorbed=0, dropped_steps=0),
        warnings=list(plan.warnings),
        parallel=ParallelRow(
            kind=config.parallel.name if config.parallel.world_size > 1 else "none",
            world_size=config.parallel.world_size,
        ),
        metric=Metric(name=plan.recipe.METRIC[0], higher_is_better=plan.recipe.METRIC[1] == "max"),
    )


def variant_label(plan: Plan) -> str:
    """A short name for tables: the mode and the differences to it."""
    factor, lists = plan.config.batch.factor, plan.config.op_lists
    files = (lists.lower_file, lists.fp32_file, lists.promote_file)
    label = plan.policy.name + (f"+{lists.name}" if plan.op_lists else "")
    label += "+files" if any(files) else ""
    label += "+skip" if plan.config.debug.fp_exceptions == "skip" else ""
    label += f" x{factor}" if factor > 1 else ""
    parallel = plan.config.parallel
    return label + (f" {parallel.name}-{parallel.world_size}" * (parallel.world_size > 1))
