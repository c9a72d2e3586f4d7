"""What dtypes the ops of a mode run in, and how far their numbers are from the format's limits.

Both checks look at the second step of a run, in which each op was watched (`inspect/step_ops.py`),
at a loss scale that does not overflow. What healthy models do by design is left out: PyTorch's own
casts, 16-bit inputs of layers whose kernels compute in float32, masks of infinities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from mprun.inspect.check.check_batches import depends_on_batch, not_repeatable
from mprun.inspect.check.check_result import Finding
from mprun.inspect.check.checked_mode import LOSS, CheckedMode, Region, batches_of
from mprun.inspect.float32_check import float32_loss, is_good_enough
from mprun.inspect.numerics import SEEDS
from mprun.inspect.op_trace import watched_arithmetic
from mprun.inspect.passes import in_float64
from mprun.inspect.quantity_errors import exact_values, quantity_errors, trained_weights
from mprun.inspect.search_result import decibels
from mprun.inspect.step_ops import StepOp, StepOps
from mprun.precision._torch import own_parameters
from mprun.precision.op_lists.lists import spelled
from mprun.precision.policy import dtype_name
from mprun.precision.products import LOW
from mprun.train.assemble.parts import build_arithmetic, build_parts, build_precision
from mprun.train.loop import Trainer, TrainingComponents
from mprun.train.recipe_quantities import quantities_of
from mprun.train.user_code import model_of
from mprun.watch.audit import audit

SAMPLES = 32  # Of the batches of these steps: each op is computed again in float64
MAX_SKIPPED = 24  # Steps that a dynamic loss scale may skip: from 2^16 it halves to 2^-8
# ATen's ops of linear layers and convolutions
LAYERS = ("addmm", "mm", "addmv", "mv", "convolution")
PRODUCTS = (*LAYERS, "bmm", "baddbmm")
# Ops of many numbers, of which a cast before them spoils the result
SUMS = (
    *("sum", "mean", "var", "var_mean", "std", "std_mean", "prod", "cumsum", "logsumexp", "norm"),
    *("linalg_vector_norm", "softmax", "log_softmax", "layer_norm", "group_norm", "batch_norm"),
    *("rms_norm", "index_add", "scatter_add"),
)
# Ops whose results have the numbers of a sum in them, in other places or beside others
KEEPS = (
    *("index", "index_select", "gather", "cat", "flip", "clone", "constant_pad_nd", "_to_copy"),
    *("add", "sub"),
)
# The error of what is left of a sum that is a finding, as a share of it, and how many times that of
# the sum: a difference of two numbers that are eight times as large loses three bits of eight
LOST, CANCELLED = 0.02, 8.0
# Different values of a tensor below which it may have 16-bit digits by chance: masks, constants
FEWEST = 32


@dataclass(frozen=True)
class WatchedStep:
    """What both checks look at."""

    ops: list[StepOp]
    loss_scale: float  # The dynamic one that fits, else 1
    stored: list[Finding]  # About numbers that outlast the step


def dtypes(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    yield from _substituted(mode)
    step, plan = _watched(mode), mode.plan
    float32_weights = plan.policy.param_dtype not in ("bfloat16", "float16")
    yield from _first_of_each(x for x in step.stored if float32_weights or x.kind == "lost_update")
    if float32_weights:
        sums = _cancelling_sums(step.ops) if plan.policy.casts else ()
        yield from _first_of_each([*_by_hand(step.ops), *sums])
    # otherwise the user may have asked for float32 in a layer
    plain = plan.policy.gemms == "none" and plan.op_lists is None and not plan.layers
    if plan.policy.casts and plain:
        yield from _first_of_each(_in_float32(mode, step.ops))


def robust(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    step = _watched(mode)
    yield from _first_of_each(_spoiled(step.ops, mode.plan.policy.is_low))
    yield from _headroom(mode, step)
    yield from mode.once("float32_is_wrong", lambda: [*_float32_is_wrong(mode)])
    yield from depends_on_batch(mode)
    yield from not_repeatable(mode)
    yield from _lost_quantities(mode)


def _lost_quantities(mode: CheckedMode) -> Iterator[Finding]:
    """Quantities of the recipe in which the mode's error is as large as the spread over seeds."""
    plan, steps, label = mode.exact, mode.settings.steps, mode.checks.label
    if mode.settings.fast or not quantities_of(plan.recipe):
        return
    if SEEDS * mode.checks.done.get("trains", 0.0) > mode.left_s:
        mode.checks.notes.append("quantities: check.budget_s leaves no time to train")
        return
    seed = plan.config.seed
    weights = mode.once("trained_weights", lambda: trained_weights(plan, steps, seed))
    exact = mode.once("quantities", lambda: exact_values(plan, weights, steps))
    mode.checks.quantities = quantity_errors(exact, weights, {label: mode.plan}, steps)
    for x in mode.checks.quantities:
        if x.training_db < math.inf and not x.db[label] >= x.training_db:
            text = f"{x.name} has {decibels(x.db[label])} against float64, training leaves "
            text += (
                f"{decibels(x.training_db)} (the spread over {x.seeds} seeds after {steps} steps)"
            )
            yield Finding("lost_quantity", "", text, at=x.training_db - x.db[label])


def _first_of_each(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The first finding of each kind and module."""
    seen = set()
    for x in findings:
        if (x.kind, x.module) not in seen:
            seen.add((x.kind, x.module))
            yield x


def _substituted(mode: CheckedMode) -> Iterator[Finding]:
    """Columns of the record that are not as requested."""
    summary, config = mode.planned.summary, mode.plan.config
    wanted, has = asdict(summary.requested), asdict(summary.effective)
    for key in (key for key in wanted if wanted[key] != has[key]):
        yield Finding("substituted", "", f"{key} is {has[key]}, requested is {wanted[key]}")
    if config.execution == "native" != mode.plan.execution:
        yield Finding("substituted", "", f"execution is {mode.plan.execution}, requested is native")


# ---- the watched step ----------------------------------------------------------------------------


def _watched(mode: CheckedMode) -> WatchedStep:
    """The second step of the mode, watched once."""
    known = vars(mode)  # as cached_property does; the step is nothing that the mode itself needs
    if "watched_step" not in known:
        known["watched_step"] = _watch(mode)
    step: WatchedStep = known["watched_step"]
    return step


def _watch(mode: CheckedMode) -> WatchedStep:
    plan, ops = mode.plan, StepOps()
    arithmetic = watched_arithmetic(build_arithmetic(plan), ops)
    parts = build_parts(plan, build_precision(plan, arithmetic=arithmetic))
    trainer, batch = Trainer(parts, plan.limits), batches_of(plan, SAMPLES)[0]
    made = model_of(plan.recipe)  # as the recipe makes it, before any cast
    findings = [*_rounded_before(made)]
    low = {name: x.dtype for name, x in made.named_buffers() if x.dtype in LOW}
    del made
    before = {name: x.clone() for name, x in parts.model.named_buffers()}
    with ops.muted():
        scale = _taken_step(trainer, batch)  # the first: the optimizer has no state before

    def judge(*args: object) -> None:
        findings.extend([*_rounded_before(parts.model), *_lost(parts.model, parts.optimizer)])

    # before the step: the gradients are unscaled then, and the weights those of the forward pass
    with parts.optimizer.register_step_pre_hook(judge), ops.watching(parts.model, parts.optimizer):
        trainer.optimizer_step(batch)
    findings += [*_stored(mode, parts), *_averages(low, parts.model, before)]
    return WatchedStep(ops.ops, scale, findings)


def _taken_step(trainer: Trainer, batch: object) -> float:
    """Steps until one is not skipped; its loss scale, if it is dynamic."""
    loss_scale = trainer.parts.precision.loss_scale
    for _ in range(MAX_SKIPPED):
        scale = 1.0 if loss_scale.tensor is None else loss_scale.tensor.item()
        skipped = trainer.optimizer_step(batch).skipped  # type: ignore[arg-type]
        if skipped is None or not skipped.item():
            break
    return scale if loss_scale.kind == "dynamic" else 1.0


# ---- what is stored ------------------------------------------------------------------------------


def _rounded_before(model: nn.Module) -> Iterator[Finding]:
    """Tensors of which each number has the digits of a 16-bit format."""
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        dtype = _grid_of(x.detach())
        if dtype is not None:
            module, _, own = name.rpartition(".")
            kind = "stored_in_16_bits" if x.dtype in LOW else "values_of_16_bits"
            text = f"each of {x.numel():,} numbers of {own} has the digits of {dtype_name(dtype)}"
            yield Finding(kind, module, text, at=x.numel())


def _grid_of(x: Tensor) -> torch.dtype | None:
    """The 16-bit format that all numbers have; None for others, and those with equal steps."""
    if x.dtype not in (torch.float32, *LOW):
        return None
    values = x[x.isfinite() & (x != 0)].float()
    for dtype in (torch.bfloat16, torch.float16):  # many numbers of bfloat16 are float16's too
        if torch.equal(values.to(dtype).float(), values):
            values = values.unique()
            if len(values) < FEWEST:
                return None
            # integers and fractions of a power of two have equal steps; rounded numbers do not
            step = 2.0 ** math.ceil(math.log2(float(values.abs().max()))) * torch.finfo(dtype).eps
            steps = values.double() / step
            return None if torch.equal(steps, steps.round()) else dtype
    return None


def _stored(mode: CheckedMode, parts: TrainingComponents) -> Iterator[Finding]:
    """Tensors of 16 bits after two steps, where the mode keeps float32 in all layers."""
    policy = mode.plan.policy
    held = [*parts.model.named_parameters(), *parts.model.named_buffers()]
    if policy.momentum_dtype == policy.variance_dtype == "float32":  # else 16 bits are asked for
        for name, p in parts.model.named_parameters():
            state = parts.optimizer.state.get(p, {}).items()
            held += [(f"{name}: {key}", x) for key, x in state if isinstance(x, Tensor)]
    for name, x in held:
        if x.dtype in LOW and not mode.plan.layers:
            module, _, own = name.rpartition(".")
            text = f"{own} has {dtype_name(x.dtype)} after two steps, {x.numel():,} numbers"
            yield Finding("stored_in_16_bits", module, text)


def _averages(
    low: Mapping[str, torch.dtype], model: nn.Module, before: Mapping[str, Tensor]
) -> Iterator[Finding]:
    """Buffers that the code makes in 16 bits and steps change; the mode's model widens them."""
    after = dict(model.named_buffers())
    for name, dtype in low.items():
        old, now = before.get(name), after.get(name)
        if old is None or now is None or now.dtype != torch.float32 or torch.equal(old, now):
            continue
        module, _, own = name.rpartition(".")
        text = f"the code makes {own} in {dtype_name(dtype)} and steps change it: an average "
        text += "stands still where a step moves it by less than 0.2 % of itself"
        yield Finding("stored_in_16_bits", module, text)


def _lost(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    """The module with most of the weights that stand still, if those are most of the model's."""
    still = [x for x in audit(model, optimizer).findings if x.kind == "lost_update"]
    own = {x: [*model.get_submodule(x.module).parameters(recurse=False)] for x in still}
    numbers = {x: sum(p.numel() for p in held) for x, held in own.items()}
    # most of the model: a norm's weights begin at 1, and stand still in every mode that rounds
    # updates to nearest
    if 2 * sum(numbers.values()) > sum(p.numel() for p in model.parameters() if p.requires_grad):
        most = max(still, key=lambda x: numbers[x])
        yield Finding("lost_update", most.module, most.text)


# ---- dtypes of ops -------------------------------------------------------------------------------


def _at(kind: str, op: StepOp, text: str, at: float = 0.0) -> Finding:
    line = "" if op.line is None else str(op.line)
    return Finding(kind, op.module, text, op.name, line, at)


def _by_hand(ops: list[StepOp]) -> Iterator[Finding]:
    """What the model's code computes of numbers that it makes, or casts, in 16 bits by itself."""
    used = {index for op in ops for _, index in op.inputs}
    low: set[int] = set()
    """Ops whose numbers have 16 bits by such code alone."""
    for i, op in enumerate(ops):
        made, read = dtype_name(op.makes), [index for dtype, index in op.inputs if dtype in LOW]
        if op.name == "_to_copy" and op.makes == torch.float32:
            for cast in (ops[index] for index in read if index >= 0 and ops[index].rounds):
                yield _at("cast_undone", cast, f"cast to {dtype_name(cast.makes)} and to {made}")
        if op.phase == "backward" or op.makes not in LOW:
            continue
        if op.rounds and read:
            names = f"{dtype_name(op.inputs[0][0])} to {made}"
            yield _at("cast_undone", op, f"a second rounding, {names}")
        elif op.rounds and not op.inputs:
            yield _at("lower_dtype", op, f"integers are rounded to {made}")
        is_alone = low.issuperset(read)  # no input has 16 bits by the mode's own casts
        if is_alone and op.error > 0 and i in used and spelled(op.name)[0] in SUMS:
            yield _at("lower_dtype", op, f"{made}, by a cast of the code")
        # a product's result has 16 bits by the mode, whatever it reads
        follows = is_alone and (read or not op.inputs) and op.name not in PRODUCTS
        if op.by_hand or follows:
            low.add(i)


def _cancelling_sums(ops: list[StepOp]) -> Iterator[Finding]:
    """Sums in 16 bits, rounded once, of which an op that reads them leaves little.

    A sum whose rounding stays as small as that of any other result is what the mode means.
    """
    sums: dict[int, StepOp] = {}
    """An op to the sum whose numbers are in its result."""
    for i, op in enumerate(ops):
        if op.phase == "backward":
            continue
        read = [index for _, index in op.inputs if index >= 0]
        known = [sums[x] for x in read if x in sums]
        before = max((ops[x].error for x in read), default=0.0)
        if op.makes in LOW and spelled(op.name)[0] in SUMS:
            sums[i] = op
        elif known and op.error > max(LOST, CANCELLED * before):
            text = f"{dtype_name(known[0].makes)}; an error of {op.error:.1%} is left by {op.name}"
            yield _at("lower_dtype", known[0], text, op.error)
        elif known and op.name in KEEPS:
            sums[i] = known[0]


def _in_float32(mode: CheckedMode, ops: list[StepOp]) -> Iterator[Finding]:
    """Layers with weights that run in float32."""
    model = mode.passes.model
    for op in ops:
        is_layer = op.phase == "forward" and op.name in LAYERS and op.makes == torch.float32
        if is_layer and own_parameters(model.get_submodule(op.module)):
            text = f"float32, the mode says {mode.plan.policy.compute_dtype}"
            yield _at("higher_dtype", op, text)


# ---- the format's limits -------------------------------------------------------------------------


def _spoiled(ops: list[StepOp], is_low: bool) -> Iterator[Finding]:
    """Results that overflow, but for those that read such a one, are noise, or lose a constant."""
    read = {index for op in ops for _, index in op.inputs}
    infinite: set[int] = set()
    for i, op in enumerate(ops):
        if op.vanishes:
            text = f"{op.vanishes:g} is 0 in {dtype_name(op.makes)}"
            yield _at("vanishing_constant", op, text)
        if any(index in infinite for _, index in op.inputs):  # the first one is the cause
            infinite.add(i)
        elif op.overflows:
            infinite.add(i)
            text = f"{op.overflows:.3g} is infinite in {dtype_name(op.makes)}"
            yield _at("overflow", op, text, op.overflows)
        if op.is_noise and is_low and i in read:  # noise that nothing reads does no damage
            yield _at("all_noise", op, f"an error of {op.error:.0%} of the result", op.error)


def _headroom(mode: CheckedMode, step: WatchedStep) -> Iterator[Finding]:
    """The fewest doublings to overflow, of results and of gradients times the loss scale."""
    has_overflow = any(op.overflows for op in step.ops)
    for key, scale in (("headroom", 1.0), ("headroom_gradients", step.loss_scale)):
        ops = [op for op in step.ops if (op.phase == "backward") == ("_" in key) and op.size]
        doublings = [math.log2(torch.finfo(op.makes).max / (op.size / scale)) for op in ops]
        left, op = min(zip(doublings, ops, strict=True), key=lambda x: x[0], default=(0.0, None))
        if op is not None:
            mode.checks.figures[key] = round(left, 1)
            if left < mode.settings.headroom and not has_overflow:  # that is an error already
                size = f"{op.size / scale:.4g}{' without the loss scale' * (scale != 1)}"
                room = f"{left:.1f} doublings left" if left >= 0 else "beyond its largest number"
                text = f"{size} in {dtype_name(op.makes)}: {room}"
                yield _at("near_overflow", op, text, -left)


def _float32_is_wrong(mode: CheckedMode) -> Iterator[Finding]:
    batch = batches_of(mode.exact, SAMPLES)[0]

    def run(inside: Region) -> float:
        return float(mode.float32_step(batch, inside)[LOSS])

    try:
        loss, right = run(nullcontext), run(in_float64)
    except Exception:  # a model's own code may fail in float64 in any way
        return
    # two passes show that most models are fine, before ops are recorded; 1e-4 is far below the
    # tolerance of `is_good_enough`
    if math.isclose(loss, right, rel_tol=1e-4):
        return
    wrong = float32_loss(loss, right, run)
    if wrong is not None and not is_good_enough(wrong):
        text = f"the loss is {wrong.loss:g}, in float64 {wrong.float64:g}"
        yield Finding("float32_is_wrong", wrong.module, text, wrong.op)
