"""The quantities of a comparison: what the arithmetic adds to what training leaves open, verdicts.

    added    rms over seeds of |mode - float64| by the run's weights, over the spread over seeds

The spread is the root mean square, over a quantity's entries, of the standard deviation over the
baseline's seeds: two trainings of one model differ by so much, whatever the precision. It is known
where all of them were evaluated on the same samples. A verdict is of the error against the truth,
where the recipe knows it, else of the value, in pairs of equal seed, as that of the metric is; the
tests of all quantities and variants are one family.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

from mprun.records.run_record import QuantityRow
from mprun.study.compare.comparison import Estimate, QuantityVerdict
from mprun.study.compare.load import RunGroup


def rows_of(group: RunGroup, name: str) -> dict[int, QuantityRow]:
    """Seed to the row of a quantity."""
    rows = {seed: s.quantities.get(name) for seed, s in group.by_seed.items()}
    return {seed: row for seed, row in rows.items() if row is not None}


def judged_figures(group: RunGroup, name: str) -> dict[int, float]:
    """Seed to what is judged: the error against the truth, else the value."""
    rows = rows_of(group, name).items()
    return {seed: float(row.value if row.error is None else row.error) for seed, row in rows}


def spread(rows: Sequence[QuantityRow]) -> float | None:
    """The spread over seeds; None for one seed, and where samples differ."""
    kinds = {(row.samples_crc, len(row.entries)) for row in rows}
    if len(rows) < 2 or len(kinds) != 1:
        return None
    columns = zip(*([float(x) for x in row.entries] for row in rows), strict=True)
    value = math.sqrt(fmean(variance(column) for column in columns))
    return value if math.isfinite(value) else None


def added(rows: Sequence[QuantityRow], left_open: float | None) -> float | None:
    """What the arithmetic of a variant adds, as a share of the spread over seeds."""
    errors = [
        float(row.arithmetic_error) * math.sqrt(fmean(float(x) ** 2 for x in row.entries))
        for row in rows
        if row.arithmetic_error is not None
    ]
    return math.sqrt(fmean(x * x for x in errors)) / left_open if errors and left_open else None


def unjudged(group: RunGroup, name: str, left_open: float | None) -> QuantityVerdict:
    """A row without a verdict, such as the baseline's."""
    rows, figures = [*rows_of(group, name).values()], judged_figures(group, name)
    finite = [x for x in figures.values() if math.isfinite(x)]
    return QuantityVerdict(
        quantity=name,
        variant=group.label,
        precision=group.first.summary.precision,
        is_error=any(row.error is not None for row in rows),
        figure=Estimate(fmean(finite), None, len(finite)) if finite else None,
        added=added(rows, left_open),
        seeds=len(rows),
        margin=0.0,
    )
