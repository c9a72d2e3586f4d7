"""Which ops of a model do not tolerate the lower dtype, and the smallest list that spares them.

    result = sensitivity(model, torch.nn.functional.cross_entropy, batches, torch.float16)
    for row in result.ops: ...                      # the effect of each op on loss and gradients
    lists = result.smallest_ops().lists             # for OpListCaster(lists, torch.float16)

Each op is measured *alone*: it is lower and everything else is float32, which shows whether it does
harm. Modules are measured in the same way, with a dtype of their own as in `precision.layers`, and
so are the products of linear layers (`format_search.py`). Harm is 1 where the lower precision does
as much as is tolerated, 0 where it does none, and infinite where a loss is NaN.

Harm alone is not enough to choose a set. If two ops overflow, the loss is NaN until both are moved;
their harm alone distinguishes them from harmless ops. So `smallest_set` measures sets. In the end
no name can be left out. Another, smaller set may exist: to exclude that takes 2^n measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from mprun.inspect.cast_probe import LOSS_SCALES, CastProbe
from mprun.inspect.op_candidates import OpCandidates, float32_share, forward_calls, op_candidates
from mprun.inspect.passes import Batch, CastPlan, Loss, Passes
from mprun.inspect.rounding_oracle import DEFAULT, Tolerance
from mprun.inspect.search_result import Deviation, Selection
from mprun.precision import Arithmetic, OpLists
from mprun.records.console import ReportPart, report_nothing

Names = tuple[str, ...]
SetMeasure = Callable[[Names], float]  # A figure while these names are high


# ---- the choice ----------------------------------------------------------------------------------


def smallest_set(
    alone: Mapping[str, float], harm: SetMeasure, cost: SetMeasure = lambda high: 0.0
) -> Names:
    """A set to keep high whose harm is at most 1, from which nothing can be left out.

    Names are added, the most harmful alone first, until that is enough; dropped where the others
    are enough; and swapped for another that is enough too and costs less. Without a set that is
    enough, it is all names.

    Args:
        alone: name to its harm alone, in the order of the model's calls: of two equally harmful
            names the earlier is added first, because it may be the cause of the other.
        harm: measures; NaN counts as too much.
        cost: of sets whose harm is tolerated.
    """
    high: Names = ()
    for name in sorted(alone, key=lambda n: -alone[n]):
        if harm(high) <= 1:
            break
        high = (*high, name)
    if not harm(high) <= 1:
        return high
    high = _without_needless(high, harm)
    swapped = _swapped(high, alone, harm, cost)
    return high if swapped == high else _without_needless(swapped, harm)


def _without_needless(high: Names, harm: SetMeasure) -> Names:
    """`high` without the names that can go: those that were added before the op that mattered."""
    before = None
    while high != before:  # again: without one name, another may be needless
        before = high
        for name in reversed(before):  # the least harmful alone first
            rest = tuple(n for n in high if n != name)
            high = rest if harm(rest) <= 1 else high
    return high


def _swapped(high: Names, alone: Mapping[str, float], harm: SetMeasure, cost: SetMeasure) -> Names:
    """`high` with the op that overflows in place of one that only feeds it."""
    for name in high:
        # a name that does no harm alone may feed the op that overflows, but is not to blame
        others = [n for n in alone if alone[n] > 1 and n not in high]
        sets = [tuple(other if n == name else n for n in high) for other in others]
        enough = [other for other in sets if harm(other) <= 1]
        high = min([high, *enough], key=cost) if enough else high
    return high


def least_harm(
    alone: Mapping[str, float], harm: SetMeasure, cost: SetMeasure, budget: float
) -> Names:
    """The set to keep high with the least harm that was found within a budget.

    That is a knapsack problem. Roundings of different products are independent, so the powers of
    their errors add, and the harm that a name removes is its harm alone, squared. Names are added
    by harm removed per bit (Dantzig, "Discrete-Variable Extremum Problems", 1957), and each set on
    the way is measured. If powers do add, the best of these sets and of the single names removes at
    least half of what the best possible set removes.

    Args:
        alone: name to its harm alone, not NaN.
        harm: measures the harm with a set high; not NaN.
        cost: of a set.
        budget: the most that it may cost; keeping nothing costs no more.
    """
    lowest = cost(())

    def removed_per_bit(name: str) -> float:
        bits = cost((name,)) - lowest
        return alone[name] ** 2 / bits if bits > 0 else math.inf  # free ones go first

    sets: list[Names] = [()]
    for name in sorted(alone, key=lambda n: -removed_per_bit(n)):
        if cost((*sets[-1], name)) <= budget:
            sets.append((*sets[-1], name))
    sets += [(name,) for name in alone if cost((name,)) <= budget]
    return min(sets, key=harm)  # of equal ones the first, which costs least


# ---- the measurements ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidates:
    """What can be kept in the higher precision: the ops or the modules of a model, or its GEMMs."""

    kind: str  # op, module, GEMM or layer
    names: Mapping[str, int]  # Name to its number of calls, in the order of the first ones
    alone: Callable[[str], CastPlan]  # This one lower, everything else in float32
    kept: Callable[[Names], CastPlan]  # These high, the others lower
    cost: SetMeasure  # What keeping these high costs


class Effect(NamedTuple):
    """The effect of one candidate that is lower alone."""

    name: str
    calls: int
    alone: Deviation


class CandidateSearch:
    """Measures candidates one by one, and sets of them; what was measured stays if `report` raises.

    Args:
        probe: measures any cast plan.
        candidates: what can be kept high.
        report: is called before each measurement.
    """

    def __init__(
        self, probe: CastProbe, candidates: Candidates, report: ReportPart = report_nothing
    ) -> None:
        self.candidates = candidates
        self.effects: list[Effect] = []
        """In the order of the candidates' first calls."""
        self._probe, self._report = probe, report
        self._known: dict[frozenset[str], Deviation] = {}

    def kept(self, names: Names) -> Deviation:
        """The distance from float32 with these high and the others lower; each set once."""
        key = frozenset(names)
        if key not in self._known:
            self._report(f"kept high: {', '.join(names) or 'nothing'}", len(self._known))
            self._known[key] = self._probe.measure(self.candidates.kept(names))
        return self._known[key]

    def measure(self) -> None:
        """Measure the effect of each candidate."""
        every = self.candidates.names
        for name, calls in every.items():
            self._report(f"{self.candidates.kind} {name}", len(self.effects), len(every))
            alone = self._probe.measure(self.candidates.alone(name))
            self.effects.append(Effect(name, calls, alone))

    def smallest(self, tolerance: Tolerance, budget: float | None = None) -> Selection:
        """The cheapest set within the tolerance; with a budget, the set with the least harm.

        Errors below the noise of batches count with a budget, because it is there to spend.
        """
        judged = tolerance.harm if budget is None else tolerance.whole_harm
        alone = {effect.name: judged(effect.alone) for effect in self.effects}
        cost = self.candidates.cost

        def harm(names: Names) -> float:
            return judged(self.kept(names))

        if budget is None:
            names = smallest_set(alone, harm, cost)
        else:
            names = least_harm(alone, harm, cost, budget)
        measure = self.kept(names)
        return Selection(names, tolerance.harm(measure), measure, cost(names))


# ---- of a model ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp32List(Selection):
    """The smallest list to keep in float32, measured; its cost is the share of float32 numbers."""

    lists: OpLists
    """For an `OpListCaster`; with modules, which `precision.layers` keeps apart, no op is on the
    fp32 list."""

    @property
    def fp32(self) -> Names:
        """Names of ops, or of modules, to keep in float32; the most harmful first."""
        return self.high


class Sensitivity:
    """The effects of the ops and modules of a model; `sensitivity` makes and measures it.

    Args:
        probe: measures any cast plan, and knows which parameters are not judged.
        candidates: the ops and modules.
        with_modules: whether modules are measured too.
        report: is called before each measurement.
    """

    def __init__(
        self,
        probe: CastProbe,
        candidates: OpCandidates,
        with_modules: bool = True,
        report: ReportPart = report_nothing,
    ) -> None:
        self.candidates, self.probe = candidates, probe
        self.unavoidable = probe.unavoidable(candidates.dtype)
        """Everything in float32, with weights of the lower dtype's precision."""
        plan, share = candidates.plan, self._float32_share
        ops = {n: c for n, c in candidates.ops.items() if n not in candidates.always}
        modules = Candidates(
            "module",
            candidates.modules if with_modules else {},
            alone=candidates.module_alone,
            kept=lambda names: plan(modules=names),
            cost=lambda names: share(modules=names),
        )
        self.of_ops = CandidateSearch(
            probe, Candidates("op", ops, candidates.op_alone, plan, share), report
        )
        self.of_modules = CandidateSearch(probe, modules, report)
        self.lower = self.of_ops.kept(())
        """Everything lower."""

    @property
    def ops(self) -> tuple[Effect, ...]:
        """The effect of each op, in the order of their first calls."""
        return tuple(self.of_ops.effects)

    @property
    def modules(self) -> tuple[Effect, ...]:
        """The same for modules."""
        return tuple(self.of_modules.effects)

    def smallest_ops(self, tolerance: Tolerance = DEFAULT) -> Fp32List:
        """The smallest list of ops in float32 that keeps to the tolerance."""
        kept = self.of_ops.smallest(tolerance.beside(self.unavoidable))
        return Fp32List(**vars(kept), lists=self.candidates.lists(kept.high))

    def smallest_modules(self, tolerance: Tolerance = DEFAULT) -> Fp32List:
        """The smallest set of modules in float32 that keeps to the tolerance."""
        kept = self.of_modules.smallest(tolerance.beside(self.unavoidable))
        return Fp32List(**vars(kept), lists=self.candidates.lists())

    def _float32_share(self, ops: Names = (), modules: Names = ()) -> float:
        passes, plan = self.probe.passes, self.candidates.plan
        inputs = passes.batches[0][0]
        calls = forward_calls(passes.model, inputs, lambda w: plan(ops, modules, w), passes.forward)
        return float32_share(calls)


def sensitivity(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    dtype: torch.dtype = torch.float16,
    *,
    modules: bool = True,
    always: Sequence[str] = (),
    arithmetic: Arithmetic | None = None,
    loss_scales: Sequence[float] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Sensitivity:
    """Measure the effect of each op of a model in a 16-bit dtype.

    The model is not changed. About two forward and backward passes are run for each op, each
    module and each batch, and the float32 gradients of each batch are kept in memory.

    Args:
        model: parameters in float32.
        loss: `loss(output, target)`, a scalar; it is computed from float32 outputs.
        batches: pairs of inputs and target, on the model's device. Inputs are a tensor, a tuple of
            arguments, or a mapping of named ones. Take validation data, never the test set.
        dtype: float16 or bfloat16.
        modules: measure modules too.
        always: ops that are always in float32.
        arithmetic: computes the ops; PyTorch's kernels by default.
        loss_scales: tried in turn until gradients are finite; by default powers of two from 2^16
            down to 1 for float16, and 1 for bfloat16.
        report: is called with a short text about what is measured next.

    Raises:
        ValueError: no batches; no parameters to train, or 16-bit ones; a loss or gradient that is
            not finite in float32; a name in `always` that no op has; another dtype.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype={dtype}: legal are torch.float16, torch.bfloat16")
    passes = Passes(model, loss, batches)
    scales = LOSS_SCALES.get(dtype, (1.0,)) if loss_scales is None else loss_scales
    candidates = op_candidates(model, passes.batches[0][0], dtype, always, arithmetic)
    measured = Sensitivity(
        CastProbe(passes, scales),
        candidates,
        modules,
        lambda text, done=0, total=None: report(text),
    )
    measured.of_ops.measure()
    measured.of_modules.measure()
    return measured
