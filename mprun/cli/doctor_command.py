"""`mprun doctor`: what this machine runs natively, how fast, and what follows for each mode.

    mprun doctor [device=auto|cpu|cuda] [doctor.budget_s=5] [doctor.json=true]

Measures for a few seconds. Prints tables, or with `doctor.json=true` one JSON object and nothing
else (`mprun.records.doctor_record` has its fields).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from mprun.cli.arguments import parse_arguments
from mprun.console import (
    JobProgress,
    print_line,
    print_table,
    print_text,
    stderr_console,
    stdout_console,
)
from mprun.errors import EXIT_OK, UsageError, hint


def doctor_command(args: Sequence[str]) -> int:
    """Run `mprun doctor`; the exit status."""
    from mprun.config import compose
    from mprun.config.settings import fields, take

    settings, rest = take(parse_arguments("doctor", args).overrides, "doctor")
    for text in rest:
        if text.lstrip("+").partition("=")[0] != "device":
            legal = ["device", *fields(["doctor"])]
            near = hint(text.partition("=")[0], legal)
            raise UsageError(
                f"mprun doctor does not take '{text}'{near}; legal: {', '.join(legal)}"
            )
    device = compose(rest).config.device.name
    from mprun.experiments.examine import examine
    from mprun.report.doctor_tables import renderables

    budget_s = settings.doctor.budget_s
    if settings.doctor.json:
        print(json.dumps(asdict(examine(device, budget_s)), indent=1, allow_nan=False))
        return EXIT_OK
    print_line(stderr_console(), f"measuring for about {budget_s:g} s ...")
    with JobProgress(stderr_console()) as progress:
        examination = examine(device, budget_s, progress.begin)
    console = stdout_console()
    for part in renderables(examination):
        if isinstance(part, str):
            print_text(console, part)
        else:
            print_table(console, part)
    return EXIT_OK
