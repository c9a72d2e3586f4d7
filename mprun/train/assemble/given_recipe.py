"""A recipe of objects: a model, one batch and a loss, as `mprun.check` takes them.

The run gets a copy of the model for each mode, on the CPU, with the weights that it has; nothing of
the caller's changes. The batch is all of the training data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from mprun.config.quoting import quoted
from mprun.errors import UsageError
from mprun.precision.nested import all_tensors, map_tensors
from mprun.recipe import Recipe
from mprun.train.assemble.file_recipe import of_functions


def given_recipe(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
) -> tuple[Recipe, list[str]]:
    """The recipe of a model, a batch and a loss, and overrides to which the user's are added.

    Args:
        model: any module, in any dtype and on any device.
        batch: a tensor, tuple, list or mapping of tensors, nested. With a loss, the last item of a
            tuple or list is the target; the other items, or the items of a mapping by their names,
            are the arguments of the model.
        loss: of the output and the target (of a batch without one: the batch) the mean loss, a
            scalar, or a dict of named ones. None: the output brings its own, as `output.loss` or
            `output["loss"]`.
        optimizer: makes one of a model. None: `train.optimizer`, AdamW at 1e-3.

    Raises:
        UsageError: something of it cannot be used.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"check: model is a {type(model).__name__}; legal is a torch.nn.Module")
    sizes = {len(x) if x.dim() else 0 for x in all_tensors(batch)}
    if sizes <= {0}:
        raise UsageError(
            f"check: batch is a {type(batch).__name__} without samples; legal is a tensor, or a "
            "tuple or mapping of tensors"
        )
    form = map_tensors(lambda x: x.detach().cpu(), batch)
    if not isinstance(form, Mapping):
        form = tuple(form) if isinstance(form, tuple | list) else (form,)
    whole: Any = [form]
    # Tensors of unequal lengths (time first, then samples) are a batch that nobody may divide.
    train = form if len(sizes) == 1 else DataLoader(whole, batch_size=None)
    name = type(model).__name__
    module = ModuleType(name, f"{name}, given in Python")
    functions: dict[str, Any] = vars(module)
    functions["model"] = lambda: _copied(model)
    functions["data"] = lambda: {"train": train, "validation": None}
    if loss is not None:
        functions["loss"] = lambda output, b: loss(output, b if isinstance(b, Mapping) else b[-1])
    else:  # every item is an argument
        functions["forward"] = lambda m, b: m(**b) if isinstance(b, Mapping) else m(*b)
    if optimizer is not None:
        functions["optimizer"] = optimizer
    return of_functions(module, Path(name))(), [
        "recipe=linear",  # whose other settings are the defaults of a run
        f"recipe.name={quoted(name)}",
        f"recipe.target={quoted(f'{type(model).__module__}.{type(model).__qualname__}')}",
        "train.optimizer.name=adamw",
        "train.lr=0.001",
        f"train.batch_size={max(sizes)}",
    ]


def _copied(model: nn.Module) -> nn.Module:
    """A copy on the CPU without gradients."""
    copied = copy.deepcopy(model).cpu()
    copied.zero_grad(set_to_none=True)
    return copied
