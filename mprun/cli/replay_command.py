"""`mprun replay`: a saved step with a NaN, run again with every op inspected.

    mprun replay runs/bf16/nonfinite_step_37.pt recipe=mnist
    mprun replay runs/bf16/nonfinite_step_37.pt train.py
    mprun replay runs/bf16/nonfinite_step_37.pt train.py:step

`mprun.observe(..., on_nonfinite="save")` writes the file: weights, inputs, batch and random states
of the first step with a NaN or an infinity. Prints the op where it began, its module, its line of
code and its inputs.

The model comes from a recipe (with its overrides, such as recipe.model.units=64), or from the
function model() of a Python file, which is run; its training belongs under
`if __name__ == "__main__":`. Without more, the model's calls are repeated, and the saved gradients
of its outputs start the backward pass. With step(model, batch), or the function named behind a
colon, the loss is inspected too: it returns the loss, or goes backward itself. It runs in the
autocast state that the model was called in. A recipe's loss is run where the loop gave the batch
(run.note_batch(batch)).

The exit status is 0 if the op is named, and 1 if every number is finite in the replay.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mprun.cli.arguments import Command, parse_arguments
from mprun.errors import UsageError
from mprun.records.result import show

if TYPE_CHECKING:
    from mprun.config import Composed

COMMAND = Command("replay")
USAGE = "write mprun replay FILE recipe=NAME, or mprun replay FILE path/to/script.py"
SCRIPT = re.compile(r"(.*\.py)(?::(\w*))?", re.DOTALL)


def replay_command(args: Sequence[str]) -> int:
    """Run `mprun replay`; the exit status.

    Raises:
        UsageError: a file cannot be used, or the step does not fit the model.
    """
    known = parse_arguments(COMMAND, args)
    if not known.overrides or "=" in known.overrides[0]:
        raise UsageError(f"mprun replay needs the file of a saved step first; {USAGE}")
    path, rest = Path(known.overrides[0]), known.overrides[1:]
    if not rest:
        raise UsageError(f"mprun replay {path} needs the model of the step; {USAGE}")
    scripts = [text for text in rest if "=" not in text]
    if scripts and len(rest) > 1:
        other = next(text for text in rest if text is not scripts[0])
        raise UsageError(f"mprun replay {path} {scripts[0]} takes no '{other}'; {USAGE}")

    source = _script(scripts[0]) if scripts else _composed(rest, known.config_dir)

    from mprun.inspect.replay import parts_of_recipe, parts_of_script, read_step, replay_file

    saved = read_step(path)
    if isinstance(source, tuple):
        parts = parts_of_script(*source)
    else:
        parts = parts_of_recipe(source.config, saved)
    return show(replay_file(path, saved, parts))


def _script(text: str) -> tuple[Path, str]:
    """The file, and the function in it or an empty text."""
    match = SCRIPT.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text}' is not a Python file; {USAGE}")
    return Path(match[1]).expanduser(), match[2] or ""


def _composed(overrides: Sequence[str], folder: Path | None) -> Composed:
    """The configuration, which names a recipe."""
    from mprun.config import compose

    if not any(text.startswith("recipe=") for text in overrides):
        raise UsageError(f"mprun replay needs recipe=..., not only {overrides[0]}; {USAGE}")
    return compose(overrides, folder)
