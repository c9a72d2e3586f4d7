"""What is told of an op that made a number that is not finite: statistics, and why.

Why is found by running the op again in float64 (`replay`): what is finite there was too large for
the dtype, what is infinite or NaN there too is so in any precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mprun._torch import no_dispatch
from mprun.numerics.exceptions.found import FpException, PastOp, TensorStats
from mprun.numerics.exceptions.lines import Line
from mprun.numerics.exceptions.ops import Call
from mprun.numerics.exceptions.tensors import Limits, all_stats, dtype_name, is_plain, stats


class Site(NamedTuple):
    """Where an op runs."""

    phase: str
    module: str
    module_kind: str
    line: Line | None


class Ran(NamedTuple):
    """An op that ran, as it is remembered."""

    name: str
    site: Site
    dtype: torch.dtype | None
    shape: Sequence[int]
    limits: Limits | None


class Made(NamedTuple):
    """A result of an op."""

    name: str
    number: int
    """Which one it is where there are several by the name."""
    tensor: Tensor
    limits: Limits | None
    position: int = 0
    """Which one of all results it is."""


def describe(
    step: int,
    call: Call,
    site: Site,
    bad: Sequence[Made],
    kind: str | None,
    past: Iterable[Ran],
    exact: Tensor | None = None,
) -> FpException:
    """The exception an op raised.

    Args:
        step: in which step.
        call: the op.
        site: where it ran.
        bad: its results that are not finite, or what it met; the first one says what happened.
        kind: what happened, or None to find out.
        past: the ops before.
        exact: what the first of `bad` is in float64; None where that is not known.
    """
    known = None if exact is None else stats(bad[0].name, exact)
    return FpException(
        verdict="absorbed",  # until it is known what became of it
        kind=kind or _kind(call, bad[0], known),
        step=step,
        last_step=step,
        op=call.name,
        phase=site.phase,
        module=site.module,
        module_kind=site.module_kind,
        location=site.line and str(site.line),
        inputs=all_stats(call.inputs(bad[0].number)),
        outputs=tuple(stats(made.name, made.tensor) for made in bad),
        in_float64=known,
        before=tuple(map(past_op, past)),
    )


def _kind(call: Call, made: Made, exact: TensorStats | None) -> str:
    if exact is None:
        if made.limits is not None and made.limits.has_nan:
            return "invalid"
        return "infinite" if _divides_by_zero(call, made) else "overflow"
    if exact.nan:
        return "invalid"
    return "infinite" if exact.inf else "overflow"


def _divides_by_zero(call: Call, made: Made) -> bool:
    """Whether an op that could not be run again is a division, and infinite where it is by 0."""
    if "div" not in call.name:
        return False
    _, divisor, _ = call.inputs(made.number)[-1]
    if not (is_plain(made.tensor) and is_plain(divisor)):
        return False
    with no_dispatch(), torch.no_grad():
        infinite = made.tensor.isinf()
        return bool(infinite.any() and (~infinite | (divisor == 0)).all())


def past_op(ran: Ran) -> PastOp:
    """It as it is recorded."""
    low, high = (None, None) if ran.limits is None else ran.limits
    return PastOp(
        op=ran.name,
        phase=ran.site.phase,
        module=ran.site.module,
        location=ran.site.line and str(ran.site.line),
        dtype=None if ran.dtype is None else dtype_name(ran.dtype),
        shape=tuple(map(int, ran.shape)),
        low=low,
        high=high,
    )
