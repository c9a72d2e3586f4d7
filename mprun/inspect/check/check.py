"""`mprun check`: does each mode train this recipe as it says, with errors of rounding size alone?

Every mode is compared with float32 from the same weights on the same batches. How large rounding
errors may be is measured on this model, by repeated stochastic roundings at the places where the
mode rounds, and against float64; margins are the same for all models.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mprun.config import compose
from mprun.config.compose import parse
from mprun.config.multirun import combinations
from mprun.errors import EXIT_FAILED, EXIT_OK, EXIT_OPEN, RunFailedError, UsageError, place_of
from mprun.inspect.check.check_agreement import agrees, trains
from mprun.inspect.check.check_baseline import (
    Baseline,
    changes,
    figures_of,
    read_baseline,
    reference_of,
    updated,
)
from mprun.inspect.check.check_ops import dtypes, robust
from mprun.inspect.check.check_result import (
    SCHEMA_VERSION,
    CheckRecord,
    CheckSettings,
    Finding,
    ModeChecks,
    check_parts,
)
from mprun.inspect.check.check_targets import on_targets, target_lines
from mprun.inspect.check.checked_mode import CheckedMode
from mprun.records.console import ReportPart, report_nothing
from mprun.records.console.formatting import UNITS, size_text
from mprun.records.files import json_text, write_atomic
from mprun.records.result import Result
from mprun.records.run_record import Summary
from mprun.study.planned_run import PlannedRun
from mprun.train.assemble import DataCache, make_plan
from mprun.train.assemble.parts import variant_label
from mprun.train.assemble.recipe_loading import given_recipe
from mprun.train.user_code import described

DEFAULT_MODES = "fp32,bf16_mixed,fp16_mixed"
# First parts of keys that float32 does not get: they would change it, or be refused beside fp32
OF_A_MODE = ("precision", "op_lists", "loss_scale", "execution", "speed")
CATEGORIES = 3  # Of memory that a finding names


def fits(mode: CheckedMode) -> Iterator[Finding]:
    """Does a step fit: the peak of memory, counted on fake tensors as `mprun memory` counts it.

    The bytes at the peak are figures, also by category.
    """
    counted, samples = mode.memory, mode.plan.batch.micro
    mode.checks.figures |= {f"{name}_bytes": size for name, size in counted.totals.items()}
    limit = (mode.settings.memory_gib or math.inf) * UNITS["GiB"]
    if counted.peak_bytes <= limit:
        return
    largest = Counter(counted.categories).most_common(CATEGORIES)
    module, own = max(counted.modules.items(), key=lambda x: sum(x[1].values()))
    text = f"{size_text(counted.peak_bytes)} with {samples} samples, limit {size_text(int(limit))}"
    text += f": {', '.join(f'{name} {size_text(size)}' for name, size in largest if size)}; "
    text += f"{module or 'the model'} has the most, {size_text(sum(own.values()))}"
    yield Finding("over_memory", "", text, at=counted.peak_bytes / limit)


# Check to its function, after `trains` and the baseline; the slowest is last, where a short budget
# drops it
STEPS: dict[str, Callable[[CheckedMode], Iterator[Finding]]] = {
    "fits": fits,
    "dtypes": dtypes,
    "robust": robust,
    "agrees": agrees,
}


def plan_check(
    overrides: Sequence[str],
    config_dir: Path | None,
    settings: CheckSettings,
    given: Sequence[Any] | None = None,
) -> list[CheckedMode]:
    """The modes of a check: one for each combination of the listed values.

    `given`: the arguments of `given_recipe`, for a recipe in place of the overrides'.

    Raises:
        UsageError: an override is not legal, or a mode cannot be planned.
    """
    recipe = None
    if given is not None:
        recipe, defaults = given_recipe(*given)
        overrides = [*defaults, *overrides]
    if any(text.startswith("run.resume=") for text in overrides):
        raise UsageError("mprun check starts at new weights: leave out run.resume")
    modes = [x for x in overrides if x.startswith("precision=")] or [f"precision={DEFAULT_MODES}"]
    parsed = [parse(x) for x in [*(x for x in overrides if x not in modes), *modes]]
    cache = DataCache()  # the data are loaded once for all modes

    @functools.cache  # one plan of float32 for all modes: `shared` below is keyed by it
    def planned(*combination: str) -> PlannedRun:
        composed = compose(combination, config_dir)
        plan = make_plan(composed.config, composed.given, load=cache, recipe=recipe)
        return PlannedRun("check", composed, plan)

    checked, shared = [], defaultdict[int, dict[Any, Any]](dict)
    for combination in combinations(parsed):
        run, exact = planned(*combination), planned(*_in_float32(combination)).plan
        checks = ModeChecks(variant_label(run.plan), run.plan.policy.name)
        checked.append(CheckedMode(run, exact, settings, checks, shared[id(exact)]))
    return checked


def _in_float32(combination: Sequence[str]) -> list[str]:
    """The overrides of the same recipe in float32."""
    keys = [(text, parse(text).key_or_group.partition(".")[0]) for text in combination]
    return [*(text for text, key in keys if key not in OF_A_MODE), "precision=fp32"]


def check_modes(
    modes: Sequence[CheckedMode],
    settings: CheckSettings,
    update: bool = False,
    report: ReportPart = report_nothing,
) -> Result:
    """Check each mode; the status of the result is 1 where there is an error.

    `update` writes the baseline instead of comparing with it.
    """
    began, new = time.monotonic(), list[Baseline]()
    old = read_baseline(Path(settings.baseline))

    def baseline(mode: CheckedMode) -> Iterator[Finding]:
        if not new:  # the float64 reference is the same for all modes
            new.append(reference_of(mode))
        new[0].modes[mode.checks.label] = figures_of(mode)
        yield from ()

    compared = {"baseline": baseline} if update or old is not None else {}
    answered = {"targets": on_targets} if settings.targets else {}
    examined = {"trains": trains, **compared, **STEPS, **answered}
    for done, mode in enumerate(modes):
        # a mode that ends early leaves its time to those after it
        mode.ends = began + settings.budget_s * (done + 1) / len(modes)
        for n, (name, examine) in enumerate(examined.items()):
            part = done * len(examined) + n
            report(f"checking {mode.checks.label}: {name}", part, len(modes) * len(examined))
            _carry_out(mode, name, examine)
        vars(mode).pop("passes", None)  # two models, which later modes do not need
    checks = [mode.checks for mode in modes]
    notes = [*target_lines(settings.targets, checks)]
    if settings.fast:
        notes.append("check.fast=true leaves out the curve of agrees")
    if new:
        notes += against_baseline(checks, settings, old, new[0], update)
    elif not compared:
        text = "--update writes the one that later checks are compared with"
        notes.append(f"no {settings.baseline} here: {text}")
    return check_result(modes[0].planned.summary, checks, began, settings, notes)


def against_baseline(
    modes: Sequence[ModeChecks],
    settings: CheckSettings,
    old: Baseline | None,
    new: Baseline,
    update: bool,
) -> list[str]:
    """Add what changed to the findings, or write the file; notes about it."""
    path = Path(settings.baseline)
    if update:
        write_atomic(path, updated(old, new).text.encode())
        return [f"written: {path}; commit it"]
    for mode in modes:
        if old is not None and mode.label in new.modes:
            mode.findings += changes(old, new, mode.label)
    return []


def check_result(
    summary: Summary,
    modes: list[ModeChecks],
    began: float,
    settings: CheckSettings,
    notes: list[str],
) -> Result:
    """The result of checks that began at this time (`time.monotonic`); `summary`: of a mode."""
    about = summary.recipe, summary.hardware.name, summary.versions
    seconds = time.monotonic() - began
    record = CheckRecord(SCHEMA_VERSION, *about, seconds, settings.budget_s, modes, notes)
    status = EXIT_OPEN if record.is_open and settings.strict else EXIT_OK
    status = EXIT_FAILED if record.has_errors else status
    files = {"check.json": json_text(record)}
    return Result(record, list(check_parts(record)), files, status=status)


def _carry_out(
    mode: CheckedMode, name: str, examine: Callable[[CheckedMode], Iterator[Finding]]
) -> None:
    began, checks = time.monotonic(), mode.checks
    failed = [x for x in checks.findings if x.kind == "step_fails"]
    failed += [] if failed else mode.once("failure", lambda: [*_failure_in_float32(mode)])
    if failed and failed[0] not in checks.findings:
        checks.findings.append(failed[0])
    if failed:
        checks.not_done[name] = "the step fails"
        return
    if mode.left_s <= 0:
        checks.not_done[name] = f"check.budget_s={mode.settings.budget_s:g} was used up"
        return
    try:
        with mode.planned.executing():
            findings = list(examine(mode))
    except RunFailedError as error:
        if name != "trains":
            checks.not_done[name] = str(error)
            return
        findings = [_step_fails(error, mode.plan.policy.name, "; float32's step runs")]
    checks.findings += sorted(findings, key=lambda x: x.rank)
    if name not in checks.not_done:  # a check may itself run out of time
        checks.done[name] = time.monotonic() - began


def _failure_in_float32(mode: CheckedMode) -> Iterator[Finding]:
    """The error of float32's first step, which no mode can do without."""
    try:
        with mode.planned.executing():
            mode.losses(1, exact=True)
    except RunFailedError as error:
        yield _step_fails(error, "", "; in float32 too")


def _step_fails(error: RunFailedError, mode: str, end: str) -> Finding:
    cause = error.__cause__
    place, text = (None, str(error)) if cause is None else (place_of(cause), described(cause, mode))
    line = "" if place is None else str(place)
    return Finding("step_fails", "", text.replace(f" ({line})", "") + end, line=line)
