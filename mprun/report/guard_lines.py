"""What a run says at its end about the products that its guard found."""

from __future__ import annotations

import shlex
from pathlib import Path

from mprun.console.formatting import counted
from mprun.records.run_folder import GUARD_LAYERS
from mprun.records.run_record import GuardedGemm, GuardRow, Summary

NAMED = 5
"""Layers that are named; guard_layers.yaml has all."""


def guard_lines(summary: Summary, folder: Path) -> list[str]:
    """A sentence with the layers and their products, and one with the file; none without a guard.

    Args:
        summary: of the run that ended.
        folder: the run's.
    """
    guard = summary.guard
    if guard is None:
        return []
    if not guard.gemms:
        return ["guard: no product passed a threshold"]
    layers = _by_module(guard)
    named = [f"{name} ({', '.join(map(_times, rows))})" for name, rows in layers.items()]
    more = f", and {len(named) - NAMED} more layers" if len(named) > NAMED else ""
    file = shlex.quote(f"precision.layers_file={folder / GUARD_LAYERS}")
    found = f"{counted(len(guard.gemms), 'product')} of {counted(len(layers), 'layer')}"
    what = f"promoted {found}" if guard.action == "promote" else f"{found} passed a threshold"
    return [
        f"guard: {what}: {', '.join(named[:NAMED])}{more}",
        f"{file}, in place of precision.layers, keeps them in bfloat16",
    ]


def _by_module(guard: GuardRow) -> dict[str, list[GuardedGemm]]:
    layers: dict[str, list[GuardedGemm]] = {}
    for gemm in guard.gemms:
        layers.setdefault(gemm.module, []).append(gemm)
    return layers


def _times(gemm: GuardedGemm) -> str:
    return f"{gemm.product} in {counted(gemm.steps, 'step')}"
