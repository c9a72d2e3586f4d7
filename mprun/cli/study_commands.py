"""`sweep`, `advise` and `double`: many runs, their comparison, a sentence that answers.

They have arguments, runs, comparison and report in common, and differ in their trials and in the
sentence.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.arguments import Command, parse_arguments
from mprun.cli.compare_command import check, compared, report
from mprun.errors import EXIT_FAILED, EXIT_OK, MprunError, StoppedError
from mprun.records.console import print_line, stderr_console, stdout_console
from mprun.records.console.formatting import by_reason
from mprun.records.result import Result, show
from mprun.study.budget import Budget, BudgetSignals, not_run_text

if TYPE_CHECKING:
    from mprun.config.settings import CompareSettings, StudyRequest
    from mprun.study.compare.comparison import Advice, Comparison
    from mprun.study.hydra_launch import Screening, StudyLauncher
    from mprun.study.study import Study, StudyResult
    from mprun.study.trials import Outcome, StudyProgress

# Sections that every study takes
STUDY = ("compare", "study", "seeds", "seeds_limit", "first_seed")
CHOSEN = ("compare.baseline", "compare.split")  # What advise and double set: never the test set
PRESET = "advised"  # The option's name: preset=advised


def sweep_command(args: Sequence[str]) -> int:
    """Run `mprun sweep`; the exit status."""
    request = _request_of(SWEEP, args)
    budget = _budget_of(request, request.settings.sweep.budget_min)
    from mprun.study.study import new_sweep

    launcher = _launcher_of(request)
    study = _study_of(request, new_sweep)
    if request.resume is None:
        for reason, names in by_reason(study.plan.not_tried).items():
            print_line(stderr_console(), f"left out: {', '.join(names)}: {reason}")
    ran = _run_study(study, launcher, budget, verbose=request.verbose)
    # All runs in the folder: other processes may have run some of them
    settings = request.settings.compare
    comparison = compared([study.folder], settings)
    notes = (*_budget_note(study, ran, budget), *comparison.notes)
    comparison = replace(comparison, notes=notes, not_run=ran.not_run)
    _report_study(study, comparison, settings, request.verbose)
    return _study_status(ran.outcomes, comparison, settings.fail_if)


def advise_command(args: Sequence[str]) -> int:
    """Run `mprun advise`; the exit status."""
    request = _request_of(ADVISE, args, CHOSEN)
    budget = _budget_of(request, request.settings.advise.budget_min)
    from mprun.study.advise import advise, alarms_by_variant, new_advise_study, without_result
    from mprun.study.hydra_launch import Screening
    from mprun.study.report.answer import advice_lines

    own = request.settings.advise
    objective, screening = own.objective, Screening(own.objective, own.screen)
    # Trials side by side on one machine slow each other: refused where times decide
    launcher = _launcher_of(request, "advise.objective=time" if objective == "time" else "")
    study = _study_of(request, new_advise_study)
    ran = _run_study(study, launcher, budget, screening, request.verbose)
    outcomes = ran.outcomes
    dropped = screening.drop(study, outcomes)
    settings = _for_choice(request, study, outcomes)
    # Without variants that were dropped: each would take power from Holm's tests of the rest
    names = [o.trial.name for o in outcomes if o.trial.variant not in dropped and o.summary]
    comparison = compared([study.folder / name for name in names], settings)
    alarms = alarms_by_variant(comparison)
    not_tried = {**study.plan.not_tried, **without_result(study, ran, dropped, budget.text)}
    advice = advise(comparison, alarms, objective, dropped, not_tried)
    advice = replace(advice, notes=(*_budget_note(study, ran, budget), *advice.notes))
    comparison = replace(comparison, advice=advice, not_run=ran.not_run)
    _report_study(study, comparison, settings, request.verbose)
    if request.verbose:  # the first of these lines was printed as the answer, above the table
        show(Result(advice, ["", *advice_lines(comparison)[1:]]))
    _write_preset(study, comparison, advice, request.verbose)
    has_others = len(comparison.variants) > 1  # not all were screened out
    return _study_status(outcomes, comparison, settings.fail_if if has_others else "none")


def double_command(args: Sequence[str]) -> int:
    """Run `mprun double`; the exit status."""
    request = _request_of(DOUBLE, args, CHOSEN)
    budget = _budget_of(request, None)
    from mprun.study.double import double, new_double_study

    launcher = _launcher_of(request)
    study = _study_of(request, new_double_study)
    ran = _run_study(study, launcher, budget, verbose=request.verbose)
    settings = _for_choice(request, study, ran.outcomes)
    comparison = compared([study.folder], settings)
    doubling = double(comparison)
    answer = f"{doubling.answer}: {doubling.reason}"
    _report_study(study, comparison, settings, request.verbose, answer)
    return _study_status(ran.outcomes, comparison, settings.fail_if)


SWEEP = Command(
    "sweep",
    sweep_command,
    """`mprun sweep`: every mode, with seeds until its verdict is settled, then the comparison.

        mprun sweep recipe=mnist
        mprun sweep recipe=mnist precision=fp32,bf16_mixed op_lists=none,hmp seeds=10
        mprun sweep recipe=mnist study.max_time_s=1800  (what fits into half an hour)
        mprun sweep recipe=mnist --verbose              (all figures and notes on the terminal)
        mprun sweep run.resume=outputs/DATE/TIME
        mprun sweep recipe=mnist seeds=10 launcher=joblib launcher.processes=4
        mprun sweep recipe=mnist hydra/launcher=submitit_slurm hydra.launcher.partition=gpu

    Any number of processes may work on one study: each takes the next open run. The same command
    with the same run.dir, or run.resume, in another terminal or on another machine helps. Runs that
    share a machine at the same time have verdicts on the metric and none on time.

    The runs go seed by seed over all modes. A run that fails is reported, and the others continue.
    The exit status is 1 if a run failed to start, or if the machine ended it (a full disk, too
    little memory); `run.resume` tries it again.
    """,
    ("sweep", "launcher", *STUDY),
)
ADVISE = Command(
    "advise",
    advise_command,
    """`mprun advise`: try the modes that this machine runs natively, recommend one, write a preset.

        mprun advise recipe=mnist
        mprun advise recipe=mnist advise.objective=memory compare.margin=0.01
        mprun advise recipe=mnist advise.budget_min=10    (an answer in ten minutes)
        mprun advise recipe=mnist --verbose               (all figures, and why not each other mode)
        mprun --config-dir outputs/DATE/TIME preset=advised

    Beside the preset it writes the advised mode as code for other loops: snippets/pytorch.py,
    lightning.py, trainer.py.

    Trials are short, paired by seed, and judged on validation data. The test set is not used: a set
    that a mode was selected on is no test set any more.
    """,
    ("advise", "launcher", *STUDY),
)
DOUBLE = Command(
    "double",
    double_command,
    """`mprun double`: is a doubled batch worth it?

        mprun double recipe=mnist precision=bf16_mixed

    Compares the base batch with twice its size and each learning-rate rule, after equal epochs,
    paired by seed, on validation data. --verbose shows all figures and notes. `mprun memory
    memory.fits=16GiB` counts the largest batch that fits.
    """,
    STUDY,
)


# ---- what they have in common --------------------------------------------------------------------


def _request_of(command: Command, args: Sequence[str], refused: Sequence[str] = ()) -> StudyRequest:
    """The arguments of a study; see `study_request`."""
    from mprun.config.settings import study_request

    known = parse_arguments(command, args)
    sections = map(str, command.settings)
    request = study_request(
        command.name, known.overrides, known.config_dir, *sections, refused=refused
    )
    return replace(request, verbose=known.verbose)


def _budget_of(request: StudyRequest, minutes: float | None) -> Budget:
    """The limit, `minutes` or `study.max_time_s`; it begins now, before torch is imported."""
    seconds = request.settings.study.max_time_s
    if seconds is not None and (minutes is None or seconds < 60 * minutes):
        return Budget("study.max_time_s", seconds / 60, per_minute=60)
    return Budget(f"{request.command}.budget_min", minutes)


def _launcher_of(request: StudyRequest, needs_times: str = "") -> StudyLauncher:
    """Which of Hydra's launchers runs the study; see `check_launcher`."""
    from mprun.study.hydra_launch import StudyLauncher, check_launcher

    launcher = StudyLauncher(request.settings.launcher, request.hydra)
    check_launcher(launcher, needs_times)
    return launcher


def _study_of(request: StudyRequest, new: Callable[[StudyRequest], Study]) -> Study:
    """The study to resume, or a new one."""
    from mprun.study.study import resumed_study

    if request.resume is None:
        return new(request)
    return resumed_study(request.command, request.resume, request.trust)


def _run_study(
    study: Study,
    launcher: StudyLauncher,
    budget: Budget,
    screening: Screening | None = None,
    verbose: bool = False,
) -> StudyResult:
    """Run a study's trials; `StoppedError` if a signal ended it, or no run was completed."""
    from mprun.study.hydra_launch import run_launched
    from mprun.study.trials import StudyProgress
    from mprun.train.signals import SignalReceivedError

    plan = study.plan
    variants, seeds = list(plan.variants), len(plan.seeds)
    console, has_looks = stdout_console(), plan.looks is not None
    progress = StudyProgress(console, variants, seeds, launcher.count, verbose, has_looks)
    most = "up to " if has_looks else ""
    progress.line(f"{plan.command}: {most}{len(study.trials)} runs in {study.folder}")
    stop = BudgetSignals(budget)
    with stop:  # a signal ends a run between two steps, with a checkpoint
        progress.start()
        try:
            result = run_launched(study, launcher, stop, progress, screening)
        except (StoppedError, SignalReceivedError):
            progress.line(f"stopped by {stop.name}; resume with: {study.resume_command}")
            raise StoppedError(stop.exit_status) from None
        finally:
            progress.stop()
    _show_failures(study, result, budget, progress)
    return result


def _show_failures(
    study: Study, result: StudyResult, budget: Budget, progress: StudyProgress
) -> None:
    """Show which runs the machine ended and which did not start."""
    outcomes = result.outcomes
    # no fault of a mode: a full disk or too little memory says nothing about its precision
    ended = [o for o in outcomes if o.by_machine]
    if ended:
        progress.line(
            f"{len(ended)} of {len(outcomes)} runs were ended by the machine and are no result: "
            f"{ended[0].error}; try them again with: {study.resume_command}"
        )
    # A wrong setting fails in every run alike: one line for each reason
    unstarted = Counter(o.error for o in outcomes if o.summary is None and not o.by_machine)
    for reason, count in unstarted.items():
        progress.line(f"{count} of {len(outcomes)} runs failed to start: {reason}")
    if all(outcome.error is not None for outcome in outcomes):
        progress.line("; ".join(["no run was completed", *_budget_note(study, result, budget)]))
        raise StoppedError(EXIT_FAILED)


def _budget_note(study: Study, result: StudyResult, budget: Budget) -> list[str]:
    """What the budget left out, and the command that continues the study; or nothing."""
    if not result.not_run:
        return []
    by = result.left_out_by or budget.text
    text = not_run_text(result.not_run, by, len(study.trials))
    return [f"{text}; continue with: {study.resume_command}"]


def _study_status(outcomes: Sequence[Outcome], comparison: Comparison, fail_if: str) -> int:
    """The exit status after the comparison: 1 if a run failed to start or the machine ended it."""
    check(comparison, fail_if)  # raises: its status 3 outweighs a missing run
    missing = any(o.summary is None or o.by_machine for o in outcomes)
    return EXIT_FAILED if missing else EXIT_OK


def _for_choice(
    request: StudyRequest, study: Study, outcomes: Sequence[Outcome]
) -> CompareSettings:
    """The settings for a choice: compared with the study's baseline, never on test samples."""
    baseline, split = study.judged_by(outcomes)
    return replace(request.settings.compare, baseline=baseline, split=split)


def _report_study(
    study: Study,
    comparison: Comparison,
    settings: CompareSettings,
    verbose: bool,
    answer: str = "",
) -> None:
    """Show a study's comparison; see `report`."""
    # The study's command would run it again: `mprun show` reads its records
    again = f"by mprun show {shlex.quote(str(study.folder))}"
    report(comparison, settings, study.folder, verbose, answer, again)


# ---- what advise writes --------------------------------------------------------------------------


def _write_preset(study: Study, comparison: Comparison, advice: Advice, verbose: bool) -> None:
    """Write the advised mode as a preset, and as code for other training loops."""
    from mprun.records.files import write_files
    from mprun.study.advise import (
        advised_answer,
        copy_options,
        preset_text,
        recipe_files,
        write_preset,
    )
    from mprun.study.report.snippets import snippets

    advised = next(v for v in comparison.variants if v.label == advice.label)
    trial = next(t for t in study.trials if t.name == advised.runs[0].path.name)
    overrides = study.plan.variants[trial.variant]
    comments = (
        f"{advice.label} for {comparison.recipe}: {advice.reason}",
        f"{comparison.data}; {comparison.hardware}; {comparison.code}",
        "Made by mprun advise.",
    )
    try:
        path = write_preset(study.folder, PRESET, preset_text(PRESET, overrides, comments))
        copy_options(overrides, study.config_dir, study.folder)
    except OSError as error:
        raise MprunError(f"{study.folder} cannot be written ({error.strerror})") from None
    words = ["--config-dir", str(study.folder), f"preset={PRESET}", *recipe_files(overrides)]
    written = f"written: {path}; " if verbose else ""
    print_line(stdout_console(), f"{written}use it: mprun {shlex.join(words)}")
    answer = advised_answer(study, overrides, comments)
    first, *others = map(Path, write_files(study.folder, snippets(answer)))
    names = ", ".join([str(study.folder / first), *(path.name for path in others)])
    print_line(stdout_console(), f"in your own loop: {names}")
