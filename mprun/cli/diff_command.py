"""`mprun diff`: where two runs of the same recipe part, module by module.

    mprun diff outputs/DATE/fp32 outputs/DATE/bf16

Loads the last checkpoint of each run, in its own mode, and takes one step of both on one batch,
forward and backward. Prints how far the weights are apart, the error that arises in each module,
relative to float64, and the first one that is larger than its dtype explains. Writes diff.json into
the second run's folder. Nothing is trained.
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
        UsageError: it takes two folders of runs.
    """
    paths = parse_arguments("diff", args).overrides
    if len(paths) != 2:
        raise UsageError("mprun diff takes two runs: mprun diff RUN_A RUN_B")
    first, second = map(Path, paths)
    for path in (first, second):
        if not path.is_dir():
            raise UsageError(f"{path} is no folder of a run: mprun diff RUN_A RUN_B")
    from mprun.experiments.diff_runs import content, diff_runs
    from mprun.records.files import jsonable, write_atomic

    result = diff_runs(first, second)
    console = stdout_console()
    print_line(console, f"a: {first}")
    print_line(console, f"b: {second}")
    print_line(console, "weights furthest apart (rms of the difference over rms of a):")
    for row in result.weights[:SHOWN]:
        print_line(console, f"  {row.name}  {row.relative:.1e}")
    for line in str(result.difference).splitlines():
        print_line(console, line)
    text = json.dumps(jsonable(content(result, first, second)), indent=1, allow_nan=False)
    try:
        write_atomic(second / FILE, f"{text}\n".encode())
    except OSError as error:
        raise MprunError(f"{second / FILE} cannot be written ({error.strerror})") from None
    print_line(console, f"written: {second / FILE}")
    return EXIT_OK
