"""Modules in a precision of their own, by name.

Some regions do not survive 16 bits (decompositions, long sums, losses inside a model), others could
do with fewer than the mode gives them. What `precision.layers` means for a module depends on where
the mode's dtypes come from:

    casting none      the module's parameters are stored in that dtype, and it computes in it;
                      every layer casts its inputs to the dtype of its own parameters
    casting autocast, parameters stay float32; fp32 switches casts off inside the module, fp16 and
    op_lists          bf16 make them go to that dtype

A key is a module's name as `model.named_modules()` gives it, or a glob over such names. An exact
name wins over globs; two globs that fit one module, and a key that fits none, are errors. A module
inside a kept one is kept with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._pytree import tree_map

from mprun.precision.convert import dtype_of


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


class LayerRow(NamedTuple):
    """A module with parameters of its own and its dtypes, by PyTorch's names."""

    name: str
    kind: str
    parameters: str
    compute: str


def layer_rows(model: nn.Module, named: Mapping[str, str], compute: str) -> list[LayerRow]:
    """The dtypes of a prepared model's layers.

    Args:
        model: the model.
        named: module names to fp32, fp16 or bf16, as `resolve` gives them.
        compute: what all other layers compute in.
    """
    dtypes = {name: str(LAYER_DTYPES[d]).removeprefix("torch.") for name, d in named.items()}
    rows = []
    for name, module in model.named_modules():
        own = next((p for p in module.parameters(recurse=False) if p.is_floating_point()), None)
        if own is not None:
            stored = str(own.dtype).removeprefix("torch.")
            kind = type(module).__name__
            rows.append(LayerRow(name, kind, stored, dtype_of(name, dtypes, compute)))
    return rows


LAYER_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""What a layer can be kept in, by the names users write."""


def compute_in(
    model: nn.Module,
    named: Mapping[str, torch.dtype],
    layer_region: Callable[[torch.dtype], Callable[[], AbstractContextManager[object]]],
) -> None:
    """Make modules compute in a dtype of their own where a caster decides; parameters stay.

    Args:
        model: the model.
        named: module name to its dtype, which its floating inputs are cast to.
        layer_region: a caster's regions for a dtype (`Caster.layer_region`).
    """
    for name, dtype in named.items():
        _wrap(model.get_submodule(name), layer_region(dtype), dtype)


@contextmanager
def computing_in(
    model: nn.Module,
    named: Mapping[str, torch.dtype],
    layer_region: Callable[[torch.dtype], Callable[[], AbstractContextManager[object]]],
) -> Iterator[None]:
    """`compute_in` for as long as this is entered."""
    modules = [model.get_submodule(name) for name in named]
    before = [vars(module).get("forward") for module in modules]
    compute_in(model, named, layer_region)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def cast_at_borders(model: nn.Module) -> None:
    """Make every module that has parameters of its own cast its floating inputs to their dtype.

    As Keras' layers do; what a layer hands on keeps its dtype until the next one.
    """
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        floating = [x.dtype for x in own if x.is_floating_point()]
        if floating:
            _wrap(module, nullcontext, floating[0])


def to_layer(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in a layer's dtype, at its border; told from a model's own casts by function modes."""
    if has_torch_function_unary(x):
        return handle_torch_function(to_layer, (x,), x, dtype)
    return x.to(dtype)


to_layer.cast_rule = "layer policy"  # type: ignore[attr-defined]


def _wrap(
    module: nn.Module, region: Callable[[], AbstractContextManager[object]], dtype: torch.dtype
) -> None:
    inner = module.forward

    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.dtype in LAYER_DTYPES.values()
        return to_layer(value, dtype) if floating else value

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(cast, args), tree_map(cast, kwargs)
        with region():
            return inner(*args, **kwargs)

    module.forward = forward
