"""Checks of what ran elsewhere: a loop that `mprun.observe` recorded, another environment.

*Observed.* The record has losses, not a model that can run again: so its losses must fall by more
than they scatter (Welch's test of their first and last thirds), and beside a baseline of another
machine a loss may differ by the scatter around its neighbours.

*Another environment.* A run of one step is made here; both environments load its checkpoint and
take its step on the same batch, and an error in a module beyond the bound of its dtype, on one side
more than on the other, is a finding, as in `mprun diff`.
"""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import mprun
from mprun.errors import MprunError, RunFailedError, UsageError
from mprun.inspect.check.check import against_baseline, check_result
from mprun.inspect.check.check_baseline import (
    SCHEMA_VERSION,
    Baseline,
    BaselineFigure,
    ModeBaseline,
    read_baseline,
)
from mprun.inspect.check.check_result import CheckSettings, Finding, ModeChecks, kinds
from mprun.inspect.check.checked_mode import CheckedMode
from mprun.inspect.divergence import DifferenceRow
from mprun.inspect.divergence.runs import captured, diff_captures
from mprun.inspect.rounding_oracle import OBSERVED_LEVEL, chance_of_fall, spread_bound
from mprun.records.console.formatting import UNITS, size_text
from mprun.records.result import Result
from mprun.records.run_record import Summary, read_lines, read_summary
from mprun.train.run import run
from mprun.train.signals import StopSignals
from mprun.watch.audit import KINDS

# Overrides of the runs that two environments load: only their checkpoint is used, so little is
# evaluated
ONE_STEP = ("train.max_steps=1", "data.eval_limit=64")


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


# ---- another environment -------------------------------------------------------------------------


def check_environment(
    modes: Sequence[CheckedMode], settings: CheckSettings, python: Sequence[str]
) -> Result:
    """Hold the step of each mode in another environment against this one, module by module.

    Modes are planned with `ONE_STEP`; `python` is the command of the other interpreter.

    Raises:
        UsageError: it cannot be started, or has no mprun.
        RunFailedError: a step fails in one of them.
    """
    began = time.monotonic()
    missing = f"{shlex.join(python)} cannot import mprun (pip install mprun)"
    _ask([*python, "-c", "import mprun"], UsageError, missing)
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, mode in enumerate(modes):
            mode.plan.config.run.dir = f"{temporary}/{number}"
            with StopSignals() as stop:
                summary, folder = run(mode.plan, mode.planned.composed.resolved, stop)
            file = folder / "other.json"
            saved = ["-m", "mprun", "diff", str(folder), "--save", str(file)]
            _ask([*python, *saved], RunFailedError, f"{mode.checks.label} in the other environment")
            difference = diff_captures(captured(folder)[0], captured(file)[0])
            notes += [x for x in difference.notes if x not in notes]
            mode.checks.findings += map(_parted, filter(None, [difference.first]))
            mode.checks.done["agrees"] = time.monotonic() - began
    return check_result(summary, [mode.checks for mode in modes], began, settings, notes)


def _parted(first: DifferenceRow) -> Finding:
    """The first module whose own error is larger in one environment than in the other."""
    there = first.b.arising > first.a.arising
    error, where = (first.b, "there") if there else (first.a, "here")
    text = f"{first.phase}: {where} {error.sentence}"
    return Finding("larger_error", first.module, text, first.op, at=error.arising)


def _ask(command: Sequence[str], failure: type[MprunError], what: str) -> None:
    """Run a command of the other environment; raise `failure` with its last line of stderr."""
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        text = f"{command[0]} cannot be started: {error.strerror}; give the path of a Python"
        raise UsageError(text) from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise failure(f"{what}: {last}") from None


def environment_with(requirement: str) -> list[str]:
    """The command of an interpreter with this mprun and a package of another version.

    uv makes the environment, and has it in its cache afterwards.

    Raises:
        UsageError: there is no uv.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise UsageError(f"--with {requirement} needs uv (pip install uv), or give --python PATH")
    source = Path(mprun.__file__).parent.parent
    is_tree = (source / "pyproject.toml").exists()  # a checkout; its version may not be released
    package = str(source) if is_tree else f"mprun=={mprun.__version__}"
    # --isolated, --no-project: not the packages of a project that the current folder has
    asked = ["--python", sys.executable, "--with", package, "--with", requirement]
    return [uv, "run", "--isolated", "--no-project", "--quiet", *asked, "python"]
