"""`mprun diff`: where two runs of the same recipe part, module by module.

    mprun diff outputs/DATE/fp32 outputs/DATE/bf16
    mprun diff here.json there.json            (of mprun capture, on two machines or versions)

Loads the last checkpoint of each run, in its own mode, and takes one step of both on one batch,
forward and backward. Prints how far the weights are apart, the error that arises in each module,
relative to float64, and the first one that is larger than its dtype explains. Writes diff.json
beside the second side. Nothing is trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mprun.cli.arguments import parse_arguments
from mprun.console import print_line, stdout_console
from mprun.errors import EXIT_OK, MprunError, UsageError

SHOWN = 5
FILE = "diff.json"


def diff_command(args: Sequence[str]) -> int:
    """Run `mprun diff`; the exit status.

    Raises:
        UsageError: it takes two runs or captures, of one recipe.
    """
    paths = [Path(x) for x in parse_arguments("diff", args).overrides]
    if len(paths) != 2:
        raise UsageError("mprun diff takes two runs: mprun diff RUN_A RUN_B")
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no {path}: mprun diff RUN_A RUN_B")
    from mprun.experiments import diff_runs
    from mprun.records.capture_record import bounded
    from mprun.records.files import write_atomic

    runs = [diff_runs.load_run(path) if path.is_dir() else None for path in paths]
    sides = [
        diff_runs.read_capture(path) if run is None else diff_runs.capture_run(run)
        for path, run in zip(paths, runs, strict=True)
    ]
    difference = diff_runs.diff_captures(*sides)
    first, second = runs
    weights: list[tuple[str, float]] = []
    if first is not None and second is not None:
        weights = diff_runs.weight_differences(first.model, second.model)
    console = stdout_console()
    for name, path, side in zip("ab", paths, sides, strict=True):
        print_line(console, f"{name}: {path} ({side.precision}, step {side.step})")
    if weights:
        print_line(console, "weights furthest apart (rms of the difference over rms of a):")
    for parameter, relative in weights[:SHOWN]:
        print_line(console, f"  {parameter}  {relative:.1e}")
    for line in str(difference).splitlines():
        print_line(console, line)
    file = (paths[1] if runs[1] is not None else paths[1].parent) / FILE
    record = {
        "sides": [str(path) for path in paths],
        "weights": [{"name": name, "relative": relative} for name, relative in weights],
        **diff_runs.content(difference),
    }
    try:
        write_atomic(file, f"{json.dumps(bounded(record), indent=1, allow_nan=False)}\n".encode())
    except OSError as error:
        raise MprunError(f"{file} cannot be written ({error.strerror})") from None
    print_line(console, f"written: {file}")
    return EXIT_OK
