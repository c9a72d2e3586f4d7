"""The state of a metric as plain values and tensors, as a checkpoint holds it.

A metric of torchmetrics has `state_dict`, once its states are marked as persistent. Another one has
its own `state_dict` and `load_state_dict`, or attributes that are numbers, text, tensors, lists,
tuples and dicts of them, or further objects of such attributes. Functions, classes, dtypes and
devices among them do not change. Anything else could: such a metric has no state.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, str)
_CONSTANT = (
    *(types.FunctionType, types.BuiltinFunctionType, type),
    *(types.ModuleType, torch.dtype, torch.device, Enum),
)


class UnsavableError(Exception):
    """A metric has no state that a checkpoint can hold."""


def saved_state(metric: Any) -> Any:
    """The state of a metric.

    Raises:
        UnsavableError: it has none.
    """
    if isinstance(metric, nn.Module):
        _mark_persistent(metric)
        return _copied(dict(metric.state_dict()))
    if _has_own(metric):
        return _copied(metric.state_dict())
    if isinstance(metric, dict | list | tuple | set | frozenset):  # has more than attributes
        raise UnsavableError
    if not hasattr(metric, "__dict__") or any(map(_has_slots, type(metric).__mro__)):
        raise UnsavableError
    changing = {k: v for k, v in vars(metric).items() if not isinstance(v, _CONSTANT)}
    return {k: _copied(v) if _is_plain(v) else saved_state(v) for k, v in changing.items()}


def load_state(metric: Any, state: Any) -> None:
    """Set the state of `saved_state` on a metric of the same class."""
    if isinstance(metric, nn.Module):
        _mark_persistent(metric)
        metric.load_state_dict(state)
    elif _has_own(metric):
        metric.load_state_dict(state)
    else:
        for name, value in state.items():
            own = getattr(metric, name, None)
            if _is_plain(own):
                setattr(metric, name, value)
            else:
                load_state(own, value)


def _mark_persistent(metric: Any) -> None:
    """Make the states of a metric of torchmetrics part of its `state_dict`."""
    if not callable(getattr(metric, "persistent", None)):
        raise UnsavableError
    metric.persistent(True)


def _has_own(metric: Any) -> bool:
    has: Callable[[str], bool] = lambda name: callable(getattr(metric, name, None))  # noqa: E731
    return has("state_dict") and has("load_state_dict")


def _has_slots(kind: type) -> bool:
    return bool(vars(kind).get("__slots__"))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, value)) and _are_plain(value.values())
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and _are_plain(value)
    return type(value) in _PLAIN or isinstance(value, Tensor)


def _are_plain(values: Any) -> bool:
    return all(map(_is_plain, values))


def _copied(value: Any) -> Any:
    """A copy that later batches do not change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    if type(value) not in _PLAIN:
        raise UnsavableError
    return value
