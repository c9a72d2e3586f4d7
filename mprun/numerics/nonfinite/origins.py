"""Which op made a number that is not finite.

An op that makes such a number out of finite ones is its origin. There are two exceptions:

    constants     an infinity among the op's own numbers, as in `masked_fill(mask, -inf)`: the
                  program wrote it
    consequences  a result of inputs that are not finite has the inputs' origins; inputs that were
                  not finite before the first op are from outside

A NaN made of constants alone, as by the softmax of a row that is masked whole, is a new origin.

The kind of an exception is decided by running the op again in float64: a number that is finite
there was too large for the dtype; one that is infinite or NaN there too is so in any precision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from math import inf, isfinite

import torch
from torch import Tensor

from mprun._torch import no_dispatch
from mprun.numerics.nonfinite.fp_exception import FpException, PastOp, TensorStats
from mprun.numerics.nonfinite.nonfinite_watcher import OpSite
from mprun.numerics.nonfinite.op_call import (
    OpCall,
    ValueRange,
    is_finite,
    is_plain,
    op_spec,
    recomputed,
    stats,
    value_range,
)
from mprun.numerics.nonfinite.shadow import (
    BothResults,
    Lineage,
    OpResult,
    Origin,
    ShadowValues,
    mark_reached,
)
from mprun.precision.policy import dtype_name

PAST = 20
"""Ops before an exception that are reported with it."""

DESCRIBED = 16
"""Inputs of one op that are described."""

LOW = (torch.float16, torch.bfloat16)


class OriginFinder:
    """Finds the origins of one step after another.

    Args:
        saturates: whether results clamped to a 16-bit dtype's largest number count.
        name: returns the name of a tensor that existed before the first op, None if it has none.
    """

    def __init__(self, saturates: bool, name: Callable[[Tensor], str | None]) -> None:
        self.lineage = Lineage()
        self.new: list[Origin] = []
        """Those of the step, in order."""
        self._shadow = ShadowValues()
        self._name = name
        self._past: deque[Callable[[], PastOp]] = deque(maxlen=PAST)
        """Descriptions of the ops that ran last; few are needed, and each takes time."""
        self._saturates = saturates
        self._step = 0
        self._went_backward = False

    @property
    def past(self) -> tuple[PastOp, ...]:
        """The ops that ran last."""
        return tuple(described() for described in self._past)

    def begin_step(self, step: int) -> None:
        """Step number `step` begins."""
        self._step, self.new, self._went_backward = step, [], False
        self.lineage.forget_dead()
        self._shadow.clear()

    def inspect(self, call: OpCall, site: OpSite) -> None:
        """Inspect the results of an op."""
        outputs = enumerate(call.outputs())
        results = [OpResult(name, i, x, value_range(x), p) for p, (name, i, x) in outputs]
        both = self._shadow.follow(call, site, results)
        bad = [result for result in results if not is_finite(result.range)]
        if bad:
            self._add_bad(call, site, bad, both)
        if self._saturates:
            for result in results:
                self._check_saturated(call, site, result)
        if results:
            x, measured = results[0].tensor, results[0].range
            self._past.append(partial(_past_op, call.name, site, x.dtype, x.shape, measured))
        if site.phase in ("forward", "backward"):
            self._went_backward = site.phase == "backward"

    def add(self, exception: FpException, x: Tensor) -> Origin:
        """The origin of a tensor that was written to by something else than an op."""
        origin = self._add(exception)
        self.lineage.put(x, [origin])
        return origin

    def _add(self, exception: FpException) -> Origin:
        origin = Origin(exception)
        self.new.append(origin)
        return origin

    def _add_bad(
        self, call: OpCall, site: OpSite, bad: list[OpResult], both: BothResults | None
    ) -> None:
        listwise = op_spec(call.func).listwise

        def index(result: OpResult) -> int:  # with lists, each index is an op of its own
            return result.number if listwise else 0

        for _, group in groupby(sorted(bad, key=index), key=index):
            together = list(group)
            origins = self._origins(call, site, together, both)
            for result in together:
                self.lineage.put(result.tensor, origins)
                if site.phase == "other" and result.tensor.numel() == 1:
                    after = "a scalar computed after the backward pass"
                    mark_reached(origins, after if self._went_backward else "the loss")

    def _origins(
        self, call: OpCall, site: OpSite, bad: list[OpResult], both: BothResults | None
    ) -> frozenset[Origin]:
        origins: set[Origin] = set()
        was_nan = False
        for name, x, known in call.inputs(bad[0].number):
            given = known or value_range(x)
            if given is not None and not given.finite:
                origins |= self.lineage.of(x) or {self._from_outside(call, site, name, x)}
                was_nan |= given.has_nan
        if both is not None:
            origins = _to_blame(origins, bad, both)
        constants = all(origin.exception.kind == "constant" for origin in origins)
        makes_nan = not was_nan and any(result.range.has_nan for result in bad if result.range)
        if origins and not (constants and makes_nan):
            return frozenset(origins)
        written = not origins and not all(map(isfinite, call.numbers()))
        return frozenset({self._new_origin(call, site, bad, "constant" if written else None)})

    def _from_outside(self, call: OpCall, site: OpSite, name: str, x: Tensor) -> Origin:
        label = self._name(x) or f"a tensor ({name} of {call.name})"
        read = [OpResult(label, 0, x, value_range(x))]
        origin = self._new_origin(call, site, read, "outside")
        self.lineage.put(x, [origin])
        return origin

    def _new_origin(
        self, call: OpCall, site: OpSite, bad: list[OpResult], kind: str | None
    ) -> Origin:
        exact = recomputed(call) if kind is None else None
        first = None if exact is None else exact[bad[0].position]
        origin = self._add(self._described(call, site, bad, kind, first))
        origin.upward = any(x.range and (x.range.has_nan or x.range.high == inf) for x in bad)
        if kind is not None:
            return origin
        if exact is None or site.phase == "optimizer":
            if origin.exception.kind == "overflow":
                origin.leave_unchecked()
            return origin
        for result in bad:
            right = exact[result.position]
            if _differs(result, right) and not self._shadow.begin(result.tensor, right, origin):
                origin.leave_unchecked()
        return origin

    def _check_saturated(self, call: OpCall, site: OpSite, result: OpResult) -> None:
        """Whether a result was clamped: the largest number of its dtype, made of none such."""
        dtype = result.tensor.dtype
        if not at_largest(dtype, result.range):
            return
        largest = torch.finfo(dtype).max
        inputs = call.inputs(result.number)
        given = [known or value_range(x) for _, x, known in inputs if x.dtype == dtype]
        moved = any(at_largest(dtype, measured) for measured in given)
        if moved or any(abs(x) >= largest for x in call.numbers()):
            return
        results = recomputed(call)
        exact = None if results is None else results[result.position]
        size = None if exact is None else stats(result.name, exact).max_abs
        if size is None or size > largest:  # else it is that large
            self._add(self._described(call, site, [result], "saturated", exact))

    def _described(
        self,
        call: OpCall,
        site: OpSite,
        bad: Sequence[OpResult],
        kind: str | None,
        exact: Tensor | None,
    ) -> FpException:
        """The exception that an op raised.

        Args:
            call, site: the op, and where it ran.
            bad: its results that are not finite, or the input that is not; the first one decides.
            kind: what happened, or None to decide here.
            exact: the first of `bad` in float64; None if that is not known.
        """
        known = None if exact is None else stats(bad[0].name, exact)
        return FpException(
            verdict="absorbed",  # until its consequences are known
            kind=kind or _kind(call, bad[0], known),
            step=self._step,
            last_step=self._step,
            op=call.name,
            phase=site.phase,
            module=site.module,
            module_kind=site.module_kind,
            location=site.line and str(site.line),
            inputs=tuple(stats(*x) for x in call.inputs(bad[0].number)[:DESCRIBED]),
            outputs=tuple(stats(result.name, result.tensor) for result in bad),
            in_float64=known,
            before=self.past,
        )


def _past_op(
    name: str, site: OpSite, dtype: torch.dtype, shape: Sequence[int], measured: ValueRange | None
) -> PastOp:
    where = name, site.phase, site.module, site.line and str(site.line)
    return PastOp(*where, dtype_name(dtype), tuple(map(int, shape)), *(measured or (None, None)))


def at_largest(dtype: torch.dtype, measured: ValueRange | None) -> bool:
    """Whether a 16-bit tensor contains the largest number of its dtype."""
    return measured is not None and dtype in LOW and measured.size == torch.finfo(dtype).max


def _kind(call: OpCall, result: OpResult, exact: TensorStats | None) -> str:
    if exact is not None:
        return "invalid" if exact.nan else "infinite" if exact.inf else "overflow"
    if result.range is not None and result.range.has_nan:
        return "invalid"
    return "infinite" if _divides_by_zero(call, result) else "overflow"


def _divides_by_zero(call: OpCall, result: OpResult) -> bool:
    """Whether an op without a float64 result is a division, and infinite only where it is by 0."""
    if "div" not in call.name:
        return False
    _, divisor, _ = call.inputs(result.number)[-1]
    if not (is_plain(result.tensor) and is_plain(divisor)):
        return False
    with no_dispatch(), torch.no_grad():
        infinite = result.tensor.isinf()
        return bool(infinite.any() and (~infinite | (divisor == 0)).all())


def _differs(result: OpResult, exact: Tensor) -> bool:
    """Whether float64 has a number where the dtype has none, or this cannot be compared."""
    if not is_plain(result.tensor):
        return True
    with no_dispatch():
        return bool((~torch.isfinite(result.tensor) & torch.isfinite(exact)).any())


def _to_blame(origins: set[Origin], bad: list[OpResult], both: BothResults) -> set[Origin]:
    """Those origins of an op's inputs that made its `bad` results; none if the op itself did."""
    blamed: set[Origin] = set()
    for result in bad:
        if not is_plain(result.tensor):
            blamed |= origins | both.origins
            continue
        with no_dispatch():
            real, exact = (torch.isfinite(x[result.position]) for x in (both.real, both.exact))
            spoiled = ~torch.isfinite(result.tensor) & ~real
            by_overflow, anyway = bool((spoiled & exact).any()), bool((spoiled & ~exact).any())
        if by_overflow:
            blamed |= both.origins
        if anyway:
            blamed |= origins - both.origins or origins
    return blamed
