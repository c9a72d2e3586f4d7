"""An estimate of a step on several processes: computation measured here, links by their data sheet.

Processes form a ring. With n of them, an all-gather or a reduce-scatter of B bytes sends
(n - 1) / n x B from each process, and an all-reduce, which is one of each, twice as much:

    DDP      2 (n - 1) / n x gradients                            once in a step
    FSDP2    (n - 1) / n x (2 x parameters + gradients)           for each micro-batch

Parameters have the dtype of the computation, gradients that of the reduction. How much of it runs
beside the computation depends on model and machine, so the answer is a range: from all, as far as
the computation is long enough, to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mprun.records.data_sheets import LINK_BANDWIDTHS
from mprun.results.estimates import LinkEstimate, ScalingEstimate
from mprun.results.memory_result import ParallelKind

ENOUGH = 0.2
"""The share of a sequential step that communication may take."""
ASSUMPTIONS = (
    "links reach their published rates, without latency; each process has a link of its own and "
    "computes as {compute} here; a ring sends {formula}; from full overlap of communication and "
    "computation to none"
)
FORMULAS: dict[ParallelKind, str] = {
    "ddp": "2(n-1)/n x gradients",
    "fsdp2": "(n-1)/n x (2 x parameters + gradients) for each micro-batch",
}


def sent_bytes(
    parallel: ParallelKind,
    world_size: int,
    parameter_bytes: int,
    gradient_bytes: int,
    micro_batches: int = 1,
) -> int:
    """Bytes that each process sends in a step.

    Args:
        parallel: how the processes share the step.
        world_size: their number n.
        parameter_bytes: of all parameters as they are gathered.
        gradient_bytes: of all gradients as they are reduced.
        micro_batches: of a step.
    """
    if parallel == "ddp":
        return 2 * (world_size - 1) * gradient_bytes // world_size
    gathered = 2 * parameter_bytes + gradient_bytes
    return micro_batches * (world_size - 1) * gathered // world_size


def estimate_scaling(
    *,
    parallel: ParallelKind,
    world_size: int,
    compute_ms: float,
    compute_from: Literal["measured step", "least time"],
    gather_dtype: str | None,
    reduce_dtype: str,
    nbytes: int,
    links: Sequence[str],
) -> ScalingEstimate:
    """The estimate for each link.

    Args:
        parallel: how the processes share the step.
        world_size: their number.
        compute_ms: a step of a single process.
        compute_from: what that is.
        gather_dtype: of gathered parameters, None for ddp.
        reduce_dtype: of gradients that are averaged.
        nbytes: what each process sends in a step.
        links: names in `LINK_BANDWIDTHS`.
    """
    # share = c / (c + compute) = ENOUGH, for the time c of the communication
    enough = nbytes / 1e6 / (compute_ms * ENOUGH / (1 - ENOUGH))
    fast = {
        link.gigabytes_per_second: name
        for name, link in LINK_BANDWIDTHS.items()
        if link.gigabytes_per_second >= enough
    }
    return ScalingEstimate(
        estimate=True,
        world_size=world_size,
        parallel=parallel,
        compute_ms=compute_ms,
        compute_from=compute_from,
        gather_dtype=gather_dtype,
        reduce_dtype=reduce_dtype,
        sent_bytes=nbytes,
        links=[_link(name, nbytes, compute_ms) for name in dict.fromkeys(links)],
        enough_gigabytes_per_second=enough,
        enough_link=fast[min(fast)] if fast else None,
        assumptions=ASSUMPTIONS.format(
            compute="measured"
            if compute_from == "measured step"
            else "fast as the roofline allows",
            formula=FORMULAS[parallel],
        ),
    )


def _link(name: str, nbytes: int, compute_ms: float) -> LinkEstimate:
    bandwidth, source = LINK_BANDWIDTHS[name]
    communication_ms = nbytes / (bandwidth * 1e6)
    sequential_ms = compute_ms + communication_ms
    return LinkEstimate(
        link=name,
        gigabytes_per_second=bandwidth,
        source=source,
        communication_ms=communication_ms,
        overlapped_ms=max(compute_ms, communication_ms),
        sequential_ms=sequential_ms,
        share=communication_ms / sequential_ms,
    )
