"""The memory of a plan's training step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from mprun.config import Config
from mprun.config.validate import loss_scale_kind
from mprun.errors import MprunError, UsageError
from mprun.precision.arithmetic import products_in_float32
from mprun.precision.nested import all_tensors, map_tensors
from mprun.records.layer_values import without_formats
from mprun.train.assemble.parts import batch_form, build_parts
from mprun.train.assemble.plan import Plan, batch_sizes, data_request
from mprun.train.assemble.recipe_loading import NO_DATA, load_data, without_values
from mprun.train.data import Batch, BatchForm, MicroBatch, TensorBatches, TensorSet
from mprun.train.data.loader_sets import batch_size
from mprun.train.data.random_numbers import untouched
from mprun.train.init_from import DRAWN
from mprun.train.loop import Trainer, TrainingComponents
from mprun.train.machine.machine import memory_bytes
from mprun.train.user_code import described
from mprun.watch.memory_recorder import DtypeMismatchError, StepMemory, fake_tensors, memory

# Of the device's memory: a model with more parameters gets no second one beside it, which with
# float32 gradients and the two moments of Adam takes four times as much
MAX_MEMORY = 0.1


def step_memory(plan: Plan, real: bool = True) -> StepMemory:
    """The tensors alive during one training step of this plan, on fake tensors.

    The batch is never larger than the training set, unless the plan was made with `load_shapes`.
    With `real`, a model that reads values, which fake tensors do not have, takes a real step; the
    result then has `why_real`.

    Raises:
        DtypeMismatchError: the step cannot run.
        UsageError: a loader's batches cannot be resized to the plan's.
    """
    native = as_native(plan)
    try:
        with fake_step(native) as (parts, batch):
            return _of_step(native, parts, batch)
    except (DtypeMismatchError, UsageError):
        raise
    except Exception as error:
        if not real:
            raise
        reason = f"it does not run on fake tensors ({described(error, plan.policy.name)})"
        return replace(_on_real_tensors(native), why_real=reason)


def has_room_for_another(model: nn.Module, device: torch.device) -> bool:
    """Whether a second model, with its gradients and state, is small beside the device's memory."""
    memory = memory_bytes(device)
    parameters = sum(p.nbytes for p in model.parameters())
    return memory is None or parameters <= MAX_MEMORY * memory


def as_native(plan: Plan) -> Plan:
    """The plan with the ops that its mode needs, without those that emulate or replace some.

    Products with formats of their own are bfloat16's: native ones keep the same tensors between
    forward and backward pass, and rounded factors live no longer than their product.
    """
    policy = plan.policy
    policy = policy.with_partials("float32") if policy.has_low_partials else policy
    is_native = (plan.execution, plan.policy, plan.fp32_fallback) == ("native", policy, "none")
    if is_native and policy.gemms == "none":
        return plan
    plan = replace(plan, execution="native", policy=policy, fp32_fallback="none")
    if policy.gemms == "none":
        return plan
    # the name of the mode without those products, by which equal steps are recognised
    name = "bf16_mixed" if policy.gemms == policy.name else policy.name
    plain = replace(policy, name=name, gemms="none", hadamard=False)
    return replace(plan, policy=plain, layers=without_formats(plan.layers))


def same_step(one: Plan, other: Plan) -> bool:
    """Whether the counted steps of two plans have the same tensors at each op, by construction.

    That is so where all they are built from is equal. What differs between modes and decides no
    tensor is left aside: the mode's name, TensorFloat-32 (how a kernel rounds), and where results
    are rounded (emulation, which is not counted).
    """
    return _deciding(one) == _deciding(other)


def _deciding(plan: Plan) -> tuple[object, ...]:
    """What decides the tensors of the counted step; samples follow from recipe and dtype."""
    plan, usual = as_native(plan), Config()
    policy = replace(plan.policy, name="", tf32=False, rounding_scope="update")
    config = replace(
        plan.config, precision=usual.precision, execution=usual.execution, run=usual.run
    )
    loss_scale = loss_scale_kind(plan.config, plan.layers.values())
    parts = (plan.recipe, plan.recipe_source, plan.device, plan.speed, plan.batch, plan.lr)
    return (*parts, plan.layers, plan.op_lists, plan.weights, policy, loss_scale, config)


@contextmanager
def fake_step(plan: Plan) -> Iterator[tuple[TrainingComponents, Batch]]:
    """What a step of this plan runs on, and its batch, on fake tensors; the step runs inside."""
    shapes = _shapes(plan)
    form = replace(batch_form(plan), count=None)  # fake tensors cannot be counted
    one, none = TensorSet(torch.empty(1)), TensorSet(torch.empty(0))
    splits = replace(plan.splits, train=one, validation=none, test=none)
    with fake_tensors():
        # fake tensors have no values to load into
        parts = build_parts(replace(plan, splits=splits, weights=DRAWN))
        yield parts, _fake_batch(plan, shapes, form)


def _on_real_tensors(plan: Plan) -> StepMemory:
    # a plan of `load_shapes` has shapes alone, and a real step needs values
    if isinstance(plan.splits.train, TensorSet) and plan.splits.train.device.type == "meta":
        plan = replace(plan, splits=load_data(plan.recipe, data_request(plan.config)))
    # a skipped step has no optimizer state: no gradient overflows at the smallest scale there is
    scale = replace(plan.config.loss_scale, value=1.0)
    plan = replace(plan, config=replace(plan.config, loss_scale=scale))
    # building draws weights, and the run's random numbers must not move
    with plan.backend_flags(), torch.random.fork_rng(devices=[]), products_in_float32():
        parts = build_parts(plan)
        with closing(parts.train.epoch(parts.order.draw())) as batches:
            return _of_step(plan, parts, next(batches).trained)


def _of_step(plan: Plan, parts: TrainingComponents, batch: Batch) -> StepMemory:
    trainer = Trainer(parts, plan.limits)
    return memory(
        lambda: trainer.optimizer_step(batch),
        parts.model,
        parts.optimizer,
        all_tensors([(part.content, part.inputs) for part in batch.parts]),
    )


def _shapes(plan: Plan) -> TensorSet | MicroBatch:
    """Samples of a step whose values are not read, or a micro-batch that cannot be resized.

    Samples that a loader reads are taken from its first batch.
    """
    train, rows = plan.splits.train, plan.batch.micro * plan.batch.accumulate
    if isinstance(train, TensorSet):
        known = train.device.type != "meta"
        return without_values(train.content, min(rows, len(train)) if known else rows)
    known = plan.splits.source != NO_DATA
    content = train.example(plan.batch.micro)
    size = batch_size(content)
    if all(x.dim() and len(x) == size for x in all_tensors(content)):
        return without_values(content, min(rows, (known and train.samples) or rows))
    if train.own_batch_size not in (None, plan.batch.micro):
        raise UsageError(
            f"a batch of {plan.batch.micro} samples cannot be planned: the batches of the recipe's "
            f"DataLoader have {train.own_batch_size} and tensors of other lengths"
        )
    return MicroBatch(content, content, size, size)


def _fake_batch(plan: Plan, shapes: TensorSet | MicroBatch, form: BatchForm) -> Batch:
    """The batch of a step on fake tensors."""

    def fake(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=plan.device)

    if isinstance(shapes, TensorSet):
        sizes = (plan.batch.micro * plan.batch.accumulate, plan.batch.micro)
        batches = TensorBatches(shapes.map(fake), sizes[0], form, plan.device, sizes[1])
        return next(batches.epoch(None))
    content = form.prepared(map_tensors(fake, shapes.content))
    part = form.micro_batch(content, form.convert(content), shapes.size)
    return Batch((part,) * plan.batch.accumulate)


def with_batch_size(plan: Plan, size: int) -> Plan:
    """The plan with `train.batch_size=size`, without its preset's cap."""
    train = replace(plan.config.train, batch_size=size)
    # the cap of preset=smoke bounds a run's time, and here a size is tried
    preset = replace(plan.config.preset, max_batch_size=None)
    batch, _ = batch_sizes(replace(plan.config, train=train, preset=preset))
    return replace(plan, batch=batch)


def footprint(
    plan: Plan, real: bool = True, quick: bool = False
) -> tuple[dict[str, int], str | None]:
    """Bytes alive at the peak of that step, by category, as in a record's `memory_bytes`.

    The second value is the reason why the step could not be one on fake tensors, else None. The
    process's random numbers are restored. `real` is as in `step_memory`; `quick`: steps take so
    little time that real ones are taken. The first fake tensor imports PyTorch's compiler (1.8 s).
    """
    if (parallel := plan.config.parallel).world_size > 1:
        raise MprunError(
            f"it is counted for one process alone, not for {parallel.world_size} of {parallel.name}"
        )
    with untouched():
        takes_real = quick and "torch._dynamo" not in sys.modules
        counted = _on_real_tensors(as_native(plan)) if takes_real else step_memory(plan, real)
    return counted.totals, counted.why_real
