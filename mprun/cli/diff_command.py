"""`mprun diff`: where two runs of the same recipe part, module by module.

    mprun diff outputs/DATE/fp32 outputs/DATE/bf16
    mprun diff outputs/DATE/bf16 --save here.json      (one side in a file: two machines, versions)
    mprun diff here.json there.json

Loads the last checkpoint of each run, in its own mode, and takes one step of both on one batch,
forward and backward. Prints how far the weights are apart, the error that arises in each module,
relative to float64, and the first one that is larger than its dtype explains. Writes diff.json
beside the second side. Nothing is trained. `--save` writes what arises in one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mprun.cli.arguments import Command, parse_arguments
from mprun.errors import UsageError
from mprun.records.listing import RUNS
from mprun.records.result import show

COMMAND = Command("diff", instead=(), folders_of=RUNS)
USAGE = "mprun diff RUN_A RUN_B, or mprun diff RUN --save FILE"


def diff_command(args: Sequence[str]) -> int:
    """Run `mprun diff`; the exit status.

    Raises:
        UsageError: it takes two runs or saved sides of one recipe, or one run to save.
    """
    known = parse_arguments(COMMAND, args)
    paths = [Path(x) for x in known.overrides]
    if len(paths) != (2 if known.save is None else 1):
        raise UsageError(f"mprun diff takes two runs, or one to save: {USAGE}")
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no {path}: {USAGE}")
    if known.save is not None and not paths[0].is_dir():
        raise UsageError(f"{paths[0]} is not a run's folder: {USAGE}")
    from mprun.inspect.diff import diff_paths, saved_side

    if known.save is not None:
        return show(saved_side(paths[0], known.save.name), known.save.parent)
    folder = paths[1] if paths[1].is_dir() else paths[1].parent
    return show(diff_paths(*paths), folder)
