"""`mprun diff`: where two runs of the same recipe part, module by module.

    mprun diff outputs/DATE/fp32 outputs/DATE/bf16
    mprun diff outputs/DATE/bf16 --save here.json      (one side in a file: two machines, versions)
    mprun diff here.json there.json
    mprun diff outputs/DATE/bf16 --compiled            (the run's eager and compiled step)

Loads the last checkpoint of each run, in its own mode, and takes one step of both on one batch,
forward and backward. Prints how far the weights are apart, each module's own error, relative to
float64, and the first one that is larger than rounding to its dtype makes. Writes diff.json beside
the second side. Nothing is trained. `--save` writes the errors of one run.

`--compiled` says where compiled code leaves eager code, in which kernel, made of which lines, which
of the two is nearer to float64, and what Inductor's `emulate_precision_casts` changes.
"""

from __future__ import annotations

from pathlib import Path

from mprun.errors import UsageError
from mprun.inspect.question import Given, Measuring, Prepared, Question
from mprun.records.listing import RUNS
from mprun.records.result import Result

USAGE = "mprun diff RUN_A RUN_B, mprun diff RUN --compiled, or mprun diff RUN --save FILE"


def prepare(given: Given) -> Prepared:
    """Two runs or saved sides of one recipe, or one run to save, or to compile.

    Raises:
        UsageError: there are others.
    """
    paths, save = [Path(x) for x in given.overrides], given.options.save
    compiled = given.options.compiled
    if compiled and save is not None:
        raise UsageError(f"--compiled and --save are two questions: {USAGE}")
    if len(paths) != (2 if save is None and not compiled else 1):
        raise UsageError(f"mprun diff takes two runs, or one to save or to compile: {USAGE}")
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no {path}: {USAGE}")
    last = paths[-1]
    if (save is not None or compiled) and not last.is_dir():
        raise UsageError(f"{last} is not a run's folder: {USAGE}")

    def measure(_: Measuring) -> Result:
        from mprun.inspect.divergence.runs import (  # imports torch
            diff_compiled,
            diff_paths,
            saved_side,
        )

        if compiled:
            return diff_compiled(last)
        return diff_paths(*paths) if save is None else saved_side(paths[0], save.name)

    beside = last if last.is_dir() else last.parent
    return Prepared(measure, folder=beside if save is None else save.parent)


QUESTION = Question("diff", prepare, takes_run=False, folders_of=RUNS)
