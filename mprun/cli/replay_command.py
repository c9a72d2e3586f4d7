"""`mprun replay`: run the step that made a NaN again, and name the op.

    mprun replay runs/a/nonfinite_step_37.pt recipe=mnist
    mprun replay runs/a/nonfinite_step_37.pt my_script.py
    mprun replay runs/a/nonfinite_step_37.pt my_script.py:step

`mprun.observe(..., on_nonfinite="save")` writes such files. The model is the recipe's, or that of
`model()` in a Python file, which is run. Its weights, inputs and random numbers are those of the
file. `step(model, batch)` gives the loss; it is needed where the loss itself makes the NaN. Every
op is watched: the first that makes a NaN or an infinity out of finite numbers is named, with its
module, its line and its largest inputs. The exit status is 1 if the step stays finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mprun.cli.arguments import parse_arguments
from mprun.console import print_text, stdout_console
from mprun.errors import EXIT_FAILED, EXIT_OK, UsageError

USAGE = "mprun replay FILE recipe=NAME, or mprun replay FILE SCRIPT.py"


def replay_command(args: Sequence[str]) -> int:
    """Run `mprun replay`; the exit status.

    Raises:
        UsageError: a file is missing or not what it should be.
        RunFailedError: the step raises an error.
    """
    known = parse_arguments("replay", args)
    if len(known.overrides) < 2:
        raise UsageError(f"mprun replay takes a file and what makes its model: {USAGE}")
    file, *rest = known.overrides
    script = rest[0] if "=" not in rest[0] else ""
    if script and len(rest) > 1:
        raise UsageError(f"mprun replay takes one script, not {' '.join(rest)}: {USAGE}")
    if script:
        from mprun.experiments.replay_step import replay_with_script

        path, _, function = script.partition(":")
        result = replay_with_script(Path(file), Path(path), function)
    else:
        from mprun.config import compose

        composed = compose(rest, known.config_dir)
        from mprun.experiments.replay_step import replay_with_recipe

        result = replay_with_recipe(Path(file), composed)
    for line in str(result).splitlines():
        print_text(stdout_console(), line)
    return EXIT_OK if result.exceptions else EXIT_FAILED
