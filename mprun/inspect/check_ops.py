"""What dtypes the ops of a mode run in, and how far their numbers are from the format's limits.

Both checks look at one step in which each op was watched (`numerics/step_ops.py`), at the loss
scale that fits it, and at a model after two steps. What healthy models do by design is left out:
PyTorch's own casts, 16-bit inputs of layers whose kernels compute in float32, masks of infinities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from mprun.assemble import Plan
from mprun.assemble.parts import build_arithmetic, build_parts, build_precision
from mprun.inspect.checked_mode import CheckedMode, batches_of
from mprun.inspect.trace import shipped_op_lists, watched_arithmetic
from mprun.numerics.audit import audit
from mprun.numerics.float32_check import Region, float32_loss, is_good_enough
from mprun.numerics.float64 import in_float64
from mprun.numerics.step_ops import StepOp, StepOps
from mprun.precision.layers import resolve
from mprun.precision.op_lists.lists import spelled
from mprun.precision.policy import dtype_name
from mprun.precision.products import LOW
from mprun.results.check_result import Finding
from mprun.train.loop import Trainer
from mprun.train.user_code import model_of

SAMPLES = 32
"""Of the batch of the step that is watched."""
MAX_SKIPPED = 24
"""Steps that a dynamic loss scale may skip until it fits."""
PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "addmv", "mv", "convolution", "mkldnn_rnn_layer")
"""ATen's ops of linear layers and convolutions."""
SUMS = (
    *("sum", "mean", "var", "var_mean", "std", "std_mean", "prod", "cumsum", "logsumexp", "norm"),
    *("linalg_vector_norm", "softmax", "log_softmax", "layer_norm", "group_norm", "batch_norm"),
    *("rms_norm", "index_add", "scatter_add"),
)
"""Ops of many numbers, of which a cast before them spoils the result."""
FEWEST = 32
"""Numbers of a tensor of which it can be said that all of them were rounded."""


@dataclass(frozen=True)
class WatchedStep:
    """What both checks look at."""

    ops: list[StepOp]
    loss_scale: float
    """The dynamic one that fits, else 1."""


def dtypes(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    yield from _substituted(mode)
    low = mode.plan.policy.param_dtype in ("bfloat16", "float16")
    if not low:
        made = model_of(mode.plan.recipe)
        yield from _stored(made.named_buffers(), "as it is made", made=True)
        yield from _rounded_before(made)
    yield from _after_steps(mode, low)
    if not low:
        ops = _watched(mode).ops
        yield from _first_of_each(_by_hand(ops))
        if mode.plan.policy.casts:
            yield from _first_of_each(_in_another_dtype(mode, ops))
            yield from _first_of_each(_loss_in_16_bits(ops))


def robust(mode: CheckedMode) -> Iterator[Finding]:
    """The findings of this check."""
    step = _watched(mode)
    yield from _first_of_each(_overflows(step.ops))
    yield from _headroom(mode, step)
    yield from _first_of_each(_vanishing(step.ops))
    if mode.plan.policy.is_low:
        yield from _noise(mode, step.ops)
    yield from _float32_is_wrong(mode)


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


def _stored(
    tensors: Iterable[tuple[str, Tensor]], when: str, made: bool = False
) -> Iterator[Finding]:
    """Tensors of 16 bits; of those of the model as it is made, only where digits are lost."""
    for name, x in tensors:
        if x.dtype in LOW and not (made and _is_exact_in_16_bits(x)):
            module, _, own = name.rpartition(".")
            text = f"{own} has {dtype_name(x.dtype)} {when}, {x.numel():,} numbers"
            yield Finding("stored_in_16_bits", module, text)


def _is_exact_in_16_bits(x: Tensor) -> bool:
    """Whether its numbers are few different ones, or integers that the format counts without gaps.

    Of a buffer of 16 bits, the numbers before its rounding are unknown.
    """
    whole = bool((x == x.round()).all()) and float(x.abs().max()) <= 1 / torch.finfo(x.dtype).eps
    return x.numel() < 2 or whole or x.unique().numel() <= 2


def _rounded_before(model: nn.Module) -> Iterator[Finding]:
    """Float32 numbers that all have the digits of a 16-bit format."""
    rows: dict[str, list[tuple[str, str, int]]] = {}
    kept = [(name, x) for name, x in model.named_buffers() if x.dtype not in LOW]
    for name, x in [*model.named_parameters(), *kept]:
        dtype = _grid_of(x.detach().float() if x.dtype in LOW else x.detach())
        if dtype is not None:
            module, _, own = name.rpartition(".")
            rows.setdefault(module, []).append((own, dtype_name(dtype), x.numel()))
    for module, held in rows.items():
        names = ", ".join(own for own, _, _ in held)
        count = sum(numbers for _, _, numbers in held)
        text = f"each of {count:,} numbers of {names} has the digits of {held[0][1]} alone"
        yield Finding("values_of_16_bits", module, text, at=count)


def _grid_of(x: Tensor) -> torch.dtype | None:
    """The 16-bit format that all numbers have; None for others, and those with equal steps."""
    if x.dtype != torch.float32 or x.numel() < FEWEST:
        return None
    values = x[x.isfinite() & (x != 0)]
    for dtype in (torch.bfloat16, torch.float16):  # small numbers of the first are of both
        if all(bool((part.to(dtype) == part).all()) for part in (values[:FEWEST], values)):
            if values.unique().numel() < FEWEST:
                return None
            # integers and fractions of a power of two have equal steps; rounded numbers do not
            step = 2.0 ** math.ceil(math.log2(float(values.abs().max()))) * torch.finfo(dtype).eps
            steps = values.double() / step
            return None if bool((steps == steps.round()).all()) else dtype
    return None


def _after_steps(mode: CheckedMode, low: bool) -> Iterator[Finding]:
    """What two steps leave in 16 bits, and the updates that the second loses."""
    trainer, policy = mode.trainer(), mode.plan.policy
    parts = trainer.parts
    lost: list[Finding] = []

    def judge(*args: object) -> None:
        lost[:] = _lost(parts.model, parts.optimizer)

    _taken_step(trainer, mode.batches[0])
    with parts.optimizer.register_step_pre_hook(judge):
        _taken_step(trainer, mode.batches[-1])
    yield from lost
    if low:
        return
    own = [name for name, x in resolve(parts.model, mode.plan.layers).items() if x != "fp32"]
    named = [(n, p) for n, p in parts.model.named_parameters() if not _inside(n, own)]
    held = [*named, *((n, x) for n, x in parts.model.named_buffers() if not _inside(n, own))]
    if policy.accum_dtype == "float32":
        held += [(f"{n}: gradient", p.grad) for n, p in named if p.grad is not None]
    if policy.momentum_dtype == policy.variance_dtype == "float32":
        held += [(f"{n}: {key}", x) for n, p in named for key, x in _state(parts.optimizer, p)]
    yield from _stored(held, "after two steps")


def _state(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an optimizer's state."""
    state = optimizer.state.get(p, {}).items()
    return ((key, x) for key, x in state if isinstance(x, Tensor))


def _lost(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Finding]:
    """The modules that stand still, if they have most of the weights.

    A norm's weights begin at 1 and stand still in every mode that rounds updates to nearest.
    """
    still = [x for x in audit(model, optimizer).findings if x.kind == "lost_update"]
    own = {x.module: [*model.get_submodule(x.module).parameters(recurse=False)] for x in still}
    numbers = {name: sum(p.numel() for p in held) for name, held in own.items()}
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if 2 * sum(numbers.values()) <= total:
        return []
    most = max(still, key=lambda x: numbers[x.module])
    others = f"; so do {len(still) - 1} other modules" if still[1:] else ""
    return [Finding("lost_update", most.module, most.text + others)]


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name == x or name.startswith(f"{x}.") for x in modules)


def _taken_step(trainer: Trainer, batch: object) -> float:
    """Steps until one is not skipped; its loss scale."""
    for _ in range(MAX_SKIPPED):
        tensor = trainer.parts.precision.loss_scale.tensor
        scale = 1.0 if tensor is None else tensor.item()
        skipped = trainer.optimizer_step(batch).skipped  # type: ignore[arg-type]
        if skipped is None or not skipped.item():
            break
    return scale


def _watched(mode: CheckedMode) -> WatchedStep:
    """The first step of the mode, watched once."""
    known = vars(mode).get("watched_step")
    if known is None:
        known = vars(mode)["watched_step"] = _watch(mode.plan, mode.exact, mode.plan.policy.is_low)
    step: WatchedStep = known
    return step


def _watch(plan: Plan, exact: Plan, in_float64: bool) -> WatchedStep:
    batch = batches_of(plan, SAMPLES)[0]
    ops = StepOps(in_float64)
    arithmetic = watched_arithmetic(build_arithmetic(plan), ops)
    parts = build_parts(plan, build_precision(plan, arithmetic=arithmetic))
    loss_scale = parts.precision.loss_scale
    is_dynamic = loss_scale.kind == "dynamic"
    scale = _taken_step(Trainer(build_parts(plan), plan.limits), batch) if is_dynamic else 1.0
    if loss_scale.tensor is not None and is_dynamic:
        loss_scale.tensor.fill_(scale)
    rounds = in_float64 and not plan.policy.casts and any(True for _ in parts.model.buffers())
    before = build_parts(exact).model.named_buffers() if rounds else ()
    with ops.watching(parts.model, parts.optimizer, dict(before)):
        Trainer(parts, plan.limits).optimizer_step(batch)
    return WatchedStep(ops.ops, scale)


def _at(kind: str, op: StepOp, text: str, at: float = 0.0) -> Finding:
    line = "" if op.line is None else str(op.line)
    return Finding(kind, op.module, text, op.name, line, at)


def _by_hand(ops: list[StepOp]) -> Iterator[Finding]:
    """What the model's code computes of numbers that it makes, or casts, in 16 bits by itself."""
    low: set[int] = set()
    """Ops whose numbers have 16 bits by such code alone."""
    for i, op in enumerate(ops):
        if op.phase == "backward":
            continue
        is_new = op.name.startswith("new_") or op.name.endswith("_like")  # reads a shape alone
        read = [index for dtype, index in op.inputs if dtype in LOW and not is_new]
        is_alone = low.issuperset(read)
        is_inexact = op.lowers or (bool(read) and is_alone and op.error > 0)
        dtype = dtype_name(op.makes)
        if op.makes in LOW and spelled(op.name)[0] in SUMS and is_inexact:
            yield _at("lower_dtype", op, f"{dtype}, by a cast of the code")
        if op.by_hand and op.rounds and op.makes in LOW and not op.inputs:
            yield _at("lower_dtype", op, f"integers are rounded to {dtype}")
        yield from _cast_undone(op, [ops[index] for index in read if index in low])
        follows = is_alone and (read or is_new or not op.inputs) and op.name not in PRODUCTS
        if op.makes in LOW and (op.by_hand or follows):
            low.add(i)


def _cast_undone(op: StepOp, read: list[StepOp]) -> Iterator[Finding]:
    """An op that reads numbers which the code has rounded, and makes other formats of them."""
    cast = next((x for x in read if x.by_hand and x.rounds), None)
    if op.is_cast and cast and (op.makes == torch.float32 or op.rounds):
        to = f"{dtype_name(cast.makes)} and then to {dtype_name(op.makes)}"
        yield _at("cast_undone", cast, f"cast to {to}")
    elif op.by_hand and op.rounds and op.makes in LOW and any(x in LOW for x, _ in op.inputs):
        names = f"{dtype_name(op.inputs[0][0])} to {dtype_name(op.makes)}"
        yield _at("cast_undone", op, f"a second rounding, {names}")
    elif (
        op.phase == "other"
        and op.line
        and op.makes == torch.float32
        and any(x.error > 0 for x in read)
    ):
        yield _at("cast_undone", op, "the loss reads numbers that were cast to 16 bits")


def _in_another_dtype(mode: CheckedMode, ops: list[StepOp]) -> Iterator[Finding]:
    """Layers in float32 that the lists lower, and losses in 16 bits that they keep in float32."""
    plan = mode.plan
    rules = (plan.op_lists or shipped_op_lists("native", plan.device)).rules
    own = [x.name for x in plan.layer_rows(mode.start())] if plan.layers else []
    for op in ops:
        names = (*spelled(op.name), *spelled(op.call))
        if op.phase == "backward" or op.is_cast or _inside(op.module, own):
            continue
        listed = {rules.get(name) for name in names}
        is_layer = op.name in PRODUCTS and op.weighted and op.phase == "forward"
        if is_layer and "lower" in listed and op.makes == torch.float32:
            text = f"float32, the mode says {plan.policy.compute_dtype}"
            yield _at("higher_dtype", op, text)
        is_loss = any(rules.get(x) == "fp32" and ("loss" in x or "entropy" in x) for x in names)
        if is_loss and op.makes in LOW and op.inputs:
            yield _at("lower_dtype", op, f"a loss in {dtype_name(op.makes)}")


def _loss_in_16_bits(ops: list[StepOp]) -> Iterator[Finding]:
    """Sums in 16 bits of which the loss is made by ops of single numbers."""
    end = next((i for i, op in enumerate(ops) if op.phase == "backward"), 0)
    left, seen = [index for op in ops[end - 1 : end + 1] for _, index in op.inputs], set()
    while left:
        index = left.pop()
        if index < 0 or index in seen or ops[index].numbers > 1:
            continue
        seen.add(index)
        op = ops[index]
        if op.makes in LOW and spelled(op.name)[0] in SUMS:
            yield _at("lower_dtype", op, f"a sum of the loss in {dtype_name(op.makes)}")
        left += [index for _, index in op.inputs]


def _overflows(ops: list[StepOp]) -> Iterator[Finding]:
    for op in ops:
        if op.overflows is not None:
            text = f"{op.overflows:.3g} is infinite in {dtype_name(op.makes)}"
            yield _at("overflow", op, text, abs(op.overflows))


def _vanishing(ops: list[StepOp]) -> Iterator[Finding]:
    for op in ops:
        if op.vanishes is not None:
            text = f"{op.vanishes:g} is 0 in {dtype_name(op.makes)}"
            yield _at("vanishing_constant", op, text)


def _headroom(mode: CheckedMode, step: WatchedStep) -> Iterator[Finding]:
    """The fewest doublings to overflow, of results and of gradients times the loss scale."""
    least: dict[str, tuple[float, float, StepOp]] = {}
    for op in step.ops:
        if not op.size > 0 or op.makes == torch.float64:
            continue
        is_gradient = op.phase == "backward"
        size = op.size / (step.loss_scale if is_gradient else 1)
        left = math.log2(torch.finfo(op.makes).max / size)
        key = "headroom_gradients" if is_gradient else "headroom"
        if key not in least or left < least[key][0]:
            least[key] = left, size, op
    has_overflow = any(op.overflows is not None for op in step.ops)
    for key, (left, size, op) in least.items():
        mode.checks.figures[key] = round(left, 1)
        if left < mode.settings.headroom and not has_overflow:
            unscaled = " without the loss scale" if step.loss_scale != 1 and "_" in key else ""
            text = f"{size:.4g}{unscaled} in {dtype_name(op.makes)}: {left:.1f} doublings left"
            yield _at("near_overflow", op, text, -left)


def _noise(mode: CheckedMode, ops: list[StepOp]) -> Iterator[Finding]:
    """Results that are as large as their error, where float32's are not."""
    read = {index for op in ops for _, index in op.inputs}
    noisy = [op for i, op in enumerate(ops) if op.is_noise and i in read]
    if not noisy:
        return
    in_float32 = _watch(mode.exact, mode.exact, in_float64=True).ops
    wide = [op for op in in_float32 if all(x == torch.float32 for x, _ in op.inputs)]
    also = {(op.module, op.name) for op in wide if op.is_noise}
    own = (op for op in noisy if (op.module, op.name) not in also)
    yield from _first_of_each(
        _at("all_noise", op, f"an error of {op.error:.0%} of the result", op.error) for op in own
    )


def _float32_is_wrong(mode: CheckedMode) -> Iterator[Finding]:
    probe, start = mode.probe(exact=True), mode.start(exact=True)
    batch = batches_of(mode.exact, SAMPLES)[0]

    def run(inside: Region) -> float:
        probe.gradients(start, batch, inside=inside)
        return probe.loss

    try:
        loss, right = run(nullcontext), run(in_float64)
    except Exception:  # a model's own code may fail in float64 in any way
        return
    if math.isclose(loss, right, rel_tol=1e-4):
        return
    wrong = float32_loss(loss, right, run)
    if wrong is not None and not is_good_enough(wrong):
        text = f"the loss is {wrong.loss:g}, in float64 {wrong.float64:g}"
        yield Finding("float32_is_wrong", wrong.module, text, wrong.op)
