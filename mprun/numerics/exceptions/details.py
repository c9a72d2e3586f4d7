"""What is told of an op that made a number that is not finite: statistics, and why.

Why is found by running the op again in float64: what is finite there was too large for the dtype,
what is infinite or NaN there too is so in any precision. That is possible for most ops; those that
write to their arguments or draw random numbers are left alone, and so are very large ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mprun._torch import no_dispatch
from mprun.numerics.exceptions.found import FpException, PastOp, TensorStats
from mprun.numerics.exceptions.lines import Line
from mprun.numerics.exceptions.ops import Call, spec_of
from mprun.numerics.exceptions.tensors import Limits, all_stats, dtype_name, stats, tensors_in

LARGEST = 2**26
"""Elements of an op's inputs up to which it is run again: half a GiB in float64."""


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


def describe(
    step: int,
    call: Call,
    site: Site,
    bad: Sequence[Made],
    kind: str | None,
    past: Iterable[Ran],
    again: bool = True,
) -> FpException:
    """The exception an op raised.

    Args:
        step: in which step.
        call: the op.
        site: where it ran.
        bad: its results that are not finite, or what it met; the first one says what happened.
        kind: what happened, or None to find out.
        past: the ops before.
        again: whether the op may be run again.
    """
    exact = in_float64(call, bad[0]) if again and kind in (None, "saturated") else None
    return FpException(
        verdict="absorbed",  # until it is known what became of it
        kind=kind or _kind(bad[0].limits, exact),
        step=step,
        last_step=step,
        op=call.name,
        phase=site.phase,
        module=site.module,
        module_kind=site.module_kind,
        location=site.line and str(site.line),
        inputs=all_stats(call.inputs(bad[0].number)),
        outputs=tuple(stats(made.name, made.tensor) for made in bad),
        in_float64=exact,
        before=tuple(map(past_op, past)),
    )


def _kind(made: Limits | None, exact: TensorStats | None) -> str:
    if exact is None:
        return "invalid" if made is not None and made.has_nan else "overflow"
    if exact.nan:
        return "invalid"
    return "infinite" if exact.inf else "overflow"


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


def in_float64(call: Call, made: Made) -> TensorStats | None:
    """The statistics of a result, had the op computed in float64; None where it cannot."""
    spec = spec_of(call.func)
    leaves = [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, Tensor)]
    if not spec.repeatable or spec.listwise or sum(x.numel() for x in leaves) > LARGEST:
        return None
    with no_dispatch(), torch.no_grad():
        try:
            args, kwargs = tree_map(_wide, (call.args, dict(call.kwargs)))
            results = list(tensors_in(call.func(*args, **kwargs)))
        except (RuntimeError, TypeError, ValueError, MemoryError):  # no kernel, or no room for it
            return None
    return stats(made.name, results[made.number])


def _wide(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.double()
    return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x
