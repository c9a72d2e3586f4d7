"""Checks of what ran elsewhere: a loop that `mprun.observe` recorded, another environment.

*Observed.* The record has losses, not a model that can run again: so its losses must fall by more
than they scatter (Welch's test of their first and last thirds), and a baseline on another machine
explains a loss by the scatter around its neighbours.

*Another environment.* A run of one step is made here; both environments load its checkpoint and
take its step on the same batch, and an error in a module that its dtype does not explain, on one
side more than on the other, is a finding, as in `mprun diff`.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, variance

from scipy.special import stdtr

import mprun
from mprun.config import compose
from mprun.config.compose import parse
from mprun.config.multirun import combinations
from mprun.config.recipe_file import as_text, quoted
from mprun.console.formatting import UNITS, size_text
from mprun.doctor import machine
from mprun.errors import RunFailedError, UsageError
from mprun.experiments.planned_run import plan_or_resume
from mprun.inspect.baseline_figures import explained
from mprun.inspect.check import check_result, with_modes
from mprun.inspect.diff import capture_run, diff_captures, load_run, read_capture
from mprun.records.files import write_atomic
from mprun.records.run_record import Summary, read_lines, read_summary
from mprun.results import Result
from mprun.results.check_baseline import (
    SCHEMA_VERSION,
    Baseline,
    BaselineFigure,
    ModeBaseline,
    changes,
    read_baseline,
    updated,
)
from mprun.results.check_result import CheckSettings, Finding, ModeChecks
from mprun.run import run
from mprun.train.signals import StopSignals

FALLS_BY_CHANCE = 1e-3
"""The chance at which losses without a trend pass as falling."""
OF_AUDIT = {
    "lost_update": "lost_update",
    "loaded_in_16_bits": "stored_in_16_bits",
    "norm_in_16_bits": "stored_in_16_bits",
    "embedding_in_16_bits": "stored_in_16_bits",
    "state_in_16_bits": "stored_in_16_bits",
}
"""Findings of the audit, which the record has as warnings, to those of a check."""


def check_observed(folder: Path, settings: CheckSettings, update: bool) -> Result:
    """Judge what `mprun.observe` left in a folder.

    Args:
        folder: the record.
        settings: of the check.
        update: write the baseline instead of comparing with it.

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
    checks.done |= {"trains": 0.0, "dtypes": 0.0}
    peak = {k: int(v) for k, v in vars(summary.memory_bytes).items() if isinstance(v, int)}
    if peak.get("peak"):
        limit = (settings.memory_gib or math.inf) * UNITS["GiB"]
        if peak["peak"] > limit:
            text = f"{size_text(peak['peak'])}, limit {size_text(int(limit))}"
            checks.findings.append(Finding("over_memory", "", text))
        checks.done["fits"] = 0.0
    else:
        checks.not_done["fits"] = "the loop was observed without memory=True"
    for name in ("agrees", "robust"):
        checks.not_done[name] = "a record has no model: mprun check recipe=... takes its steps"
    path = Path(settings.baseline)
    old, notes = read_baseline(path), []
    new = _observed_baseline(summary, losses, peak)
    if update:
        write_atomic(path, updated(old, new).text.encode())
        notes.append(f"written: {path}; commit it")
    elif old is not None:
        checks.findings += changes(old, new, summary.variant)
        checks.done["baseline"] = 0.0
    about = summary.recipe, summary.hardware.name, summary.versions
    return check_result(*about, [checks], began, settings, notes)


def _trained(summary: Summary, losses: Sequence[float]) -> Iterator[Finding]:
    if bad := [text for text in summary.warnings if "is not finite" in text]:
        yield Finding("not_finite", "", bad[0])
    elif not all(map(math.isfinite, losses)):
        yield Finding("not_finite", "", "a logged loss")
    elif summary.status != "completed":
        yield Finding("step_fails", "", f"{summary.status}: {summary.error}")
    elif (chance := chance_of_fall(losses)) > FALLS_BY_CHANCE:
        third = len(losses) // 3
        text = "no loss was logged: run.log(loss=loss)"
        if third > 1:
            first, last = fmean(losses[:third]), fmean(losses[-third:])
            text = f"{first:.4g} to {last:.4g} over {len(losses)} steps, by chance {chance:.0%}"
        yield Finding("loss_does_not_fall", "", text)


def chance_of_fall(losses: Sequence[float]) -> float:
    """The chance of such a fall from the first to the last third of losses without a trend.

    Welch's t-test, one-sided; 1 for fewer than six losses.
    """
    third = len(losses) // 3
    if third < 2:
        return 1.0
    first, last = losses[:third], losses[-third:]
    a, b = variance(first) / third, variance(last) / third
    fall = fmean(first) - fmean(last)
    if a + b == 0:
        return 0.0 if fall > 0 else 1.0
    freedom = (a + b) ** 2 / ((a * a + b * b) / (third - 1))
    return float(stdtr(freedom, -fall / math.sqrt(a + b)))


def _audited(summary: Summary) -> Iterator[Finding]:
    for text in summary.warnings:
        kind, _, rest = text.partition(" ")
        module, _, said = rest.partition(": ")
        if kind in OF_AUDIT:
            yield Finding(OF_AUDIT[kind], module, said)
    if summary.requested != summary.effective:
        yield Finding("substituted", "", f"{summary.precision} was asked for")


def _observed_baseline(summary: Summary, losses: list[float], peak: dict[str, int]) -> Baseline:
    differences = [abs(x - y) for x, y in pairwise(losses)]
    scatter = median(differences) if differences else 0.0  # robust to the fall itself
    bound = explained([scatter] * max(len(differences), 1), 0.0)
    hardware = summary.hardware
    return Baseline(
        schema_version=SCHEMA_VERSION,
        recipe=summary.recipe,
        machine=f"{hardware.name}, {summary.backend.threads} threads",
        versions=summary.versions,
        code={},
        reference=None,
        modes={
            summary.variant: ModeBaseline([BaselineFigure(x, bound) for x in losses[:8]], {}, peak)
        },
    )


# ---- another environment -------------------------------------------------------------------------


def check_environment(
    overrides: Sequence[str], config_dir: Path | None, settings: CheckSettings, python: Path
) -> Result:
    """Hold the step of each mode in another environment against this one, module by module.

    Args:
        overrides, config_dir: of a run; `precision=` may list modes.
        settings: of the check.
        python: the other environment's interpreter.

    Raises:
        UsageError: it has no mprun, or a mode cannot be planned.
        RunFailedError: a step fails in one of them.
    """
    began = time.monotonic()
    _answer(python, ["-c", "import mprun"], f"{python} -m pip install mprun")
    checks, notes = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for number, texts in enumerate(combinations([*map(parse, with_modes(overrides))])):
            folder = Path(temporary) / str(number)
            summary, found = _beside(texts, config_dir, python, folder)
            mode = ModeChecks(summary.variant, summary.precision, found[0])
            mode.done["agrees"] = time.monotonic() - began
            checks.append(mode)
            notes += [x for x in found[1] if x not in notes]
    about = summary.recipe, summary.hardware.name, summary.versions
    return check_result(*about, checks, began, settings, notes)


def _beside(
    texts: Sequence[str], config_dir: Path | None, python: Path, folder: Path
) -> tuple[Summary, tuple[list[Finding], list[str]]]:
    """A mode's run of one step, and findings and notes about its step in both environments."""
    here = [f"run.dir={quoted(as_text(str(folder)))}", "train.max_steps=1", "data.eval_limit=64"]
    composed = compose([*texts, *here], config_dir)
    plan, _ = plan_or_resume(composed)
    stop = StopSignals()
    with stop:
        summary, path = run(plan, composed.resolved, stop)
    file = folder / "other.json"
    _answer(python, ["-m", "mprun", "diff", str(path), "--save", str(file)], "")
    difference = diff_captures(capture_run(load_run(path)), read_capture(file))
    notes = list(difference.notes)
    first = difference.first
    if first is None:
        return summary, ([], notes)
    there = first.b.arising > first.a.arising
    error, where = (first.b, "there") if there else (first.a, "here")
    text = f"{first.phase}: an error of {error.arising:.1e} arises {where}; {error.dtype} explains "
    text += f"{error.explained:.1e}"
    found = Finding("larger_error", first.module, text, first.op, at=error.arising)
    return summary, ([found], notes)


def _answer(python: Path, arguments: Sequence[str], fix: str) -> None:
    """Run the other interpreter.

    Raises:
        UsageError: it cannot be started, or fails where `fix` says what to do.
        RunFailedError: it fails.
    """
    try:
        done = subprocess.run(
            [str(python), *arguments], capture_output=True, text=True, cwd=None, check=False
        )
    except OSError as error:
        raise UsageError(f"--python {python} cannot be started: {error.strerror}") from None
    if done.returncode == 0:
        return
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if fix:
        raise UsageError(f"--python {python} has no mprun ({last}); {fix}")
    raise RunFailedError(f"{python} {' '.join(arguments[:3])} failed: {last}")


def environment_with(requirement: str) -> Path:
    """The interpreter of an environment with this mprun and a package of another version.

    It is made by uv once for each requirement, in the user's cache folder.

    Raises:
        UsageError: there is no uv, or it cannot install this.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise UsageError(f"--with {requirement} needs uv (pip install uv), or give --python PATH")
    source = Path(mprun.__file__).parent.parent
    is_tree = (source / "pyproject.toml").exists()
    package = str(source) if is_tree else f"mprun=={mprun.__version__}"
    digest = hashlib.sha256(f"{requirement} {package} {machine.versions()}".encode()).hexdigest()
    folder = Path.home() / ".cache" / "mprun" / "environments" / digest[:12]
    python = folder / "bin" / "python"
    if python.exists():
        return python
    install = ["pip", "install", "--python", str(python), package, requirement]
    for arguments in (["venv", str(folder)], install):
        done = subprocess.run([uv, *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            shutil.rmtree(folder, ignore_errors=True)
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UsageError(f"--with {requirement}: uv {arguments[0]} failed: {last}")
    return python
