"""`mprun capture`: one side of `mprun diff` in a file, for two machines or versions.

    mprun capture outputs/DATE/bf16            writes capture.json into the run's folder
    mprun diff here.json there.json

Takes the last checkpoint of a run, in its mode, on this device and with this PyTorch, and writes
the error that arises in each module, forward and backward, relative to float64.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mprun.cli.arguments import parse_arguments
from mprun.console import print_line, stdout_console
from mprun.errors import EXIT_OK, MprunError, UsageError

FILE = "capture.json"


def capture_command(args: Sequence[str]) -> int:
    """Run `mprun capture`; the exit status.

    Raises:
        UsageError: it takes the folder of a run.
    """
    paths = parse_arguments("capture", args).overrides
    if len(paths) != 1 or not Path(paths[0]).is_dir():
        raise UsageError(f"mprun capture takes one run, not {' '.join(paths) or 'nothing'}")
    run = Path(paths[0])

    import msgspec

    from mprun.experiments.diff_runs import capture_run, load_run
    from mprun.records.capture_record import bounded
    from mprun.records.files import write_atomic

    record = bounded(msgspec.to_builtins(capture_run(load_run(run))))
    try:
        write_atomic(run / FILE, f"{json.dumps(record, indent=1, allow_nan=False)}\n".encode())
    except OSError as error:
        raise MprunError(f"{run / FILE} cannot be written ({error.strerror})") from None
    print_line(stdout_console(), f"written: {run / FILE}")
    return EXIT_OK
