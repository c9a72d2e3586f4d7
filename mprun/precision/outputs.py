"""A model's outputs, whatever they are made of, with the floating tensors in one dtype."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating tensor in it in `dtype`.

    Tuples, named tuples, lists, mappings and dataclasses keep their type (Transformers'
    `ModelOutput` is both of the last two); other leaves pass, and so does what holds no tensor to
    convert: it is returned itself, not a copy.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return _sequence(value, [to_dtype(x, dtype) for x in value])
    if isinstance(value, MutableMapping):
        made = {k: to_dtype(v, dtype) for k, v in value.items()}
        return _with(value, {k: v for k, v in made.items() if v is not value[k]}, _set_item)
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name, None) for f in fields(value)}
        made = {k: to_dtype(v, dtype) for k, v in held.items()}
        return _with(value, {k: v for k, v in made.items() if v is not held[k]}, _set_field)
    return value


def _sequence(value: Any, made: list[Any]) -> Any:
    if all(new is old for new, old in zip(made, value, strict=True)):
        return value
    kind = type(value)
    if hasattr(kind, "_make"):  # a named tuple
        return kind._make(made)
    if isinstance(value, list) and kind is not list:
        copied = copy.copy(value)
        copied[:] = made
        return copied
    return kind(made)


def _with(value: Any, changes: dict[Any, Any], put: Any) -> Any:
    """A shallow copy of `value` with some of its entries replaced."""
    if not changes:
        return value
    copied = copy.copy(value)
    for key, new in changes.items():
        put(copied, key, new)
    return copied


def _set_item(mapping: Any, key: Any, new: Any) -> None:
    mapping[key] = new


def _set_field(instance: Any, name: Any, new: Any) -> None:
    object.__setattr__(instance, name, new)  # a frozen one too
