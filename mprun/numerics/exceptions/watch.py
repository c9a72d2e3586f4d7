"""The mode that hands each op, with the tensors it took and made, to those who look at them.

In a step every op is met below autograd and autocast, casts included; of what a mode below makes of
an op (emulated or substituted arithmetic) nothing is met. While it is entered, PyTorch runs
compiled regions op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mprun._torch import backward_node, next_node, no_dispatch
from mprun.numerics.exceptions.details import Site
from mprun.numerics.exceptions.lines import Line, current_line
from mprun.numerics.exceptions.ops import UNSCALE, Call, Spec, spec_of, written
from mprun.numerics.exceptions.tensors import PLAIN_TYPES, limits, tensors_in
from mprun.numerics.observe import Following

COMPILED = "compiled regions run op by op while floating-point exceptions are looked for"


class Watch(Following):
    """Meets each op while it is entered.

    Args:
        model: whose modules are named.
        look: is called with each op that makes numbers, and where it ran.
        unscaling: is called before a loss scaler looks at the gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        look: Callable[[Call, Site], None],
        unscaling: Callable[[], None],
    ) -> None:
        super().__init__()
        self.scaler_overflowed = False
        """Whether a loss scaler found an overflow in this step's gradients."""
        self.loss_scale: float | None = None
        """What it divided them by."""
        self._look = look
        self._unscaling = unscaling
        self.kinds = {path: type(module).__name__ for path, module in model.named_modules()}
        """The class of each module."""
        self._lines: dict[int, Line | None] = {}

    def begin(self) -> None:
        """A step begins: the graphs of the last one are gone."""
        self.scaler_overflowed, self.loss_scale = False, None
        self._lines.clear()
        self._follower.forget_graph()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._muted:
            return func(*args, **kwargs)
        site, spec = self._site(), spec_of(func)
        if func is UNSCALE:
            self._unscaling()
        targets = [x for _, value in written(spec, args, kwargs) for x in tensors_in(value)]
        before = {id(x): limits(x) for x in targets}
        saved = _copies(targets) if spec.reads_written and _may_run_again(spec, site) else {}
        self._muted = True  # of what a mode below makes of the op
        try:
            result = func(*args, **kwargs)
        finally:
            self._muted = False
        if spec.makes_numbers:
            self._look(Call(func, args, kwargs, result, before, saved), site)
        if func is UNSCALE:
            self.scaler_overflowed |= bool(args[1].item())
            self.loss_scale = 1 / args[2].item()
        return result

    def _site(self) -> Site:
        phase, module = self._follower.place()
        line = current_line()
        if phase == "backward":
            line = line or self._lines.get(backward_node() or 0)
        else:  # for the backward op of the node that was just made
            self._lines.setdefault(next_node() - 1, line)
        kind = "" if module is None else self.kinds.get(module, "")
        return Site(phase, module or "", kind, line)


def _may_run_again(spec: Spec, site: Site) -> bool:
    """Not the optimizer's ops nor those over lists: a copy of all parameters is too much."""
    return not (spec.listwise or spec.random or site.phase == "optimizer")


def _copies(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    with no_dispatch(), torch.no_grad():
        return {id(x): x.clone() for x in tensors if type(x) in PLAIN_TYPES}
