"""Float32 masters of 16-bit parameters, for an optimizer that would lose small updates.

An optimizer of `torch.optim`, or of anyone else, computes in the dtype of the parameters. In 16
bits it loses small updates, and its state underflows. Here it gets float32 copies of them.

Gradients are copied up before a step, and its result is rounded into the parameters: to nearest,
or stochastically with the bits that the other optimizers of `mprun.optim` draw. What a step leaves
in the masters is never lost, so both train like float32 parameters that the model sees rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.optim.base import GradScaledOptimizer, check_option
from mprun.optim.state import check_operands
from mprun.precision._torch import is_fake, parameters_replaced
from mprun.precision.loss_scale import MasteredOptimizer
from mprun.precision.products import LOW
from mprun.precision.random_bits import NAME, START, Key, key, tensor_number
from mprun.precision.rounding import OVERFLOWS, round_nearest, stochastic
from mprun.records.policy_columns import ROUNDINGS

MASTER = "master"  # The name of the master in `state`
Masters = dict[nn.Parameter, nn.Parameter]  # Float32 masters, each with its 16-bit parameter


def masters_of(parameters: Iterable[nn.Parameter]) -> Masters:
    """A float32 master of each 16-bit parameter; tied parameters have one."""
    masters: Masters = {}
    # Each once, however many modules share it
    for p in dict.fromkeys(p for p in parameters if p.dtype in LOW):
        master = nn.Parameter(p.detach().float())
        setattr(master, NAME, getattr(p, NAME, None))
        setattr(master, START, getattr(p, START, 0))
        masters[master] = p
    return masters


@contextmanager
def float32_masters(model: nn.Module) -> Iterator[Masters]:
    """A context in which `model` has float32 masters in place of trainable 16-bit parameters.

        with float32_masters(model) as masters:
            inner = torch.optim.Adagrad(model.parameters(), lr=0.1)  # holds the masters
        optimizer = mprun.optim.MasterWeights(inner, masters)

    At the end the model has its parameters back.
    """
    masters = masters_of(p for p in model.parameters() if p.requires_grad)
    with parameters_replaced(model, {p: master for master, p in masters.items()}):
        yield masters


class MasterWeights(GradScaledOptimizer, MasteredOptimizer):
    """An optimizer whose 16-bit parameters have float32 masters: `MasterWeights(inner, masters)`.

    `param_groups` and `state` have the 16-bit parameters; options are those of `inner`, which gets
    them before each step, so learning-rate schedules work. The state of a parameter has its master
    beside the entries of `inner`.

    Args:
        inner: holds the masters, and any float32 parameters.
        masters: those that `float32_masters` gave.
        rounding: nearest, or stochastic, of the parameters; kahan is nearest here, because the
            master has the remainder. There is no split: the masters are float32.
        overflow: infinity, or saturate at the largest finite number.
        seed: of the random bits, see `StorageOptions.seed`.

    Raises:
        ValueError: an option that is none of those.
    """

    def __init__(
        self,
        inner: Optimizer,
        masters: Mapping[nn.Parameter, nn.Parameter],
        *,
        rounding: str = "stochastic",
        overflow: str = "infinity",
        seed: int = 0,
    ) -> None:
        check_option("rounding", rounding, [x for x in ROUNDINGS if x != "split"])
        check_option("overflow", overflow, OVERFLOWS)
        self.inner = inner
        self.rounding = "stochastic" if rounding == "stochastic" else "nearest"
        self.overflow, self._seed = overflow, seed
        self._master_of = {p: master for master, p in masters.items()}
        groups = [
            {**group, "params": [masters.get(p, p) for p in group["params"]], "attempts": 0}
            for group in inner.param_groups
        ]
        super().__init__(groups, dict(inner.defaults))
        self._pull()

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "rounding", "overflow", "_seed", "_master_of")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in names}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the parameters of `param_group`, with masters of those in 16 bits."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if len(self.param_groups) <= len(self.inner.param_groups):
            return  # the inner optimizer has it: this one is being made
        self._master_of |= {p: master for master, p in masters_of(group["params"]).items()}
        group.setdefault("attempts", 0)
        params = [self._master_of.get(p, p) for p in group["params"]]
        self.inner.add_param_group({**group, "params": params})
        self._pull()

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter, and what the inner optimizer holds: its master, or itself."""
        for group in self.param_groups:
            for p in group["params"]:
                yield p, self._master_of.get(p, p)

    def _push(self) -> None:
        """Give the inner optimizer this one's options and state."""
        for mine, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({k: v for k, v in mine.items() if k != "params"})
        for p, held in self._pairs():
            entries = self.state.get(p, {})
            if held is not p and MASTER not in entries:  # the state was cleared
                held.detach().copy_(p.detach())
            rest = {k: v for k, v in entries.items() if k != MASTER}
            if rest or held in self.inner.state:
                self.inner.state[held] = rest

    def _pull(self) -> None:
        """Take options and state from the inner optimizer."""
        for mine, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update({k: v for k, v in inner.items() if k != "params"})
        for p, held in self._pairs():
            master = {} if held is p else {MASTER: held.detach()}
            if master or held in self.inner.state:
                self.state[p] = {**master, **self.inner.state.get(held, {})}

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p, _ in self._pairs() if p.grad is not None and p.grad.numel()]

    def _step(self, scale: Tensor | None, skip: Tensor | None) -> None:
        for group in self.param_groups:
            group["attempts"] += 1
        if skip is None or is_fake(skip) or not skip.item():
            with self.masters_with_gradients():
                self.inner.step()
                self._pull()
            self._round()

    @contextmanager
    def masters_with_gradients(self) -> Iterator[Masters]:
        self._push()
        scale: Tensor | None = getattr(self, "grad_scale", None)
        factor = None if scale is None else scale.reciprocal().float()
        own: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for p, held in self._pairs():
                if p.grad is None:
                    continue
                if held is not p:
                    check_operands(p, p.grad, type(self.inner).__name__)
                gradient = p.grad.float() if factor is None else p.grad.float() * factor
                if held is p:
                    own.append((p, p.grad))
                held.grad = gradient
            yield {held: p for p, held in self._pairs()}
        finally:
            # During a step alone: gradients take as much memory as the masters
            for master in self._master_of.values():
                master.grad = None
            for p, before in own:
                p.grad = before

    def _round(self) -> None:
        """Write the masters of parameters with a gradient into them, rounded."""
        position = 0
        for group in self.param_groups:
            for p in group["params"]:
                if p in self._master_of and p.grad is not None:
                    name = getattr(p, NAME, None)
                    number = position if name is None else tensor_number(name)
                    bits = key(self._seed, group["attempts"], number, 0)
                    p.copy_(self._rounded(p, bits))
                position += 1

    def _rounded(self, p: nn.Parameter, bits: Key) -> Tensor:
        master = self._master_of[p].detach()
        if self.rounding == "nearest" or is_fake(master):
            return round_nearest(master, p.dtype, self.overflow)
        return stochastic(master, p.dtype, bits, self.overflow, getattr(p, START, 0))

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the masters, in the order of the parameters."""
        self._push()
        masters = [held.detach() for p, held in self._pairs() if held is not p]
        return {**self.inner.state_dict(), "masters": masters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict`, bit for bit.

        Raises:
            KeyError: it has no masters.
            ValueError: its masters are not as many as this optimizer's, or have other shapes.
        """
        own = [held for p, held in self._pairs() if held is not p]
        saved = state_dict["masters"]
        if [x.shape for x in saved] != [x.shape for x in own]:
            raise ValueError(
                f"{len(saved)} masters for {len(own)} parameters in 16 bits, or of other shapes; "
                "legal is the state of this model"
            )
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != "masters"})
        with torch.no_grad():
            for master, value in zip(own, saved, strict=True):
                master.copy_(value)
        self.state.clear()
        self._pull()
