"""The model and the functions with which a saved step is run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from mprun.assemble.file_recipe import script_of
from mprun.assemble.recipe_loading import recipe_of
from mprun.config import Composed
from mprun.errors import MprunError, RunFailedError, UsageError, hint
from mprun.integrations.replay import MisfitError, Replay, StepFunction, replay
from mprun.integrations.saved_step import read_step
from mprun.train.user_code import described, model_of

STEP = "step"


def replay_with_recipe(file: Path, composed: Composed) -> Replay:
    """Run a saved step again with the model of a recipe.

    Raises:
        UsageError: the file is no saved step, or of another model.
        RunFailedError: the step raises an error.
    """
    saved = read_step(file)
    return _replayed(file, saved, model_of(recipe_of(composed.config)), None)


def replay_with_script(file: Path, script: Path, function: str) -> Replay:
    """Run a saved step again with the functions of a Python file.

    Args:
        file: the saved step.
        script: has `model()`, which makes the model.
        function: the name of its `step(model, batch)`, which gives the loss; empty: `step`, if
            there is one.

    Raises:
        UsageError: as above, or a function is missing.
        RunFailedError: the step raises an error.
    """
    saved = read_step(file)
    names = vars(script_of(script))
    for name in ("model", *filter(None, [function])):
        if not callable(names.get(name)):
            near = hint(name, [n for n in names if not n.startswith("_")])
            raise UsageError(
                f"{script} has no function {name}{near}; a script for mprun replay has model(), "
                "which makes the model, and may have step(model, batch), which gives the loss"
            )
    try:
        model = names["model"]()
    except Exception as error:  # it is the user's code
        raise UsageError(f"{script}: model() fails: {described(error)}") from None
    if not isinstance(model, nn.Module):
        raise UsageError(f"{script}: model() gives {type(model).__name__}; legal is a nn.Module")
    return _replayed(file, saved, model, names.get(function or STEP))


def _replayed(file: Path, saved: Any, model: nn.Module, step: StepFunction | None) -> Replay:
    try:
        return replay(saved, model, step)
    except MisfitError as error:
        raise UsageError(f"{file}: {error}") from None
    except MprunError:
        raise
    except Exception as error:  # the model's or the script's
        raise RunFailedError(f"the step cannot be run again: {described(error)}") from error
