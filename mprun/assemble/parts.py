"""The parts that the loop runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun import devices
from mprun.assemble.learning_rate import build_schedule
from mprun.assemble.optimizer import build_optimizer
from mprun.assemble.plan import Plan
from mprun.assemble.precision_parts import (
    build_arithmetic,
    build_caster,
    build_exceptions,
    build_precision,
)
from mprun.data import (
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
from mprun.data.batches import place
from mprun.data.loader_sets import Reading
from mprun.data.random_states import seed_all
from mprun.data.split import WHOLE, BatchSplit
from mprun.nested import all_tensors, map_tensors
from mprun.numerics.nonfinite import RunExceptions
from mprun.parallel.layouts import Layout
from mprun.precision import Precision
from mprun.precision.op_lists import CastLog
from mprun.precision.policy import torch_dtype
from mprun.train.clock import clock_for
from mprun.train.loop import Parts
from mprun.train.loss_terms import checked_count
from mprun.train.metric_readback import readback_for
from mprun.train.process_states import seed_process
from mprun.train.user_code import model_of


def build_run(
    plan: Plan, report: Callable[[str], None], layout: Layout
) -> tuple[Parts, RunExceptions]:
    """The parts of a run, and the detection of floating-point exceptions in them.

    Args:
        plan: the plan.
        report: prints a line; with `op_lists.verbose` each cast is reported.
        layout: what this process holds of the model.
    """
    exceptions = build_exceptions(plan, layout.ranks)
    verbose = plan.op_lists is not None and plan.config.op_lists.verbose
    caster = build_caster(plan, CastLog(report) if verbose else None)
    arithmetic = build_arithmetic(plan, layout.ranks)
    make, combine = exceptions.precision, layout.combine
    precision = build_precision(plan, caster, arithmetic, make, combine)
    parts = build_parts(plan, precision, layout)
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


def build_parts(
    plan: Plan, precision: Precision | None = None, layout: Layout | None = None
) -> Parts:
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
    return Parts(
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
    )


def build_batches(
    plan: Plan,
    data: TensorSet | LoadedSet,
    size: int,
    micro: int,
    shuffle: bool,
    split: BatchSplit = WHOLE,
) -> tuple[Batches, Order]:
    """The batches of a part of the plan's data, and the order of its epochs.

    Floating samples in memory that a recipe prepares stay on the host in every mode. They are
    prepared there, so all modes train on the same numbers, and sent in the mode's dtype.

    Args:
        plan: the plan.
        data: the part.
        size: samples of a batch in each process.
        micro: samples of a forward pass.
        shuffle: visit them in random order.
        split: this process's part of each batch.
    """
    form, device, seed = batch_form(plan), plan.device, plan.config.seed
    if isinstance(data, TensorSet):
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

    count = checked_count(recipe)
    if recipe.loss_reads_inputs:
        return BatchForm(recipe.prepare, convert, count)
    return BatchForm(lambda inputs: map_tensors(one, recipe.prepare(inputs)), count=count)


def build_model(
    plan: Plan, precision: Precision, layout: Layout | None = None
) -> tuple[nn.Module, Optimizer]:
    """The model, drawn from the seed and prepared by `precision`, and its optimizer.

    Args:
        plan: the plan.
        precision: carries the policy out.
        layout: what this process holds of the model; None: all of it.
    """
    layout = layout or Layout()
    config = plan.config
    seed_all(config.seed)
    model = model_of(plan.recipe)
    plan.weights.load_into(model)  # after drawing, so that later random numbers do not change
    model = precision.prepare(model, plan.device, plan.speed.torch_memory_format)
    layout.arrange(model, plan.policy)
    with layout.trainable(model):
        optimizer = build_optimizer(
            config.train.optimizer,
            plan.recipe,
            model,
            plan.lr,
            plan.policy,
            plan.speed,
            config.seed,
        )
    return model, optimizer
