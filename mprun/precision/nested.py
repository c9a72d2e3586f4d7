"""Tensors inside other things: batches, and a model's inputs and outputs, nested as they like.

Tuples, named tuples, lists, mappings and dataclasses are visited (Transformers' `ModelOutput` is
both of the last two), and keep their type. Other leaves pass. A value without a change is returned
itself, not a copy.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (int, float, str, type(None), torch.dtype)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with `function` applied to each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return with_items(value, [map_tensors(function, x) for x in value])
    if isinstance(value, _PLAIN):  # first, as this runs before every op of an op list
        return value
    if isinstance(value, MutableMapping):
        new = {k: map_tensors(function, v) for k, v in value.items()}
        return _with(value, {k: v for k, v in new.items() if v is not value[k]}, operator.setitem)
    if is_dataclass(value) and not isinstance(value, type):
        old = {f.name: getattr(value, f.name, None) for f in fields(value)}
        new = {k: map_tensors(function, v) for k, v in old.items()}
        changes = {k: v for k, v in new.items() if v is not old[k]}
        return _with(value, changes, object.__setattr__)  # a frozen one too
    return value


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among `values` and in the lists and tuples among them, as ops take them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def children(value: Any) -> list[Any] | None:
    """What a container holds; None for what is none."""
    if isinstance(value, Tensor):  # first: the other checks take longer
        return None
    if isinstance(value, tuple | list):
        return [*value]
    if isinstance(value, Mapping):
        return [*value.values()]
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name, None) for f in fields(value)]
    return None


def leaves(value: Any) -> Iterator[Any]:
    """What `value` holds that is no container: tensors, numbers, strings and the rest."""
    inside = children(value)
    if inside is None:
        yield value
    for child in inside or ():
        yield from leaves(child)


def all_tensors(value: Any) -> list[Tensor]:
    """The tensors in `value`, in its order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def copied_model(model: nn.Module) -> nn.Module:
    """A copy of a model. Tensors that it keeps with their graph (a balance loss) lose it there.

    `copy.deepcopy` alone refuses such a model. In a region of fake tensors all of the copy's are.
    """
    kept = [x for module in model.modules() for x in all_tensors(list(vars(module).values()))]
    if type(torch.empty(0)) is not Tensor:  # a fake one, whose ops take no others
        return copy.deepcopy(model, {id(x): _of_this_region(x) for x in kept})
    return copy.deepcopy(model, {id(x): x.detach().clone() for x in kept if not x.is_leaf})


def _of_this_region(x: Tensor) -> Tensor:
    new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating tensor in it in `dtype`."""
    if isinstance(value, Tensor) and value.dtype == dtype:
        return value
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, value)


def with_items(value: Any, items: list[Any]) -> Any:
    """A tuple or list of the type of `value` with these items; `value` itself if it has them."""
    if all(map(operator.is_, items, value)):
        return value
    kind = type(value)
    if hasattr(kind, "_make"):  # a named tuple
        return kind._make(items)
    if isinstance(value, list) and kind is not list:
        copied = copy.copy(value)
        copied[:] = items
        return copied
    return kind(items)


def _with(value: Any, changes: dict[Any, Any], put: Callable[[Any, Any, Any], None]) -> Any:
    """A shallow copy of `value` with some of its entries replaced."""
    if not changes:
        return value
    copied = copy.copy(value)
    for key, new in changes.items():
        put(copied, key, new)
    return copied
