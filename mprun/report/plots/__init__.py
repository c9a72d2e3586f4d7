"""The plots of a comparison, each as an SVG for the page and as a PNG. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection

from mprun.compare.comparison import Comparison
from mprun.report.plots.canvas import Plot
from mprun.report.plots.series import Logs, read
from mprun.report.plots.training_plots import loss_scales, losses, memory, step_times
from mprun.report.plots.verdict_plots import against_time, differences

_PLOTS: dict[str, Callable[[Comparison, Logs], Plot | None]] = {
    "metric-time": lambda comparison, _: against_time(comparison),
    "difference": lambda comparison, _: differences(comparison),
    "loss": losses,
    "step-time": step_times,
    "memory": lambda comparison, _: memory(comparison),
    "loss-scale": loss_scales,
}
NAMES = tuple(_PLOTS)
"""Every plot there may be, in the report's order."""


def draw(comparison: Comparison, names: Collection[str] = NAMES) -> list[Plot]:
    """Those plots of `names` that apply to the comparison, in the report's order."""
    logs = read(comparison)
    plots = (make(comparison, logs) for name, make in _PLOTS.items() if name in names)
    return [plot for plot in plots if plot is not None]
