"""`fits`: the peak of a step is that of `mprun memory`, and its limit is kept."""

from __future__ import annotations

import pytest

from mprun.inspect.check.check import plan_check
from mprun.inspect.check.check_memory import fits
from mprun.inspect.check.check_result import CheckSettings, Finding
from mprun.inspect.memory import MemorySettings
from mprun.inspect.memory_of_modes import memory_of_modes, plan_modes
from mprun.records.run_record import MEMORY_CATEGORIES

pytestmark = pytest.mark.usefixtures("native_is_fast")

LINEAR = [
    *("recipe=linear", "recipe.model.in_features=4096", "recipe.model.out_features=2048"),
    *("train.batch_size=32", "precision=fp32,bf16_true", "device=cpu"),
]


def found(settings: CheckSettings) -> list[tuple[dict[str, float], list[Finding]]]:
    modes = plan_check(LINEAR, None, settings)
    findings = [[*fits(mode)] for mode in modes]
    return [(mode.checks.figures, own) for mode, own in zip(modes, findings, strict=True)]


def test_its_figures_are_those_of_mprun_memory() -> None:
    planned = plan_modes(LINEAR, None, None)
    memory = memory_of_modes(planned, MemorySettings(picture=False)).record
    for (figures, findings), mode in zip(found(CheckSettings()), memory.modes, strict=True):
        assert figures == {f"{name}_bytes": size for name, size in mode.bytes.items()}
        assert figures["peak_bytes"] == sum(figures[f"{x}_bytes"] for x in MEMORY_CATEGORIES)
        assert findings == []


def test_a_mode_above_the_limit_is_named_with_what_takes_most() -> None:
    (fp32, above), (bf16, below) = found(CheckSettings(memory_gib=0.05))
    assert bf16["peak_bytes"] < 0.05 * 2**30 < fp32["peak_bytes"]
    assert below == []
    (finding,) = above
    assert (finding.kind, finding.severity) == ("over_memory", "error")
    assert " with 32 samples, limit 51.2 MiB: " in finding.text
    assert "parameters 32 MiB" in finding.text
