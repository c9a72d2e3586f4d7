"""Check of a loop that `mprun.observe` recorded.

The record has losses, not a model that can run again: so its losses must fall by more than they
scatter (Welch's test of their first and last thirds), and beside a baseline of another machine a
loss may differ by the scatter around its neighbours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from mprun.errors import UsageError
from mprun.inspect.check.check import against_baseline, check_result
from mprun.inspect.check.check_baseline import (
    SCHEMA_VERSION,
    Baseline,
    BaselineFigure,
    ModeBaseline,
    read_baseline,
)
from mprun.inspect.check.check_result import CheckSettings, Finding, ModeChecks, kinds
from mprun.inspect.rounding_oracle import OBSERVED_LEVEL, chance_of_fall, spread_bound
from mprun.records.console.formatting import UNITS, size_text
from mprun.records.result import Result
from mprun.records.run_record import Summary, read_lines, read_summary
from mprun.watch.audit import KINDS


def check_observed(folder: Path, settings: CheckSettings, update: bool) -> Result:
    """Judge what `mprun.observe` left in a folder.

    Raises:
        UsageError: it is no such record.
    """
    began = time.monotonic()
    summary = read_summary(folder)
    if not summary.observed:
        raise UsageError(f"{folder} is a run of mprun: check its recipe, mprun check recipe=...")
    steps = [x for x in read_lines(folder) if x.get("kind") == "step"]
    losses = [float(x["loss"]) for x in steps if x.get("loss") is not None]
    checks = ModeChecks(summary.variant, summary.precision)
    checks.findings += [*_trained(summary, losses), *_audited(summary)]
    checks.done = dict.fromkeys(("trains", "dtypes"), 0.0)
    why = "a record has no model: mprun check recipe=... takes its steps"
    checks.not_done = dict.fromkeys(("agrees", "robust"), why)
    peak = {k: x for k, x in vars(summary.memory_bytes).items() if isinstance(x, int)}
    limit = (settings.memory_gib or math.inf) * UNITS["GiB"]
    if not peak.get("peak"):
        checks.not_done["fits"] = "the loop was observed without memory=True"
    else:
        checks.done["fits"] = 0.0
        if peak["peak"] > limit:
            text = f"{size_text(peak['peak'])}, limit {size_text(int(limit))}"
            checks.findings.append(Finding("over_memory", "", text))
    new = _observed_baseline(summary, losses, peak)
    old = read_baseline(Path(settings.baseline))
    notes = against_baseline([checks], settings, old, new, update)
    return check_result(summary, [checks], began, settings, notes)


def _trained(summary: Summary, losses: Sequence[float]) -> Iterator[Finding]:
    bad = [text for text in summary.warnings if "is not finite" in text]
    bad += [f"a logged loss is {x}" for x in losses if not math.isfinite(x)]
    if bad:
        yield Finding("not_finite", "", bad[0])
    elif summary.status != "completed":
        yield Finding("step_fails", "", f"{summary.status}: {summary.error}")
    elif (chance := chance_of_fall(losses)) > OBSERVED_LEVEL:
        third = len(losses) // 3
        text = f"logged losses: {len(losses)}, needed: 6; run.log(loss=loss)"
        if third > 1:
            first, last = fmean(losses[:third]), fmean(losses[-third:])
            text = f"{first:.4g} to {last:.4g} over {len(losses)} steps, by chance {chance:.0%}"
        yield Finding("loss_does_not_fall", "", text)


def _audited(summary: Summary) -> Iterator[Finding]:
    """The audit's findings, which the record has as warnings."""
    for text in summary.warnings:
        kind, _, rest = text.partition(" ")
        module, _, message = rest.partition(": ")
        if kind in KINDS and (kind in kinds() or kind.endswith("_in_16_bits")):
            yield Finding(kind if kind in kinds() else "stored_in_16_bits", module, message)
    if summary.requested != summary.effective:
        yield Finding("substituted", "", f"{summary.precision} was asked for")


def _observed_baseline(summary: Summary, losses: list[float], peak: dict[str, int]) -> Baseline:
    differences = [abs(x - y) for x, y in pairwise(losses)] or [0.0]
    scatter = median(differences)  # robust to the fall itself
    bound = spread_bound([scatter] * len(differences), 0.0)
    mode = ModeBaseline([BaselineFigure(x, bound) for x in losses[:8]], peak_bytes=peak)
    machine = f"{summary.hardware.name}, {summary.backend.threads} threads"
    modes = {summary.variant: mode}
    return Baseline(SCHEMA_VERSION, summary.recipe, machine, summary.versions, modes=modes)
