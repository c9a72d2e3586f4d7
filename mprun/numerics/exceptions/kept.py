"""What outlasts a step: gradients, parameters, buffers, the optimizer's state.

An optimizer whose kernels are not PyTorch's writes to parameters unseen, so what it left is looked
at after each step: a parameter that was finite before, from gradients that are, names the
optimizer. What is not finite from the start (a mask kept as a buffer) is no news.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.numerics.exceptions.details import past_op
from mprun.numerics.exceptions.found import FpException, TensorStats
from mprun.numerics.exceptions.lineage import Origin, memory, reach
from mprun.numerics.exceptions.origins import Origins, at_largest
from mprun.numerics.exceptions.tensors import Limits, dtype_name, limits, stats


@dataclass(frozen=True)
class Item:
    """A tensor that outlasts a step."""

    label: str
    """What it is called: `parameter fc1.weight`, `exp_avg of fc1.weight`."""
    owner: str
    """The name of its parameter, or its own."""
    tensor: Tensor

    @property
    def module(self) -> str:
        """The path of the module it belongs to."""
        return self.owner.rpartition(".")[0]


class Kept:
    """The tensors of a model and its optimizer that outlast a step.

    Args:
        model: the model.
        optimizers: its optimizers; none where nothing is trained.
        origins: is told.
        saturates: whether 16-bit numbers at the largest of their dtype count.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        origins: Origins,
        saturates: bool,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._inputs: list[weakref.ref[Tensor]] = []
        self._origins = origins
        self._saturates = saturates
        self._kinds = {path: type(module).__name__ for path, module in model.named_modules()}
        self._spoiled: frozenset[Origin] = frozenset()
        """The origins of this step's gradients that are not finite."""
        self._by_optimizer: dict[str, frozenset[Origin]] = {}
        """The origins of this step that are no ops, by the parameter they wrote to."""
        found = [(item, limits(item.tensor)) for item in self._items()]
        self._bad = {item.label for item, x in found if not _finite(x)}
        self._large = {item.label for item, x in found if at_largest(item.tensor.dtype, x)}

    def begin(self) -> None:
        """A step begins."""
        self._spoiled = frozenset()
        self._by_optimizer = {}
        self._inputs.clear()

    def inputs(self, tensors: Iterable[Tensor]) -> None:
        """The model is called with these."""
        self._inputs += map(weakref.ref, tensors)

    def name_of(self, x: Tensor) -> str | None:
        """What a tensor is called: parameter, buffer, gradient, the model's input."""
        address = memory(x)
        for item in (*self._items(), *self._gradients()):
            if memory(item.tensor) == address:
                return item.label
        given = any(memory(x) == address for x in self._given())
        return "the model's input" if given else None

    def eps_of(self, owner: str) -> str | None:
        """Why an optimizer divides by 0: its `eps` is 0 in the dtype of the parameter `owner`."""
        for name, p in self._parameters():
            for group in self._groups():
                if name == owner and any(p is x for x in group["params"]):
                    eps = group.get("eps")
                    if isinstance(eps, float) and eps > 0 == float(
                        torch.tensor(eps, dtype=p.dtype)
                    ):
                        return f"the optimizer's eps={eps:g} is 0 in {dtype_name(p.dtype)}"
        return None

    def gradients(self, step: int) -> None:
        """Look at the gradients before they are unscaled, clipped or used."""
        for item in self._gradients():
            if _finite(found := limits(item.tensor)):
                continue
            origins = self._origins.lineage.of(item.tensor)
            if not origins:
                origins = frozenset({self._unseen(step, item, "backward", _kind(found))})
            reach(origins, item.label, item.owner)
            self._spoiled |= origins

    def after_step(self, step: int) -> None:
        """Look at what the step left; what was so before it is left alone."""
        bad, large = set(), set()
        for item in self._items():
            found = limits(item.tensor)
            if not _finite(found):
                bad.add(item.label)
                if item.label not in self._bad:
                    self._news(step, item, _kind(found))
            elif self._saturates and at_largest(item.tensor.dtype, found):
                large.add(item.label)
                if item.label not in self._large:
                    origin = self._unseen(step, item, "optimizer", "saturated")
                    reach([origin], item.label, item.owner)
        self._bad, self._large = bad, large

    def _news(self, step: int, item: Item, kind: str) -> None:
        """A tensor that was finite before the step is not any more."""
        origins = self._origins.lineage.of(item.tensor) or self._spoiled
        if not origins:  # the state of a parameter is spoiled by what spoiled it
            origins = self._by_optimizer.get(item.owner, frozenset())
        if not origins:
            origins = frozenset({self._unseen(step, item, "optimizer", kind)})
            self._by_optimizer[item.owner] = origins
        self._origins.lineage.put(item.tensor, origins)
        reach(origins, item.label, item.owner)
        for origin in origins:
            origin.lasts = True

    def _unseen(self, step: int, item: Item, phase: str, kind: str) -> Origin:
        """The origin of something written by what is no op of PyTorch's."""
        in_optimizer = phase == "optimizer"
        others = [x for x in self._items() if x.owner == item.owner and x.label != item.label]
        exception = FpException(
            verdict="absorbed",
            kind=kind,
            step=step,
            last_step=step,
            op=f"{self._optimizer_of(item)}.step" if in_optimizer else "an unseen kernel",
            phase=phase,
            module=item.module,
            module_kind=self._kinds.get(item.module, ""),
            location=None,
            inputs=self._gradient_stats(item) if in_optimizer else (),
            outputs=tuple(stats(x.label, x.tensor) for x in (item, *others)),
            before=tuple(map(past_op, self._origins.past)),
        )
        return self._origins.unseen(exception, item.tensor)

    def _optimizer_of(self, item: Item) -> str:
        """The class of the optimizer that holds the item's parameter."""
        p = dict(self._parameters()).get(item.owner)
        holders = (
            type(optimizer).__name__
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            if any(p is x for x in group["params"])
        )
        return next(
            holders, type(self._optimizers[0]).__name__ if self._optimizers else "optimizer"
        )

    def _gradient_stats(self, item: Item) -> tuple[TensorStats, ...]:
        return tuple(stats(g.label, g.tensor) for g in self._gradients() if g.owner == item.owner)

    def _gradients(self) -> Iterator[Item]:
        for name, p in self._parameters():
            if p.grad is not None:
                yield Item(f"gradient of {name}", name, p.grad)
        for x in self._given():
            if x.is_leaf and x.grad is not None:
                yield Item("gradient of the model's input", "", x.grad)

    def _given(self) -> Iterator[Tensor]:
        """What the model was called with, where it is alive."""
        yield from (x for ref in self._inputs if (x := ref()) is not None)

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the model, and those the optimizers have beside them."""
        named = dict(self._model.named_parameters())
        yield from named.items()
        known = {id(p) for p in named.values()}
        for g, group in enumerate(self._groups()):
            for i, p in enumerate(group["params"]):
                if id(p) not in known:
                    yield f"parameter {i} of group {g}", p

    def _items(self) -> Iterator[Item]:
        for name, p in self._parameters():
            yield Item(f"parameter {name}", name, p)
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        yield Item(f"{key} of {name}", name, value)
        for name, buffer in self._model.named_buffers():
            yield Item(f"buffer {name}", name, buffer)


def _finite(found: Limits | None) -> bool:
    return found is None or found.finite


def _kind(found: Limits | None) -> str:
    return "invalid" if found is not None and found.has_nan else "overflow"
