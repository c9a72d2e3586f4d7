"""Floating-point exceptions of several processes: each knows all of them, and all respond alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mprun.numerics.nonfinite.fp_exception import FpException
from mprun.parallel.ranks import Ranks


def of_all_processes(ranks: Ranks, own: Iterable[FpException]) -> tuple[FpException, ...]:
    """The exceptions of a step in all processes, each with the number of its process.

    Gradients are summed, so a NaN of one process appears in the others from nowhere. Where one
    process has seen an op, what came from nowhere is left out.
    """
    if ranks.size == 1:
        return tuple(own)
    every = [
        replace(exception, process=number)
        for number, exceptions in enumerate(ranks.gather([*own]))
        for exception in exceptions
    ]
    known = [exception for exception in every if exception.has_op]
    return tuple(known or every)
