"""`mprun advise`: try the modes this machine runs natively, recommend one, write it as a preset.

    mprun advise recipe=mnist
    mprun advise recipe=mnist advise.objective=memory compare.margin=0.01
    mprun --config-dir outputs/DATE/TIME preset=advised

Trials are short, paired by seed, and judged on validation data: a test set that chose would be no
test any more.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

from mprun.cli.study_commands import Request, carry_out, held_out, judged, request, seeds_of, tell
from mprun.errors import EXIT_OK, MprunError, UsageError

if TYPE_CHECKING:
    from mprun.assemble import DataCache
    from mprun.compare.rows import Advice, Comparison
    from mprun.experiments.sweep import Sweep

SEEDS = 10
PRESET = "advised"


def advise_command(words: list[str]) -> int:
    """Run `mprun advise` with what follows these words; the exit status.

    Raises:
        UsageError: anything wrong with the overrides, or a folder that holds something already.
    """
    asked = request("advise", words, "advise", refused=("compare.baseline", "compare.split"))
    from mprun.assemble import DataCache
    from mprun.cli.compare_command import check, compared, report
    from mprun.experiments.advise import advise, screened
    from mprun.experiments.sweep import read_sweep

    load, settings = DataCache(), asked.settings.advise
    objective = cast(Literal["time", "memory"], settings.objective.name)
    resume = asked.resume
    sweep = read_sweep("advise", resume) if resume is not None else _new(asked, load)
    baseline = next(iter(sweep.variants))
    outcomes, status = carry_out(
        sweep, "advise", lambda so_far: screened(so_far, baseline, objective, settings.screen), load
    )
    if status is not None:
        return status
    dropped = screened(outcomes, baseline, objective, settings.screen)
    how = judged(asked, sweep, outcomes)
    kept = [o.trial for o in outcomes if o.trial.variant not in dropped and o.summary is not None]
    comparison = compared([sweep.folder / trial.name for trial in kept], how)
    advice = advise(comparison, _alarms(comparison), objective, dropped, sweep.not_tried)
    comparison = replace(comparison, advice=advice)
    report(comparison, how, sweep.folder)
    _show(comparison)
    _write(sweep, comparison, advice)
    if len(comparison.variants) > 1:
        check(comparison, how.fail_if.value)
    return EXIT_OK


def _new(asked: Request, load: DataCache) -> Sweep:
    """The trials: of modes whose times mean something here."""
    from mprun.assemble import make_plan
    from mprun.config import compose
    from mprun.config.variants import BASELINE, variants
    from mprun.experiments.sweep import new_sweep

    found = variants(asked.words, asked.config_dir)
    left_out = dict(found.left_out)
    native: dict[str, tuple[str, ...]] = {}
    precisions: dict[str, str] = {}
    of_trials: list[str] = []
    for name, words in found.words.items():
        composed = compose(words, asked.config_dir)
        try:
            chosen = make_plan(composed.config, composed.given, load=load)
        except UsageError as error:
            left_out[name] = str(error)
            continue
        if chosen.execution == "emulated":
            left_out[name] = "emulated here: what it would cost on hardware that has it is unknown"
            continue
        if not native:
            of_trials = held_out(composed, load)
            if composed.config.train.max_steps is None:
                of_trials.append(f"train.max_steps={asked.settings.advise.max_steps}")
        native[name], precisions[name] = words, chosen.policy.name
    if not native:
        raise UsageError(next(iter(left_out.values())))
    if len(native) == 1:
        raise UsageError(f"there is nothing to choose from: only {next(iter(native))} can be tried")
    for name, reason in left_out.items():
        tell(f"not tried: {name}: {reason}")
    ordered = {
        name: native[name] for name in sorted(native, key=lambda n: precisions[n] != BASELINE)
    }
    seeds = seeds_of(asked, SEEDS)
    return new_sweep("advise", ordered, seeds, asked.folder, asked.config_dir, of_trials, left_out)


def _alarms(comparison: Comparison) -> dict[str, list[str]]:
    """A variant's label to what is alarming about its runs."""
    from mprun.experiments.alarms import alarms
    from mprun.records.run_record import read_lines

    return {
        v.label: [
            f"seed {run.summary.seed}: {text}"
            for run in v.runs
            for text in alarms(run.summary, read_lines(run.path))
        ]
        for v in comparison.variants
    }


def _show(comparison: Comparison) -> None:
    from mprun.report.answer import advice_lines

    tell("")
    for line in advice_lines(comparison):
        tell(line)


def _write(sweep: Sweep, comparison: Comparison, advice: Advice) -> None:
    """The advised mode as a preset."""
    from mprun.experiments.preset import copy_options, preset_text, write_preset

    chosen = next(v for v in comparison.variants if v.label == advice.label)
    trial = next(t for t in sweep.trials if t.name == chosen.runs[0].path.name)
    words = sweep.variants[trial.variant]
    comments = (
        f"{advice.label} for {comparison.recipe}: {advice.reason}",
        f"{comparison.data}; {comparison.hardware}; {comparison.code}",
        "Made by mprun advise.",
    )
    try:
        path = write_preset(sweep.folder, PRESET, preset_text(PRESET, words, comments))
        copy_options(words, sweep.config_dir, sweep.folder)
    except OSError as error:
        raise MprunError(f"{sweep.folder} cannot be written ({error.strerror})") from None
    folder = shlex.quote(str(sweep.folder))
    tell(f"written: {path}; use it: mprun --config-dir {folder} preset={PRESET}")
