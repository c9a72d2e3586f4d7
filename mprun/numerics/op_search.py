"""Which ops of a model do not tolerate the lower dtype, and the smallest list that spares them.

    result = sensitivity(model, torch.nn.functional.cross_entropy, batches, torch.float16)
    for row in result.ops: ...                      # the effect of each op on loss and gradients
    lists = result.smallest_ops().lists             # for OpListCaster(lists, torch.float16)

An op is measured twice. *Alone*: it is lower and everything else is float32, which shows whether
it does harm. *Kept*: it is float32 and everything else is lower, which shows the gain of sparing
it. Modules are measured in the same way, with a dtype of their own as in `precision.layers`.

The search for the smallest set knows only names and three measurements. Harm is 1 where the lower
dtype does as much as is tolerated, 0 where it does none, and infinite where a loss is NaN:

    alone         the harm of a name that is lower while everything else is float32
    harm(fp32)    the harm of the lower dtype while these names are float32
    cost(fp32)    the cost of keeping them in float32

    add           the names, the most harmful alone first, until the harm is at most 1
    drop          each again, the least harmful alone first, if the others are enough
    swap          each for another that is harmful alone, if that is enough and costs less

`harm` alone is not enough. If two ops overflow, the loss is NaN until both are moved; their harm
alone distinguishes them from harmless ops. Dropping removes what was added before the op that
mattered. Swapping finds the op that overflows behind one that only feeds it. In the end no name can
be left out. Another, smaller set may exist: to exclude that takes 2^n measurements instead of 3 n.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from mprun.console import ReportPart, report_nothing
from mprun.numerics.cast_probe import LOSS_SCALES, CastProbe
from mprun.numerics.op_candidates import OpCandidates, float32_share, forward_calls, op_candidates
from mprun.numerics.passes import Batch, CastPlan, Forward, Loss, Passes
from mprun.numerics.tolerance import DEFAULT, Tolerance
from mprun.precision import Arithmetic, OpLists
from mprun.precision.forward_backward import call
from mprun.results.search_result import Deviation, SearchStep

SetMeasure = Callable[[tuple[str, ...]], float]
"""A measurement while these names are in float32."""


@dataclass(frozen=True)
class SmallestSet:
    """The result of a search."""

    fp32: tuple[str, ...]
    """Names to keep in float32."""
    harm: float
    """With them in float32."""
    steps: tuple[SearchStep, ...]
    """The decisions."""

    @property
    def is_within(self) -> bool:
        """Whether the harm is tolerated; if not, even keeping every name was not enough."""
        return self.harm <= 1


def smallest_set(
    alone: Mapping[str, float], harm: SetMeasure, cost: SetMeasure = lambda fp32: 0.0
) -> SmallestSet:
    """A set to keep in float32 from which nothing can be left out.

    Args:
        alone: name to its harm alone, in the order of the model's calls: of two equally harmful
            names the earlier is added first, because it may be the cause of the other.
        harm: measures; NaN counts as infinite. Called once for each set.
        cost: measures; called for sets whose harm is tolerated.
    """
    search = _SetSearch({n: _worst_if_nan(h) for n, h in alone.items()}, harm, cost)
    fp32 = search.added()
    if search.harm(fp32) <= 1:
        needed = search.without_needless(fp32)
        fp32 = search.swapped(needed)
        if fp32 != needed:
            fp32 = search.without_needless(fp32)
    return SmallestSet(fp32, search.harm(fp32), tuple(search.steps))


class _SetSearch:
    """One search: its measurements and decisions."""

    def __init__(self, alone: Mapping[str, float], harm: SetMeasure, cost: SetMeasure) -> None:
        self.steps: list[SearchStep] = []
        self._alone = alone
        self._measure = harm
        self._cost = cost
        self._known: dict[frozenset[str], float] = {}

    def harm(self, fp32: Sequence[str]) -> float:
        key = frozenset(fp32)
        if key not in self._known:
            self._known[key] = _worst_if_nan(self._measure(tuple(fp32)))
        return self._known[key]

    def added(self) -> tuple[str, ...]:
        """The most harmful names, as many as it takes; all if that is not enough."""
        fp32: tuple[str, ...] = ()
        for name in sorted(self._alone, key=lambda n: -self._alone[n]):
            if self.harm(fp32) <= 1:
                break
            fp32 = (*fp32, name)
            self._decide("add", name, fp32)
        return fp32

    def without_needless(self, fp32: tuple[str, ...]) -> tuple[str, ...]:
        """`fp32` without the names that can go; repeated until none can."""
        before = None
        while fp32 != before:
            before = fp32
            for name in reversed(before):
                rest = tuple(n for n in fp32 if n != name)
                can_go = self.harm(rest) <= 1
                self._decide("drop" if can_go else "need", name, rest)
                fp32 = rest if can_go else fp32
        return fp32

    def swapped(self, fp32: tuple[str, ...]) -> tuple[str, ...]:
        """`fp32` with cheaper names in place of others."""
        for name in fp32:
            others = [n for n in self._alone if self._alone[n] > 1 and n not in fp32]
            sets = [tuple(other if n == name else n for n in fp32) for other in others]
            enough = [other for other in sets if self.harm(other) <= 1]
            best = min([fp32, *enough], key=self._cost) if enough else fp32
            for new in set(best) - set(fp32):
                self._decide("swap", new, best)
            fp32 = best
        return fp32

    def _decide(self, action: str, name: str, fp32: Sequence[str]) -> None:
        self.steps.append(SearchStep(action, name, self.harm(fp32)))


def _worst_if_nan(harm: float) -> float:
    return math.inf if math.isnan(harm) else harm


class OpEffect(NamedTuple):
    """The effect of one op or module; the fields are those of the record's `SensitivityRow`."""

    name: str
    calls: int
    alone: Deviation
    kept: Deviation
    time_ratio: float | None


@dataclass(frozen=True)
class Fp32List:
    """The smallest list to keep in float32, measured."""

    fp32: tuple[str, ...]
    """Names of ops, or of modules, to keep in float32; the most harmful first."""
    lists: OpLists
    """For an `OpListCaster`; with modules, which `precision.layers` keeps apart, no op is on the
    fp32 list."""
    search: SmallestSet
    measure: Deviation
    float32_share: float
    """Share of the numbers computed in the forward pass that are float32."""


_Names = tuple[str, ...]


class Sensitivity:
    """The effects of the ops and modules of a model; made by `sensitivity` or `unmeasured`.

    `ops` and `modules` fill as `measure_ops` and `measure_modules` go on. If `report` raises, they
    keep what was measured.

    Args:
        probe: measures any cast plan, and knows which parameters are not judged.
        passes: what it measures on.
        candidates: the ops and modules.
        with_modules: whether modules are measured too.
        timed_steps: steps timed of each op and module and as many for comparison; 0 for no times.
        report: is called before each measurement.
    """

    def __init__(
        self,
        probe: CastProbe,
        passes: Passes,
        candidates: OpCandidates,
        with_modules: bool = True,
        timed_steps: int = 0,
        report: ReportPart = report_nothing,
    ) -> None:
        self.candidates = candidates
        self.probe = probe
        self._passes = passes
        self._timed_steps = timed_steps
        self._report = report
        self._known: dict[tuple[frozenset[str], frozenset[str]], Deviation] = {}
        self.unavoidable = probe.unavoidable(candidates.dtype)
        """Everything in float32, with weights of the lower dtype's precision."""
        self.lower = self._measure((), ())
        """Everything lower."""
        self.movable_ops = {n: c for n, c in candidates.ops.items() if n not in candidates.always}
        """Name to number of calls of each op that is measured."""
        self.movable_modules = candidates.modules if with_modules else {}
        self._ops: list[OpEffect] = []
        self._modules: list[OpEffect] = []

    @property
    def ops(self) -> tuple[OpEffect, ...]:
        """The effect of each op, in the order of their first calls."""
        return tuple(self._ops)

    @property
    def modules(self) -> tuple[OpEffect, ...]:
        """The same for modules."""
        return tuple(self._modules)

    def measure_ops(self) -> None:
        """Measure the effect of each op."""
        self._measure_each("op", self.movable_ops, self.candidates.op_alone, self._ops)

    def measure_modules(self) -> None:
        """Measure the effect of each module."""
        self._measure_each(
            "module", self.movable_modules, self.candidates.module_alone, self._modules
        )

    def smallest_ops(self, tolerance: Tolerance = DEFAULT) -> Fp32List:
        """The smallest list of ops in float32 that keeps to the tolerance."""
        return self._smallest("op", self.ops, tolerance)

    def smallest_modules(self, tolerance: Tolerance = DEFAULT) -> Fp32List:
        """The smallest set of modules in float32 that keeps to the tolerance."""
        return self._smallest("module", self.modules, tolerance)

    def time_ratio(self, plan: CastPlan) -> float | None:
        """Time of a forward and a backward pass under a plan over that with everything lower."""
        if not self._timed_steps:
            return None
        return self.probe.time_ratio(self.candidates.plan(), plan, self._timed_steps)

    def _measure_each(
        self,
        kind: str,
        calls: Mapping[str, int],
        alone: Callable[[str], CastPlan],
        effects: list[OpEffect],
    ) -> None:
        for name, count in calls.items():
            self._report(f"{kind} {name}", len(effects), len(calls))
            in_float32 = _split(kind, (name,))
            ratio = self.time_ratio(self.candidates.plan(*in_float32))
            measure = self.probe.measure(alone(name))
            effects.append(OpEffect(name, count, measure, self._measure(*in_float32), ratio))

    def _smallest(self, kind: str, effects: Sequence[OpEffect], tolerance: Tolerance) -> Fp32List:
        harm, sets = tolerance.beside(self.unavoidable).harm, itertools.count()

        def harm_of(names: _Names) -> float:
            self._report(f"smallest list, in float32: {', '.join(names) or 'nothing'}", next(sets))
            return harm(self._measure(*_split(kind, names)))

        search = smallest_set(
            {effect.name: harm(effect.alone) for effect in effects},
            harm_of,
            lambda names: self._float32_share(*_split(kind, names)),
        )
        ops, modules = _split(kind, search.fp32)
        measure, share = self._measure(ops, modules), self._float32_share(ops, modules)
        return Fp32List(search.fp32, self.candidates.lists(ops), search, measure, share)

    def _float32_share(self, ops: _Names, modules: _Names) -> float:
        passes, plan = self._passes, self.candidates.plan
        inputs = passes.batches[0][0]
        calls = forward_calls(passes.model, inputs, lambda w: plan(ops, modules, w), passes.forward)
        return float32_share(calls)

    def _measure(self, ops: _Names, modules: _Names) -> Deviation:
        key = frozenset(ops), frozenset(modules)
        if key not in self._known:
            self._known[key] = self.probe.measure(self.candidates.plan(ops, modules))
        return self._known[key]


def _split(kind: str, names: _Names) -> tuple[_Names, _Names]:
    """The ops and the modules among names of one kind, op or module."""
    return (names, ()) if kind == "op" else ((), names)


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
    report: Callable[[str], None] = lambda _: None,
) -> Sensitivity:
    """Measure the effect of each op of a model in a 16-bit dtype.

    The model is not changed. About four forward and backward passes are run for each op, each
    module and each batch, and the float32 gradients of each batch are kept in memory.

    Args:
        model: parameters in float32.
        loss: `loss(output, target)`, a scalar; it is computed from float32 outputs.
        batches: pairs of inputs and target, on the model's device. Inputs are a tensor, a tuple of
            arguments, or a mapping of named ones. Take validation data, never the test set.
        dtype: float16 or bfloat16.
        modules: measure modules too.
        always: ops that are always in float32.
        timed_steps: steps timed of each op and module; 0 for no times.
        arithmetic: computes the ops; PyTorch's kernels by default.
        loss_scales: tried in turn until gradients are finite; by default powers of two from 2^16
            down to 1 for float16, and 1 for bfloat16.
        report: is called with a short text about what is measured next.

    Raises:
        ValueError: no batches; no parameters to train, or 16-bit ones; a loss or gradient that is
            not finite in float32; a name in `always` that no op has; another dtype.
    """

    def report_text(text: str, done: int = 0, total: int | None = None) -> None:
        report(text)

    measured = unmeasured(
        model,
        loss,
        batches,
        dtype,
        modules=modules,
        always=always,
        timed_steps=timed_steps,
        arithmetic=arithmetic,
        loss_scales=loss_scales,
        report=report_text,
    )
    measured.measure_ops()
    measured.measure_modules()
    return measured


def unmeasured(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    dtype: torch.dtype,
    *,
    modules: bool,
    always: Sequence[str],
    timed_steps: int,
    arithmetic: Arithmetic | None,
    loss_scales: Sequence[float] | None,
    report: ReportPart,
    forward: Forward = call,
) -> Sensitivity:
    """As `sensitivity`, before the first op is measured."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype={dtype}: legal are torch.float16, torch.bfloat16")
    passes = Passes(model, loss, batches, forward=forward)
    scales = LOSS_SCALES.get(dtype, (1.0,)) if loss_scales is None else loss_scales
    probe = CastProbe(passes, scales)
    candidates = op_candidates(model, passes.batches[0][0], dtype, always, arithmetic, forward)
    return Sensitivity(probe, passes, candidates, modules, timed_steps, report)
