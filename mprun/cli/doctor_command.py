"""`mprun doctor`: what this machine does natively, how fast, and what that means for each mode.

    mprun doctor [device=auto|cpu|cuda] [doctor.budget_s=5] [doctor.json=true]

Measures for a few seconds. Prints tables, or with `doctor.json=true` one JSON object and nothing
else (`mprun.records.doctor_record` has its fields).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from mprun.cli.train_command import parse
from mprun.errors import EXIT_OK, UsageError, hint


def doctor_command(words: Sequence[str]) -> int:
    """Run `mprun doctor` with what follows these words; the exit status.

    Raises:
        UsageError: anything wrong with the words.
    """
    from mprun.config import compose
    from mprun.config.settings import fields, take

    arguments = parse(words)
    if arguments.multirun or arguments.show_config or arguments.config_dir:
        raise UsageError("mprun doctor takes no options; legal: device=..., doctor.json=true")
    settings, rest = take(arguments.overrides, "doctor")
    for word in rest:
        if word.lstrip("+").partition("=")[0] != "device":
            legal = ["device", *fields(["doctor"])]
            near = hint(word.partition("=")[0], legal)
            raise UsageError(
                f"'{word}' means nothing to mprun doctor{near}; legal: {', '.join(legal)}"
            )
    wanted = compose(rest).config.device.name

    from mprun.assemble.machine_choices import choose_device
    from mprun.console import stderr_console, stdout_console
    from mprun.experiments.examine import examine
    from mprun.report.doctor_tables import renderables

    device, budget_s = choose_device(wanted), settings.doctor.budget_s
    if settings.doctor.json:
        print(json.dumps(asdict(examine(device, budget_s)), indent=1, allow_nan=False))
        return EXIT_OK
    stderr_console().print(f"measuring for about {budget_s:g} s ...", highlight=False)
    console = stdout_console()
    for part in renderables(examine(device, budget_s)):
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))
    return EXIT_OK
