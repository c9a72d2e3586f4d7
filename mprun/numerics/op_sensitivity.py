"""Which ops of a model do not stand the lower dtype, and the smallest list that spares them.

    found = sensitivity(model, torch.nn.functional.cross_entropy, batches, torch.float16)
    for row in found.ops: ...                       # what each op does to loss and gradients
    lists = found.smallest_ops().lists              # for OpListCaster(lists, torch.float16)

An op is measured from both ends. *Alone*: it is in the lower dtype and everything else in float32,
which says whether it is to blame. *Kept*: it is in float32 and everything else lower, which says
what sparing it would bring. Modules are measured in the same way, with `precision.layers`' meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from mprun.numerics.op_choice import OpChoice, calls, float32_share, op_choice
from mprun.numerics.passes import Batch, Loss, Passes, Way
from mprun.numerics.probe import LOSS_SCALES, Measure, Probe
from mprun.numerics.rounding_errors import Reference
from mprun.numerics.smallest import Smallest, smallest
from mprun.numerics.tolerance import DEFAULT, Tolerance
from mprun.precision import Arithmetic, OpLists


class Row(NamedTuple):
    """What one op or module does."""

    name: str
    calls: int
    """In a forward pass."""
    alone: Measure
    """It is lower, everything else in float32."""
    kept: Measure
    """It is in float32, everything else lower."""
    time_ratio: float | None
    """Time of a forward and a backward pass with it in float32 over that with everything lower;
    None where nothing was timed."""


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    fp32: tuple[str, ...]
    """Names of ops, or of modules, to keep in float32; the most harmful first."""
    lists: OpLists
    """For an `OpListCaster`; with modules, which `precision.layers` keeps apart, no op is on the
    fp32 list."""
    search: Smallest
    measure: Measure
    float32_share: float
    """Share of the numbers computed in the forward pass that are float32."""


class Sensitivity:
    """What the ops and modules of a model do; made by `sensitivity`.

    Args:
        probe: measures.
        passes: what it measures on.
        choice: the ops and modules.
        with_modules: whether modules are measured too.
        timed_steps: steps timed of each op and module and as many beside; 0 for no times.
        told: is told what is measured next.
    """

    def __init__(
        self,
        probe: Probe,
        passes: Passes,
        choice: OpChoice,
        with_modules: bool = True,
        timed_steps: int = 0,
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.choice = choice
        self._probe = probe
        self._passes = passes
        self._timed_steps = timed_steps
        self._told = told
        self._known: dict[tuple[frozenset[str], frozenset[str]], Measure] = {}
        self.unavoidable = probe.unavoidable(choice.dtype)
        """With everything in float32, and weights of the lower dtype's precision."""
        self.lower = self._measure((), ())
        """With everything lower."""
        movable = {n: c for n, c in choice.ops.items() if n not in choice.always}
        self.ops = tuple(self._op(name, count) for name, count in movable.items())
        """A row for each op, in the order of their first calls."""
        named = choice.modules if with_modules else {}
        self.modules = tuple(self._module(name, count) for name, count in named.items())
        """The same for modules."""

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Parameters whose gradients are rounding errors in float32 already."""
        return self._probe.unjudged

    @property
    def zero(self) -> tuple[str, ...]:
        """Parameters whose gradients are exactly zero in float32; they are not judged either."""
        return self._probe.zero

    @property
    def reference(self) -> Reference:
        """What told which gradients are rounding errors."""
        return self._probe.reference

    def smallest_ops(self, tolerance: Tolerance = DEFAULT) -> Found:
        """The smallest list of ops in float32 that keeps to the tolerance."""
        harm = tolerance.beside(self.unavoidable).harm
        search = smallest(
            {row.name: harm(row.alone) for row in self.ops},
            lambda kept: harm(self._measure(kept, ())),
            lambda kept: self._float32_share(kept, ()),
        )
        return self._found(search, search.kept, ())

    def smallest_modules(self, tolerance: Tolerance = DEFAULT) -> Found:
        """The smallest set of modules in float32 that does."""
        harm = tolerance.beside(self.unavoidable).harm
        search = smallest(
            {row.name: harm(row.alone) for row in self.modules},
            lambda kept: harm(self._measure((), kept)),
            lambda kept: self._float32_share((), kept),
        )
        return self._found(search, (), search.kept)

    def measure(self, way: Way) -> Measure:
        """How far any other way is from float32."""
        return self._probe.measure(way)

    def time_ratio(self, way: Way) -> float | None:
        """Time of a forward and a backward pass in a way over that with everything lower."""
        if not self._timed_steps:
            return None
        return self._probe.time_ratio(self.choice.way(), way, self._timed_steps)

    def _found(self, search: Smallest, ops: Sequence[str], modules: Sequence[str]) -> Found:
        measure, share = self._measure(ops, modules), self._float32_share(ops, modules)
        return Found(search.kept, self.choice.lists(ops), search, measure, share)

    def _float32_share(self, ops: Sequence[str], modules: Sequence[str]) -> float:
        inputs = self._passes.batches[0][0]
        made = calls(self._passes.model, inputs, lambda w: self.choice.way(ops, modules, w))
        return float32_share(made)

    def _op(self, name: str, count: int) -> Row:
        self._told(f"op {name}")
        alone = self._probe.measure(self.choice.op_alone(name))
        ratio = self.time_ratio(self.choice.way([name]))
        return Row(name, count, alone, self._measure([name], ()), ratio)

    def _module(self, name: str, count: int) -> Row:
        self._told(f"module {name}")
        alone = self._probe.measure(self.choice.module_alone(name))
        ratio = self.time_ratio(self.choice.way(modules=[name]))
        return Row(name, count, alone, self._measure((), [name]), ratio)

    def _measure(self, ops: Sequence[str], modules: Sequence[str]) -> Measure:
        key = frozenset(ops), frozenset(modules)
        if key not in self._known:
            self._told(f"in float32: {', '.join((*ops, *modules)) or 'nothing'}")
            self._known[key] = self._probe.measure(self.choice.way(ops, modules))
        return self._known[key]


def sensitivity(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    dtype: torch.dtype = torch.float16,
    *,
    modules: bool = True,
    always: Sequence[str] = (),
    timed_steps: int = 0,
    arithmetic: Arithmetic | None = None,
    loss_scales: Sequence[float] | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Sensitivity:
    """Measure what each op of a model does in a 16-bit dtype.

    The model is left as it was. About four forward and backward passes are run for each op, each
    module and each batch, and the float32 gradients of each batch are kept.

    Args:
        model: parameters in float32.
        loss: `loss(output, target)`, a scalar; it is computed from float32 outputs.
        batches: pairs of inputs and target, on the model's device. Inputs are a tensor, a tuple of
            arguments, or a mapping of named ones. Take validation data, never the test set.
        dtype: float16 or bfloat16.
        modules: measure modules too.
        always: ops that are to be in float32 in any case.
        timed_steps: steps timed of each op and module; 0 for no times.
        arithmetic: whose kernels compute; PyTorch's by default.
        loss_scales: tried in turn until gradients are finite; by default powers of two from 2^16
            down to 1 for float16, and 1 for bfloat16.
        told: is told what is measured next, in a few words.

    Raises:
        ValueError: no batches; no parameters to train, or 16-bit ones; a loss or gradient that is
            not finite in float32; a name in `always` that no op has; another dtype.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype={dtype}: legal are torch.float16, torch.bfloat16")
    passes = Passes(model, loss, batches)
    scales = LOSS_SCALES.get(dtype, (1.0,)) if loss_scales is None else loss_scales
    probe = Probe(passes, scales)
    choice = op_choice(model, passes.batches[0][0], dtype, always, arithmetic)
    return Sensitivity(probe, passes, choice, modules, timed_steps, told)
