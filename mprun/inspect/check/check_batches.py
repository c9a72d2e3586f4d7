"""A batch, twice: whether a step repeats its bits, and a sample's output depends on its batch.

A step is taken twice from the same weights, samples and seeds. Where its results differ, code draws
numbers that no seed of PyTorch, NumPy or Python decides, or a kernel adds in an order that changes
from run to run. The first op with other bits tells which.

In evaluation the output of a sample should not depend on the other samples of its batch. Kernels
choose other orders of additions for another size of a batch, so in a low dtype the bits differ, and
mean nothing. In float64 such differences are near 1e-16 of the output: what is larger there is the
model's own (a norm over the batch, a mask of the longest sample), whatever the dtype. Where float64
shows none, the mode itself is looked at: other bits are a note, and a finding where the distance is
larger than roundings make it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mprun.errors import NotMeasurableError
from mprun.inspect.check.check_result import Finding
from mprun.inspect.check.checked_mode import FEW_SAMPLES, CheckedMode, batches_of
from mprun.inspect.divergence.boundaries import exact_arithmetic
from mprun.inspect.rounding_oracle import half_step, margin_of
from mprun.precision._torch import no_dispatch, op_name
from mprun.precision.gemms import formats_of
from mprun.precision.nested import all_tensors
from mprun.precision.policy import policy, torch_dtype
from mprun.train.assemble import Plan
from mprun.train.assemble.parts import build_precision, prepared_model
from mprun.train.data.batches import MicroBatch, rows
from mprun.train.data.random_numbers import seed_all, untouched
from mprun.train.evaluation import NO_GRAPH
from mprun.train.loop import Trainer
from mprun.train.user_code import described
from mprun.watch.op_watcher import CodeLine, OpWatcher, RunOp, current_line, is_plain
from mprun.watch.updates import weights_moved

SAME = 1e-9
"""Far above float64's roundings, 1e-16 of an output, and what they add up to."""
UNORDERED = ("index_add", "scatter_add", "index_put", "scatter_reduce", "put_", "bincount")
"""Parts of the names of ops that may add in an order that changes."""
UNKNOWN = "not known whether a sample's output in evaluation depends on its batch"
DRAWS = 4  # Passes with roundings, each over all samples of the batch


class _Evaluated:
    """The model of a plan at its start, without an optimizer, which not every dtype has."""

    def __init__(self, plan: Plan) -> None:
        self.recipe, self.precision = plan.recipe, build_precision(plan)
        self.model = prepared_model(plan, self.precision)


def depends_on_batch(mode: CheckedMode) -> Iterator[Finding]:
    """Whether a sample's output in evaluation depends on the others: in float64, else in the mode.

    Bits that roundings explain are a note, and so is why a model cannot be asked.
    """
    wide = replace(mode.exact, policy=policy("fp64"))
    told = mode.once("depends_on_batch", lambda: [*_told(wide, wide)])
    told = told or [*_told(mode.plan, wide)]
    mode.checks.notes += [x for x in told if isinstance(x, str)]
    yield from (x for x in told if isinstance(x, Finding))


def _told(plan: Plan, wide: Plan) -> Iterator[Finding | str]:
    """Findings and notes; `wide` is the plan in float64."""
    try:
        with untouched():
            yield from _depends(plan, wide)
    except Exception as error:  # a model's own code may fail in float64, or on one sample
        yield f"{UNKNOWN}: in {plan.policy.name} {described(error, plan.policy.name)}"


def _depends(plan: Plan, wide: Plan) -> Iterator[Finding | str]:
    parts, batch = _Evaluated(plan), batches_of(plan, FEW_SAMPLES)[0].trained.parts[0]
    if batch.size < 2:
        return
    once, whole = (_outputs(parts, batch.inputs) for _ in range(2))
    if not all(map(torch.equal, once, whole)):
        raise NotMeasurableError("the model draws numbers in evaluation")
    for n in (0, batch.size - 1):
        alone = _outputs(parts, rows(batch.inputs, n, 1))
        pairs = [(_own(x, y, n, batch.size), y) for x, y in zip(whole, alone, strict=True)]
        largest = max((_distance(x, y) for x, y in pairs if x is not None), default=0.0)
        least = SAME if plan is wide else 0.0
        if largest <= least:
            continue
        limit = 0.0 if plan is wide else _explained(plan, wide)
        known = f"rounding explains {limit:.1e}" if limit else "so no rounding explains it"
        text = f"in evaluation a sample's output beside {batch.size - 1} others is another one "
        text += f"than alone: in {plan.policy.compute_dtype} by {largest:.2g} of it, {known}"
        op = _first_other(parts, batch, n, least)
        found = Finding(
            "depends_on_batch", op.module, text + op.why, op.name, str(op.line or ""), largest
        )
        yield str(found).partition(": ")[2] if largest <= limit else found
        return


def _explained(plan: Plan, wide: Plan) -> float:
    """The largest distance that float64's outputs move by with rounded results and weights."""
    parts, inputs = _Evaluated(wide), batches_of(wide, FEW_SAMPLES)[0].trained.parts[0].inputs
    formats = [f for x in _Evaluated(plan).model.modules() for f in formats_of(x)]
    dtype = torch_dtype(plan.policy.compute_dtype)
    # TF32 has the digits of float16
    rounding = max(formats, key=half_step, default=torch.half if plan.policy.tf32 else dtype)
    whole, largest = _outputs(parts, inputs), half_step(rounding)
    for seed in range(DRAWS):
        moved = weights_moved([*parts.model.parameters()], half_step(rounding), seed)
        with moved, exact_arithmetic(parts.model) as arithmetic:
            arithmetic.dtype = dtype
            largest = max(largest, *map(_distance, whole, _outputs(parts, inputs)))
    return margin_of(rounding) * largest


def _first_other(parts: _Evaluated, batch: MicroBatch, n: int, least: float) -> SeenOp:
    """The first op that makes another result of a sample beside others than alone, and why."""
    both: list[list[SeenOp]] = []
    for inputs in (batch.inputs, rows(batch.inputs, n, 1)):
        watcher = SeenOps(lambda x: x.detach().clone())
        with watcher.following(parts.model), watcher:
            _outputs(parts, inputs)
        both.append(watcher.ops)
    for x, y in zip(*both, strict=False):
        if x.name != y.name:
            why = f"; beside others {x.name} runs in its place"
            return SeenOp(y.name, y.module, y.line, (), why)
        for whole, alone in zip(x.made, y.made, strict=False):
            own = _own(whole, alone, n, batch.size)
            if own is not None and _distance(own, alone) > least:
                shapes = f"{[*whole.shape]} than for {[*alone.shape]}"
                why = "" if least else f"; its kernel takes another order for {shapes}"
                return SeenOp(x.name, x.module, x.line, (), why)
    return SeenOp("", "", None, ())


def _outputs(parts: _Evaluated, inputs: Any, graph: bool = False) -> list[Tensor]:
    """The floating outputs in evaluation; with a graph where the model takes derivatives."""
    try:
        with torch.set_grad_enabled(graph):
            forward = partial(parts.recipe.forward, parts.model.eval())
            output = parts.precision.forward(forward, inputs)
    except RuntimeError as error:
        if graph or NO_GRAPH not in str(error):
            raise
        return _outputs(parts, inputs, graph=True)
    return [x.detach() for x in all_tensors(output) if x.is_floating_point()]


def _own(whole: Tensor, alone: Tensor, n: int, size: int) -> Tensor | None:
    """A sample's part of a tensor, by the only dimension that is `size` times as large."""
    if whole.dim() == alone.dim():
        sizes = [*zip(whole.shape, alone.shape, strict=True)]
        other = [i for i, (x, y) in enumerate(sizes) if x != y]
        if len(other) == 1 and sizes[other[0]][0] == size * sizes[other[0]][1]:
            length = sizes[other[0]][1]
            return whole.narrow(other[0], n * length, length)
    return None


def _distance(x: Tensor, y: Tensor) -> float:
    """The largest difference over the largest magnitude."""
    x, y = x.double(), y.double()
    size = max(float(z.abs().max()) for z in (x, y)) if y.numel() else 0.0
    return float((x - y).abs().max()) / size if size else 0.0


class SeenOp(NamedTuple):
    """An op of a step, and what is kept of the tensors that it made."""

    name: str
    module: str
    line: CodeLine | None
    made: tuple[Any, ...]
    why: str = ""


class SeenOps(OpWatcher):
    """Keeps of each result what `keep` makes of it."""

    def __init__(self, keep: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._keep, self.ops = keep, list[SeenOp]()

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        result = run()
        with no_dispatch(), torch.no_grad():
            made = tuple(self._keep(x) for x in all_tensors(result) if is_plain(x))
        _, module = self.tracker.context()
        self.ops.append(SeenOp(op_name(func), module or "", current_line(), made))
        return result


def checksum(x: Tensor) -> int:
    """Of the bits in their order."""
    bits = x.detach().cpu().reshape(-1)
    return zlib.crc32(bits.view(torch.uint8).numpy().data) if x.numel() else 0


def not_repeatable(mode: CheckedMode) -> Iterator[Finding]:
    """Whether a step from the same start repeats its bits; else the first op with others."""
    with untouched():
        first, again = (_stepped(mode) for _ in range(2))
        if all(map(torch.equal, first, again)):
            return
        one, two = _watched(mode), _watched(mode)
    parts = [(x, y) for x, y in zip(one, two, strict=False) if x[:2] != y[:2] or x.made != y.made]
    if not parts:
        text = "two steps from the same start end in other weights; watched, they did not"
        yield Finding("not_repeatable", "", text)
        return
    op, _ = parts[0]
    adds = any(part in op.name for part in UNORDERED)
    why = "adds in an order that changes" if adds else "reads numbers that no seed decides"
    text = f"two steps from the same start differ from here on: {op.name} {why}"
    yield Finding("not_repeatable", op.module, text, op.name, str(op.line or ""))


def _trainer(mode: CheckedMode) -> Trainer:
    trainer = mode.trainer()
    trainer.parts.model.train()
    seed_all(mode.plan.config.seed)
    return trainer


def _stepped(mode: CheckedMode) -> list[Tensor]:
    """The loss and the parameters after a step."""
    trainer = _trainer(mode)
    loss = trainer.optimizer_step(mode.batches[0].trained).loss.detach()
    return [loss, *(p.detach() for p in trainer.parts.model.parameters())]


def _watched(mode: CheckedMode) -> list[SeenOp]:
    trainer, watcher = _trainer(mode), SeenOps(checksum)
    with watcher.following(trainer.parts.model), watcher:
        trainer.optimizer_step(mode.batches[0].trained)
    return watcher.ops
