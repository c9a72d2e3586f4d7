"""A saved step from its file, replayed with the model of a recipe or of a script."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from mprun.config import Config
from mprun.errors import EXIT_FAILED, EXIT_OK, MprunError, UsageError, definition, first_line, hint
from mprun.records.reader import DamagedArchiveError
from mprun.records.result import Result
from mprun.train.assemble.plan import choose_device
from mprun.train.assemble.recipe_loading import module_in, recipe_of
from mprun.train.checkpoint import NotTensorsError, load_torch_file
from mprun.train.loss_terms import LossTerms, shown
from mprun.train.user_code import explain_mistakes, model_of
from mprun.watch.nonfinite.saved_step import SavedStep, saved_step
from mprun.watch.nonfinite.step_replay import StepFunction, StepMisfitError, replay

STEP = "step"  # The function of a script that runs a step, unless another one is named


class ReplayParts(NamedTuple):
    """What a saved step is replayed with."""

    model: Callable[[], nn.Module]
    step: StepFunction | None  # Runs the model and the loss; None: the model's calls are repeated
    device: torch.device | None = None  # None: where the step ran
    notes: tuple[str, ...] = ()


def read_step(path: Path) -> SavedStep:
    """The saved step in a file; reading it runs no code.

    Raises:
        UsageError: there is none.
    """
    try:
        content = load_torch_file(path)
    except FileNotFoundError:
        raise UsageError(
            f"{path}: there is no such file; write the one that mprun.observe(..., "
            "on_nonfinite='save') named"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from None
    except (DamagedArchiveError, NotTensorsError) as error:
        raise UsageError(f"{path} is not a saved step, or is damaged: {error}") from None
    except pickle.UnpicklingError:  # its text is advice to load what is not trusted
        raise UsageError(
            f"{path} is not a saved step, or is damaged: it contains more than tensors and plain "
            "values, which is not loaded"
        ) from None
    except Exception as error:  # unpickling a damaged file raises almost anything
        raise UsageError(
            f"{path} is not a saved step, or is damaged ({first_line(error)})"
        ) from None
    return saved_step(content, path)


def parts_of_recipe(config: Config, saved: SavedStep) -> ReplayParts:
    """Model and loss of a recipe; the loss needs a batch that the loop gave."""
    recipe = recipe_of(config)
    device = None if config.device == "auto" else choose_device(config.device)
    if not saved.batches:
        note = (
            "the loop gave no batch (run.note_batch(batch)), so the recipe's loss was not run: the "
            "saved gradients of the model's outputs stand for it"
        )
        return ReplayParts(lambda: model_of(recipe), None, device, (note,))
    loss = LossTerms(recipe)

    def step(model: nn.Module, batch: Any) -> Any:
        return loss(recipe.forward(model, batch), batch)

    return ReplayParts(lambda: model_of(recipe), step, device)


def parts_of_script(path: Path, function: str) -> ReplayParts:
    """`model()` of a Python file, and its function of that name, or `step` if it has one.

    Args:
        path: the file, which is run.
        function: `function(model, batch)`; empty for `step`.

    Raises:
        UsageError: it cannot be run, or has no such function.
    """
    if not path.is_file():
        raise UsageError(
            f"{path}: there is no such file; write the path of a Python file with model(), or "
            "recipe=..."
        )
    module = module_in(Path(os.path.abspath(path)), None, prefix="")  # noqa: PTH100 (keeps links)
    make = _function(module, path, "model")
    named = bool(function) or hasattr(module, STEP)
    step = _function(module, path, function or STEP) if named else None

    def model() -> nn.Module:
        made: object = make()
        if isinstance(made, nn.Module):
            return made
        place = definition(make)
        raise UsageError(
            f"model() returned {shown(made)}{f' ({place})' if place else ''}; legal is a "
            "torch.nn.Module"
        )

    return ReplayParts(model, step)


def replay_file(path: Path, saved: SavedStep, parts: ReplayParts) -> Result:
    """Replay the step of the file `path`; it fails where no number is other than finite.

    Raises:
        UsageError: it does not fit the model, or the model's or script's code fails.
    """
    with explain_mistakes("the model cannot be made"):
        model = parts.model()
    torch.set_num_threads(max(1, min(saved.threads, os.cpu_count() or 1)))
    try:
        done = replay(saved, model, parts.step, parts.device)
    except MprunError:
        raise
    except StepMisfitError as error:
        raise UsageError(f"{path}: {error}; give the code that the step is from") from None
    except Exception as error:
        with explain_mistakes(f"{path}: the step cannot be run again"):
            raise error
    done = replace(done, notes=(*parts.notes, *done.notes))
    return Result(done, list(done.lines()), status=EXIT_FAILED if done.cause is None else EXIT_OK)


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    """The module's function of this name.

    Raises:
        UsageError: it has none.
    """
    value: Callable[..., Any] | None = getattr(module, name, None)
    if callable(value) and not isinstance(value, nn.Module):
        return value
    known = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
    received = "" if value is None else f": {name} is {shown(value)}"
    if name == "model":
        raise UsageError(
            f"{path} has no function model(){received}; write `def model(): return MyModel()`, "
            f"and the training under `if __name__ == '__main__':`{hint(name, known)}"
        )
    raise UsageError(
        f"{path} has no function {name}(model, batch){received}{hint(name, known)}; legal is one "
        "that returns the loss, or None after going backward itself"
    )
