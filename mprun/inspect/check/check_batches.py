"""A batch, twice: whether a step repeats its bits, and a sample's output depends on its batch.

A step is taken twice from the same weights, samples and seeds. Where its results differ, code draws
numbers that no seed of PyTorch, NumPy or Python decides, or a kernel adds in an order that changes
from run to run. The first op with other bits tells which.

In evaluation the output of a sample should not depend on the other samples of its batch. Kernels
choose other orders of additions for another size of a batch, so in a low dtype the bits differ, and
mean nothing. In float64 such differences are near 1e-16 of the output: what is larger there is the
model's own (a norm over the batch, a mask of the longest sample), whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mprun.errors import definition
from mprun.inspect.check.check_result import Finding
from mprun.inspect.check.checked_mode import FEW_SAMPLES, CheckedMode, batches_of
from mprun.precision._torch import no_dispatch, op_name
from mprun.precision.nested import all_tensors
from mprun.precision.policy import policy
from mprun.train.assemble import Plan
from mprun.train.assemble.parts import build_parts
from mprun.train.data.batches import rows
from mprun.train.data.random_numbers import seed_all, untouched
from mprun.train.loop import Trainer
from mprun.watch.op_watcher import CodeLine, OpWatcher, RunOp, current_line, is_plain

SAME = 1e-9
"""Far above float64's roundings, 1e-16 of an output, and what they add up to."""
UNORDERED = ("index_add", "scatter_add", "index_put", "scatter_reduce", "put_", "bincount")
"""Parts of the names of ops that may add in an order that changes."""


def depends_on_batch(mode: CheckedMode) -> Iterator[Finding]:
    """Whether the output of a sample in evaluation depends on the others, for all modes once."""
    plan = replace(mode.exact, policy=policy("fp64"))
    with untouched(), suppress(Exception):  # a model that takes no single sample has no answer
        yield from _depends(plan)


def _depends(plan: Plan) -> Iterator[Finding]:
    parts = build_parts(plan)
    batch = batches_of(plan, FEW_SAMPLES)[0].trained.parts[0]
    if batch.size < 2:
        return
    (_, once), (together, whole) = (_outputs(parts, batch.inputs) for _ in range(2))
    if not all(map(torch.equal, all_tensors(once), all_tensors(whole))):
        return  # it draws numbers in evaluation
    for n in (0, batch.size - 1):
        single, alone = _outputs(parts, rows(batch.inputs, n, 1))
        pairs = [*zip(all_tensors(whole), all_tensors(alone), strict=True)]
        pairs = [(x[n : n + 1], y) for x, y in pairs if _of_samples(x, y, batch.size)]
        largest = max((_distance(x, y) for x, y in pairs), default=0.0)
        if largest <= SAME:
            continue
        named = [(k, x, y) for (k, x), (_, y) in zip(together, single, strict=False)]
        own = (k for k, x, y in named if _of_samples(x, y, batch.size) and _far(x, y, n))
        module = next(own, "")
        place = definition(type(parts.model.get_submodule(module)).forward)
        text = (
            f"in evaluation a sample's output beside {batch.size - 1} others is another one than "
            f"alone: in float64 by {largest:.2g} of it, so no rounding explains it"
        )
        line = "" if place is None else str(place)
        yield Finding("depends_on_batch", module, text, line=line, at=largest)
        return


def _outputs(parts: Any, inputs: Any) -> tuple[list[tuple[str, Tensor]], Any]:
    """The outputs of each module, in the order in which they end, and that of the model."""
    made: list[tuple[str, Tensor]] = []

    def keep(name: str, _: nn.Module, __: Any, output: Any) -> None:
        made.extend((name, x) for x in all_tensors(output))

    model = parts.model.eval()
    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            stack.enter_context(module.register_forward_hook(partial(keep, name)))
        output = parts.precision.forward(partial(parts.recipe.forward, model), inputs)
    return made, output


def _of_samples(whole: Tensor, alone: Tensor, size: int) -> bool:
    return whole.dim() > 0 and len(whole) == size and whole[:1].shape == alone.shape


def _far(whole: Tensor, alone: Tensor, n: int) -> bool:
    return _distance(whole[n : n + 1], alone) > SAME


def _distance(x: Tensor, y: Tensor) -> float:
    """The largest difference over the largest magnitude."""
    x, y = x.detach(), y.detach()
    size = max(float(z.abs().max()) for z in (x, y)) if y.numel() else 0.0
    return float((x - y).abs().max()) / size if size else 0.0


class SeenOp(NamedTuple):
    """An op of a step, and a sum of the bits that it made."""

    name: str
    module: str
    line: CodeLine | None
    bits: tuple[int, ...]


class SummedOps(OpWatcher):
    """Keeps a sum of the bits of each result."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[SeenOp] = []

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: RunOp) -> Any:
        result = run()
        with no_dispatch(), torch.no_grad():
            bits = tuple(_sum_of_bits(x) for x in all_tensors(result) if is_plain(x))
        _, module = self.tracker.context()
        self.ops.append(SeenOp(op_name(func), module or "", current_line(), bits))
        return result


def _sum_of_bits(x: Tensor) -> int:
    return int(x.reshape(-1).view(torch.uint8).sum()) if x.numel() else 0


def not_repeatable(mode: CheckedMode) -> Iterator[Finding]:
    """Whether a step from the same start repeats its bits; else the first op with others."""
    with untouched():
        first, again = (_stepped(mode) for _ in range(2))
        if all(map(torch.equal, first, again)):
            return
        one, two = _watched(mode), _watched(mode)
    parts = [(x, y) for x, y in zip(one, two, strict=False) if x[:2] != y[:2] or x.bits != y.bits]
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
    trainer, watcher = _trainer(mode), SummedOps()
    with watcher.following(trainer.parts.model), watcher:
        trainer.optimizer_step(mode.batches[0].trained)
    return watcher.ops
