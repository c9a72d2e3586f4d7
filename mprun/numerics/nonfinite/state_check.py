"""Checks of the tensors that outlast a step: gradients, parameters, buffers, optimizer state.

An optimizer with kernels of its own writes to parameters unseen. So the state is checked after each
step: a parameter that was finite before, with finite gradients, names the optimizer. What is not
finite from the start (a mask in a buffer) is not reported.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.numerics.nonfinite.fp_exception import UNSEEN, FpException
from mprun.numerics.nonfinite.origins import OriginFinder, at_largest
from mprun.numerics.nonfinite.shadow import Origin, mark_reached, memory
from mprun.numerics.nonfinite.tensor_stats import (
    ValueRange,
    is_finite,
    stats,
    value_range,
)
from mprun.numerics.op_watcher import dtype_name


class StateTensor(NamedTuple):
    """A tensor that outlasts a step."""

    label: str
    """Its name in reports: `parameter fc1.weight`, `exp_avg of fc1.weight`."""
    owner: str
    """The name of its parameter, or its own."""
    tensor: Tensor


class StateCheck:
    """Checks the tensors of a model and its optimizers that outlast a step.

    Args:
        model, optimizers: the model, and its optimizers if it is trained.
        finder: knows the origins, and receives new ones.
        saturates: whether 16-bit numbers at the largest of their dtype count.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        finder: OriginFinder,
        saturates: bool,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._inputs: list[weakref.ref[Tensor]] = []
        self._labels: list[tuple[Tensor, str]] = []
        self._finder = finder
        self._saturates = saturates
        self._kinds = {path: type(module).__name__ for path, module in model.named_modules()}
        self._of_gradients: frozenset[Origin] = frozenset()
        """The origins of this step's gradients that are not finite."""
        self._of_optimizer: dict[str, frozenset[Origin]] = {}
        """The origins of this step that are no ops, by the parameter they wrote to."""
        ranges = [(item, value_range(item.tensor)) for item in self._items()]
        self._bad = {item.label for item, x in ranges if not is_finite(x)}
        self._large = {item.label for item, x in ranges if at_largest(item.tensor.dtype, x)}

    def begin_step(self) -> None:
        """A step begins."""
        self._of_gradients = frozenset()
        self._of_optimizer = {}
        self._inputs.clear()
        self._labels.clear()

    def label(self, x: Tensor, name: str) -> None:
        """Call a tensor `name` in this step's reports; it stays in memory until the next step."""
        self._labels.append((x, name))

    def inputs(self, tensors: Iterable[Tensor]) -> None:
        """The model is called with these."""
        self._inputs += map(weakref.ref, tensors)

    def name_of(self, x: Tensor) -> str | None:
        """The name of a tensor: parameter, buffer, gradient, the model's input."""
        key = memory(x)
        for labelled, name in self._labels:
            if memory(labelled) == key:
                return name
        for item in (*self._items(), *self._gradients()):
            if memory(item.tensor) == key:
                return item.label
        is_input = any(memory(x) == key for x in self._live_inputs())
        return "the model's input" if is_input else None

    def eps_reason(self, owner: str) -> str | None:
        """Why an optimizer divides by 0: its `eps` is 0 in the dtype of the parameter `owner`."""
        for p, _, group in self._groups_of(owner):
            eps = group.get("eps")
            if isinstance(eps, float) and eps > 0 == float(torch.tensor(eps, dtype=p.dtype)):
                return f"the optimizer's eps={eps:g} is 0 in {dtype_name(p.dtype)}"
        return None

    def check_gradients(self, step: int) -> None:
        """Check the gradients before they are unscaled, clipped or used."""
        for item in self._gradients():
            if is_finite(measured := value_range(item.tensor)):
                continue
            origins = self._finder.lineage.of(item.tensor)
            if not origins:
                origins = frozenset({self._unseen(step, item, "backward", _kind(measured))})
            mark_reached(origins, item.label, item.owner)
            self._of_gradients |= origins

    def check_after_step(self, step: int) -> None:
        """Check the tensors that the step wrote; those that were bad before are not reported."""
        bad, large = set(), set()
        for item in self._items():
            measured = value_range(item.tensor)
            if not is_finite(measured):
                bad.add(item.label)
                if item.label not in self._bad:
                    self._add_bad(step, item, _kind(measured))
            elif self._saturates and at_largest(item.tensor.dtype, measured):
                large.add(item.label)
                if item.label not in self._large:
                    origin = self._unseen(step, item, "optimizer", "saturated")
                    mark_reached([origin], item.label, item.owner)
        self._bad, self._large = bad, large

    def _add_bad(self, step: int, item: StateTensor, kind: str) -> None:
        """A tensor that was finite before the step is not any more."""
        origins = self._finder.lineage.of(item.tensor) or self._of_gradients
        if not origins:  # what spoiled a parameter spoils its state
            origins = self._of_optimizer.get(item.owner, frozenset())
        if not origins:
            origins = frozenset({self._unseen(step, item, "optimizer", kind)})
            self._of_optimizer[item.owner] = origins
        self._finder.lineage.put(item.tensor, origins)
        mark_reached(origins, item.label, item.owner)
        for origin in origins:
            origin.lasts = True

    def _unseen(self, step: int, item: StateTensor, phase: str, kind: str) -> Origin:
        """The origin of numbers that no op of PyTorch wrote."""
        in_optimizer = phase == "optimizer"
        optimizers = [*(x for _, x, _ in self._groups_of(item.owner)), *self._optimizers]
        stepped = type(optimizers[0]).__name__ if optimizers else "optimizer"
        others = [x for x in self._items() if x.owner == item.owner and x.label != item.label]
        gradients = [g for g in self._gradients() if g.owner == item.owner and in_optimizer]
        module = item.owner.rpartition(".")[0]
        exception = FpException(
            verdict="absorbed",
            kind=kind,
            step=step,
            last_step=step,
            op=f"{stepped}.step" if in_optimizer else UNSEEN,
            phase=phase,
            module=module,
            module_kind=self._kinds.get(module, ""),
            location=None,
            inputs=tuple(stats(x.label, x.tensor) for x in gradients),
            outputs=tuple(stats(x.label, x.tensor) for x in (item, *others)),
            before=self._finder.past,
        )
        return self._finder.add(exception, item.tensor)

    def _groups_of(self, owner: str) -> Iterator[tuple[Tensor, Optimizer, dict[str, Any]]]:
        """The parameter of this name, with each optimizer and group that has it."""
        p = dict(self._parameters()).get(owner)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if p is not None and any(p is x for x in group["params"]):
                    yield p, optimizer, group

    def _gradients(self) -> Iterator[StateTensor]:
        for name, p in self._parameters():
            if p.grad is not None:
                yield StateTensor(f"gradient of {name}", name, p.grad)
        for x in self._live_inputs():
            if x.is_leaf and x.grad is not None:
                yield StateTensor("gradient of the model's input", "", x.grad)

    def _live_inputs(self) -> Iterator[Tensor]:
        """The model's inputs in this step that are still alive."""
        yield from (x for ref in self._inputs if (x := ref()) is not None)

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the model, and those that only the optimizers have."""
        named: dict[str, Any] = dict(self._model.named_parameters())
        yield from named.items()
        known = {id(p) for p in named.values()}
        for g, group in enumerate(g for x in self._optimizers for g in x.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) not in known:
                    yield f"parameter {i} of group {g}", p

    def _items(self) -> Iterator[StateTensor]:
        for name, p in self._parameters():
            yield StateTensor(f"parameter {name}", name, p)
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        yield StateTensor(f"{key} of {name}", name, value)
        for name, buffer in self._model.named_buffers():
            yield StateTensor(f"buffer {name}", name, buffer)


def _kind(measured: ValueRange | None) -> str:
    return "invalid" if measured is not None and measured.has_nan else "overflow"
