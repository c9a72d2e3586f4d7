"""What `mprun doctor check` found, on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from mprun.console.fitted_table import FittedTable, figure_column, text_column
from mprun.records.kernel_check_record import KernelCheck


def check_parts(check: KernelCheck) -> Iterator[FittedTable | str]:
    """The parts in the order they are shown; the answer comes first."""
    yield check.answer
    if check.faults:
        table = FittedTable(
            "results that the dtype does not explain",
            *map(text_column, ("layer", "phase", "op", "dtype", "problem")),
            figure_column("error"),
            figure_column("usual error"),
            elsewhere="the output of doctor.json=true",
        )
        for fault in check.faults:
            error = "-" if fault.error is None else f"{fault.error:.2g}"
            table.add_row(*fault[:5], error, f"{fault.usual:.2g}")
        yield table
    for missing in check.missing:
        yield f"{missing.layer} in {missing.dtype} is not there: {missing.reason}"
