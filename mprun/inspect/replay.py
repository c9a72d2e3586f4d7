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

import os
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from mprun.errors import EXIT_FAILED, EXIT_OK, MprunError, UsageError, first_line, hint
from mprun.inspect.question import Given, Prepared, Question
from mprun.records.reader import DamagedArchiveError
from mprun.records.result import Result

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mprun.config import Composed, Config
    from mprun.watch.nonfinite.saved_step import SavedStep
    from mprun.watch.nonfinite.step_replay import StepFunction

USAGE = "write mprun replay FILE recipe=NAME, or mprun replay FILE path/to/script.py"
SCRIPT = re.compile(r"(.*\.py)(?::(\w*))?", re.DOTALL)  # The file, and the function after a colon
STEP = "step"  # The function of a script that runs a step, unless another one is named


def prepare(given: Given) -> Prepared:
    """The saved step, and the code that it is run again with.

    Raises:
        UsageError: a file cannot be used.
    """
    texts = given.texts
    if not texts or "=" in texts[0]:
        raise UsageError(f"mprun replay needs the file of a saved step first; {USAGE}")
    path, rest = Path(texts[0]), texts[1:]
    if not rest:
        raise UsageError(f"mprun replay {path} needs the model of the step; {USAGE}")
    scripts = [text for text in rest if "=" not in text]
    if scripts and len(rest) > 1:
        other = next(text for text in rest if text is not scripts[0])
        raise UsageError(f"mprun replay {path} {scripts[0]} takes no '{other}'; {USAGE}")

    if scripts:
        match = SCRIPT.fullmatch(scripts[0])  # the file, and a function in it
        if match is None:
            raise UsageError(f"'{scripts[0]}' is not a Python file; {USAGE}")
        saved = read_step(path)
        parts = parts_of_script(Path(match[1]).expanduser(), match[2] or "")
    else:
        config = _composed(rest, given.config_dir).config
        saved = read_step(path)
        parts = parts_of_recipe(config, saved)
    return Prepared(lambda _: replay_file(path, saved, parts))


def _composed(overrides: Sequence[str], folder: Path | None) -> Composed:
    """The configuration, which names a recipe."""
    from mprun.config import compose

    if not any(text.startswith("recipe=") for text in overrides):
        raise UsageError(f"mprun replay needs recipe=..., not only {overrides[0]}; {USAGE}")
    return compose(overrides, folder)


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
    from mprun.train.checkpoint import NotTensorsError, load_torch_file
    from mprun.watch.nonfinite.saved_step import saved_step

    try:
        content = load_torch_file(path)
    except FileNotFoundError:
        raise UsageError(
            f"{path}: there is no such file; write the one that mprun.observe(..., "
            "on_nonfinite='save') named"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from None
    except pickle.UnpicklingError:  # its text is advice to load what is not trusted
        reason = ": it contains more than tensors and plain values, which is not loaded"
    except (DamagedArchiveError, NotTensorsError) as error:
        reason = f": {error}"
    except Exception as error:  # unpickling a damaged file raises almost anything
        reason = f" ({first_line(error)})"
    else:
        return saved_step(content, path)
    raise UsageError(f"{path} is not a saved step, or is damaged{reason}")


def parts_of_recipe(config: Config, saved: SavedStep) -> ReplayParts:
    """Model and loss of a recipe; the loss needs a batch that the loop gave."""
    from mprun.train.assemble.plan import choose_device
    from mprun.train.assemble.recipe_loading import recipe_of
    from mprun.train.loss_terms import LossTerms
    from mprun.train.user_code import model_of

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

    The file is run. The function is `function(model, batch)`; empty for `step`.

    Raises:
        UsageError: it cannot be run, or has no such function.
    """
    from mprun.train.assemble.recipe_loading import module_in
    from mprun.train.user_code import checked_model

    if not path.is_file():
        raise UsageError(
            f"{path}: there is no such file; write the path of a Python file with model(), or "
            "recipe=..."
        )
    module = module_in(Path(os.path.abspath(path)), None, prefix="")  # noqa: PTH100 (keeps links)
    make = _function(module, path, "model")
    named = bool(function) or hasattr(module, STEP)
    step = _function(module, path, function or STEP) if named else None
    return ReplayParts(lambda: checked_model(make(), make, "model()"), step)


def replay_file(path: Path, saved: SavedStep, parts: ReplayParts) -> Result:
    """Replay the step of the file `path`; it fails where no number is other than finite.

    Raises:
        UsageError: it does not fit the model, or the model's or script's code fails.
    """
    import torch

    from mprun.train.user_code import explain_mistakes
    from mprun.watch.nonfinite.step_replay import StepMisfitError, replay

    with explain_mistakes("the model cannot be made"):
        model = parts.model()
    # sums of other numbers of threads have other roundings, and a NaN may need the same ones
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
    """The module's function of this name."""
    from torch import nn

    from mprun.train.loss_terms import shown

    value: Callable[..., Any] | None = getattr(module, name, None)
    if callable(value) and not isinstance(value, nn.Module):  # `model = Net()` is no function
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


QUESTION = Question("replay", prepare)
