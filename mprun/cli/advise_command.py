"""`mprun advise`: try the modes that this machine runs natively, recommend one, write a preset.

    mprun advise recipe=mnist
    mprun advise recipe=mnist advise.objective=memory compare.margin=0.01
    mprun advise recipe=mnist advise.budget_min=10    (an answer in ten minutes)
    mprun advise recipe=mnist --verbose               (all figures, and why not each other mode)
    mprun --config-dir outputs/DATE/TIME preset=advised

Beside the preset it writes the advised mode as code for other loops: snippets/pytorch.py,
lightning.py, accelerate.py, trainer.py, fsdp2.py.

Trials are short, paired by seed, and judged on validation data. The test set is not used: a set
that a mode was selected on is no test set any more.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.arguments import Command
from mprun.cli.study_commands import (
    STUDY,
    budget_note,
    for_choice,
    launcher_of,
    report_study,
    request_of,
    run_study,
    study_of,
    study_status,
)
from mprun.errors import MprunError
from mprun.records.console import print_line, stdout_console
from mprun.records.result import Result, show
from mprun.study.budget import Budget

if TYPE_CHECKING:
    from mprun.study.compare.comparison import Advice, Comparison
    from mprun.study.study import Study

COMMAND = Command("advise", ("advise", "launcher", *STUDY))
PRESET = "advised"  # The option's name: preset=advised


def advise_command(args: Sequence[str]) -> int:
    """Run `mprun advise`; the exit status."""
    # The command chooses them itself: fp32, and never the test set
    refused = ("compare.baseline", "compare.split")
    request = request_of(COMMAND, args, "advise", "launcher", refused=refused)
    # It begins now: importing torch below is a part of it
    budget = Budget("advise.budget_min", request.settings.advise.budget_min)
    from mprun.cli.compare_command import compared
    from mprun.study.advise import advise, alarms_by_variant, new_advise_study, without_result
    from mprun.study.hydra_launch import Screening
    from mprun.study.report.answer import advice_lines

    own = request.settings.advise
    objective, screening = own.objective, Screening(own.objective, own.screen)
    # Trials side by side on one machine slow each other: refused where times decide
    launcher = launcher_of(request, "advise.objective=time" if objective == "time" else "")
    study = study_of(request, new_advise_study)  # the answer says what was not tried
    ran = run_study(study, launcher, budget, screening, request.verbose)
    outcomes = ran.outcomes
    dropped = screening.drop(study)(outcomes)
    settings = for_choice(request, study, outcomes)
    # Without variants that were dropped: each would take power from Holm's tests of the rest
    names = [o.trial.name for o in outcomes if o.trial.variant not in dropped and o.summary]
    comparison = compared([study.folder / name for name in names], settings)
    alarms = alarms_by_variant(comparison)
    not_tried = {
        **study.plan.not_tried,
        **without_result(study, ran, dropped, budget.text),
    }
    advice = advise(comparison, alarms, objective, dropped, not_tried)
    advice = replace(advice, notes=(*budget_note(study, ran, budget), *advice.notes))
    comparison = replace(comparison, advice=advice, not_run=ran.not_run)
    report_study(study, comparison, settings, request.verbose)
    if request.verbose:  # the first of these lines was printed as the answer, above the table
        show(Result(advice, ["", *advice_lines(comparison)[1:]]))
    _write_preset(study, comparison, advice, request.verbose)
    has_others = len(comparison.variants) > 1  # not all were screened out
    return study_status(outcomes, comparison, settings.fail_if if has_others else "none")


def _write_preset(study: Study, comparison: Comparison, advice: Advice, verbose: bool) -> None:
    from mprun.study.advise import copy_options, preset_text, recipe_files, write_preset

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
    _write_snippets(study, overrides, comments)


def _write_snippets(study: Study, overrides: Sequence[str], notes: tuple[str, ...]) -> None:
    """Write the advised mode as code for other training loops."""
    from mprun.records.files import write_files
    from mprun.study.advise import advised_answer
    from mprun.study.report.snippets import snippets

    answer = advised_answer(study, overrides, notes)
    first, *others = map(Path, write_files(study.folder, snippets(answer)))
    names = ", ".join([str(study.folder / first), *(path.name for path in others)])
    print_line(stdout_console(), f"in your own loop: {names}")
