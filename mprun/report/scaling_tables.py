"""The estimate of a step on several processes, on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.scaling_record import LinkEstimate, ScalingEstimate


def scaling_parts(scaling: ScalingEstimate) -> Iterator[FittedTable | str]:
    """The parts in the order they are shown."""
    table = FittedTable(
        f"ESTIMATE: a step on {scaling.world_size} processes, {scaling.parallel}",
        text_column("link"),
        figure_column("GB/s", 3),
        figure_column("communication ms"),
        figure_column("share", 1),
        figure_column("step ms"),
        figure_column("speedup", 2),
        elsewhere="the output of doctor.json=true",
    )
    for link in scaling.links:
        table.add_row(*_row(link, scaling))
    yield table
    dtypes = f"gradients in {scaling.reduce_dtype}"
    if scaling.gather_dtype is not None:
        dtypes = f"parameters in {scaling.gather_dtype}, {dtypes}"
    enough = scaling.enough_link or "no link of the table"
    yield (
        f"each process computes {scaling.compute_ms:.3g} ms ({scaling.compute_from}) and sends "
        f"{scaling.sent_bytes / 1e6:,.3g} MB a step ({dtypes}); without overlap, communication "
        f"takes less than 20 % of a step above {scaling.enough_gigabytes_per_second:.3g} GB/s "
        f"({enough})"
    )
    yield f"ESTIMATE, not measured: {scaling.assumptions}"


def _row(link: LinkEstimate, scaling: ScalingEstimate) -> tuple[str, ...]:
    def speedup(step_ms: float) -> str:
        return f"{scaling.world_size * scaling.compute_ms / step_ms:.3g}"

    return (
        link.link,
        f"{link.gigabytes_per_second:.4g}",
        f"{link.communication_ms:.3g}",
        f"{100 * link.share:.0f} %",
        _between(f"{link.overlapped_ms:.3g}", f"{link.sequential_ms:.3g}"),
        _between(speedup(link.sequential_ms), speedup(link.overlapped_ms)),
    )


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low}-{high}"
