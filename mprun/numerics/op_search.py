"""Which ops of a model do not tolerate the lower dtype, and the smallest list that spares them.

    result = sensitivity(model, torch.nn.functional.cross_entropy, batches, torch.float16)
    for row in result.ops: ...                      # the effect of each op on loss and gradients
    lists = result.smallest_ops().lists             # for OpListCaster(lists, torch.float16)

Modules are measured in the same way, with a dtype of their own as in `precision.layers`. How a set
is searched is in `set_search.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mprun.console import ReportPart, report_nothing
from mprun.numerics.cast_probe import LOSS_SCALES, CastProbe
from mprun.numerics.op_candidates import OpCandidates, float32_share, forward_calls, op_candidates
from mprun.numerics.passes import Batch, CastPlan, Loss, Passes
from mprun.numerics.set_search import CandidateSearch, Effect, KeptHigh, Names
from mprun.numerics.tolerance import DEFAULT, Tolerance
from mprun.precision import Arithmetic, OpLists


@dataclass(frozen=True)
class Fp32List(KeptHigh):
    """The smallest list to keep in float32, measured; its cost is the share of float32 numbers."""

    lists: OpLists
    """For an `OpListCaster`; with modules, which `precision.layers` keeps apart, no op is on the
    fp32 list."""

    @property
    def fp32(self) -> Names:
        """Names of ops, or of modules, to keep in float32; the most harmful first."""
        return self.names


@dataclass(frozen=True)
class Movable:
    """The ops or the modules of a model, as candidates."""

    kind: str
    """op or module."""
    names: Mapping[str, int]
    alone: Callable[[str], CastPlan]
    """This one lower, everything else in float32."""
    kept: Callable[[Names], CastPlan]
    """These in float32, the others lower."""
    cost: Callable[[Names], float]
    """The share of the forward pass's numbers that are float32 with these in float32."""


class Sensitivity:
    """The effects of the ops and modules of a model; `sensitivity` makes and measures it.

    Args:
        probe: measures any cast plan, and knows which parameters are not judged.
        candidates: the ops and modules.
        with_modules: whether modules are measured too.
        timed_steps: steps timed of each op and module and as many for comparison; 0 for no times.
        report: is called before each measurement.
    """

    def __init__(
        self,
        probe: CastProbe,
        candidates: OpCandidates,
        with_modules: bool = True,
        timed_steps: int = 0,
        report: ReportPart = report_nothing,
    ) -> None:
        self.candidates = candidates
        self.probe = probe
        self._timed_steps = timed_steps
        self.unavoidable = probe.unavoidable(candidates.dtype)
        """Everything in float32, with weights of the lower dtype's precision."""
        ops = {n: c for n, c in candidates.ops.items() if n not in candidates.always}
        modules = candidates.modules if with_modules else {}
        plan, share = candidates.plan, self._float32_share
        self.of_ops, self.of_modules = (
            CandidateSearch(probe, movable, report, self.time_ratio)
            for movable in (
                Movable("op", ops, candidates.op_alone, plan, share),
                Movable(
                    *("module", modules, candidates.module_alone),
                    kept=lambda names: plan(modules=names),
                    cost=lambda names: share(modules=names),
                ),
            )
        )
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
        return Fp32List(**vars(kept), lists=self.candidates.lists(kept.names))

    def smallest_modules(self, tolerance: Tolerance = DEFAULT) -> Fp32List:
        """The smallest set of modules in float32 that keeps to the tolerance."""
        kept = self.of_modules.smallest(tolerance.beside(self.unavoidable))
        return Fp32List(**vars(kept), lists=self.candidates.lists())

    def time_ratio(self, plan: CastPlan) -> float | None:
        """Time of a forward and a backward pass under a plan over that with everything lower."""
        if not self._timed_steps:
            return None
        return self.probe.time_ratio(self.candidates.plan(), plan, self._timed_steps)

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

    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype={dtype}: legal are torch.float16, torch.bfloat16")
    passes = Passes(model, loss, batches)
    scales = LOSS_SCALES.get(dtype, (1.0,)) if loss_scales is None else loss_scales
    candidates = op_candidates(model, passes.batches[0][0], dtype, always, arithmetic)
    measured = Sensitivity(
        *(CastProbe(passes, scales), candidates, modules, timed_steps),
        report=lambda text, done=0, total=None: report(text),
    )
    measured.of_ops.measure()
    measured.of_modules.measure()
    return measured
