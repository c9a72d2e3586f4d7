"""What a run's guard of matrix products found, as `precision.layers` for the next run. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from mprun.records.layer_values import layers_file, with_high_products
from mprun.records.run_record import Summary


def guard_layers(summary: Summary) -> str | None:
    """The text of guard_layers.yaml; None where the guard found nothing.

    It has the run's own `precision.layers` too, so that it replaces them.
    """
    guard, row = summary.guard, summary.requested
    if guard is None or not guard.gemms:
        return None
    high: dict[str, list[str]] = {}
    for gemm in guard.gemms:
        high.setdefault(gemm.module, []).append(gemm.product)
    found = {
        module: with_high_products(_value(module, row.layers, row.gemms), products)
        for module, products in high.items()
    }
    head = (
        f"Products that passed a threshold of debug.guard={guard.action} in {summary.variant}, "
        "in bfloat16.\n"
        f"For precision={summary.precision} precision.layers_file=THIS_FILE"
    )
    return layers_file(head, {**row.layers, **found})


def _value(module: str, layers: Mapping[str, str], mode: str) -> str:
    """The formats of a layer: its own, those of the module around it, or the mode's."""
    inside = [name for name in layers if module == name or module.startswith(f"{name}.")]
    return layers[max(inside, key=len)] if inside else mode
