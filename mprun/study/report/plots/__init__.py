"""The plots of a comparison, each as an SVG for the page and as a PNG. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection

from mprun.study.compare.comparison import Comparison
from mprun.study.report.plots.canvas import Plot
from mprun.study.report.plots.training_plots import losses
from mprun.study.report.plots.verdict_plots import against_time, differences

_PLOTS: dict[str, Callable[[Comparison], Plot | None]] = {
    "metric-time": against_time,
    "difference": differences,
    "loss": losses,
}
NAMES = tuple(_PLOTS)  # Every plot there may be, in the report's order


def draw(comparison: Comparison, names: Collection[str] = NAMES) -> list[Plot]:
    """Those plots of `names` that apply to the comparison, in the report's order."""
    plots = (make(comparison) for name, make in _PLOTS.items() if name in names)
    return [plot for plot in plots if plot is not None]
