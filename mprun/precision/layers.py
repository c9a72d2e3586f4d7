"""Modules kept out of the casts, by name.

Some regions do not survive 16 bits (decompositions, long sums, losses inside a model). A module
named in `precision.layers` runs in float32 inside an autocast region: autocast is switched off
around its forward pass, and 16-bit inputs are cast up at its border.

A key is a module's name as `model.named_modules()` gives it, or a glob over such names. An exact
name wins over globs; two globs that fit one module, and a key that fits none, are errors. A module
inside a kept one is kept with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def resolve(model: nn.Module, layers: Mapping[str, str]) -> dict[str, str]:
    """Module name to dtype, for every module that a key of `layers` names.

    Raises:
        ValueError: a key fits no module, or two globs fit one.
    """
    names = [name for name, _ in model.named_modules() if name]
    found = {key: dtype for key, dtype in layers.items() if key in names}
    for name in (n for n in names if n not in layers):
        fitting = [key for key in layers if key not in names and fnmatchcase(name, key)]
        if len(fitting) > 1:
            raise ValueError(f"precision.layers: {' and '.join(fitting)} both fit module '{name}'")
        if fitting:
            found[name] = layers[fitting[0]]
    for key in layers:
        if key not in names and not any(fnmatchcase(n, key) for n in names):
            near = get_close_matches(key, names, n=1)
            meant = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(
                f"precision.layers: no module is named '{key}'{meant}; legal: {', '.join(names)}"
            )
    return found


def keep_in_float32(model: nn.Module, names: Mapping[str, str], device_type: str) -> None:
    """Make the modules in `names` compute in float32 inside an autocast region."""
    for name in names:
        _keep(model.get_submodule(name), device_type)


def _keep(module: nn.Module, device_type: str) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return inner(*tree_map(_up, args), **tree_map(_up, kwargs))

    module.forward = forward


def _up(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value
