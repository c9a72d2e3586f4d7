"""Whether a saved state has the form of the state that it replaces.

Loading a state into an object checks little: a text in place of a learning rate, or a moment of
another shape, is noticed in a later step or never. The state of the assembled run says what each
place must hold, so a saved state is compared with it before it is loaded: kinds of values, dtypes
and shapes of tensors. Places that only one of the two has are left to the loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mprun.optim import LowPrecisionOptimizer
from mprun.optim.state import entry_shape

SCALAR = (int, float, type(None))
KNOWN = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.AdamW, LowPrecisionOptimizer)
"""Optimizers whose moments all have the shape of the parameter."""


def differences(fresh: Any, saved: Any, name: str) -> Iterator[str]:
    """Each place where a saved state has another form, with both forms.

    Args:
        fresh: the state of the assembled run.
        saved: the state to load.
        name: of the state, the beginning of each place's name.
    """
    if isinstance(fresh, Mapping) and isinstance(saved, Mapping):
        for key in fresh:
            if key in saved:
                yield from differences(fresh[key], saved[key], f"{name}.{key}")
    elif isinstance(fresh, list | tuple) and isinstance(saved, list | tuple):
        for place, (one, other) in enumerate(zip(fresh, saved, strict=False)):
            yield from differences(one, other, f"{name}[{place}]")
    elif not _fits(fresh, saved):
        yield f"{name} is {form(saved)}, not {form(fresh)}"


def check_form(fresh: Any, saved: Any, name: str) -> None:
    """Check that a saved state has the form of the state of the assembled run.

    Raises:
        ValueError: it has another one, with the first place.
    """
    for difference in differences(fresh, saved, name):
        raise ValueError(difference)


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Check that each entry that was loaded has the shape of its parameter, or is one number.

    Those of optimizers that are not `KNOWN` may also have one value for each row or column.

    Raises:
        ValueError: it has another one.
    """
    free = not isinstance(optimizer, KNOWN)
    for p, entries in optimizer.state.items():
        for name, entry in entries.items():
            if isinstance(entry, Tensor):
                own = () if free else entry_shape(name, p)
                fits = entry.shape in ((), p.shape, own) or (free and _spreads_over(entry, p))
            else:  # PyTorch's without momentum, and a count of steps of earlier versions
                count = (name == "step" or free) and isinstance(entry, int | float)
                fits = entry is None or count
            if not fits:
                raise ValueError(
                    f"optimizer.{name} is {form(entry)}, of a parameter that is {form(p)}"
                )


def _spreads_over(entry: Tensor, p: Tensor) -> bool:
    """Whether it has one value, or as many as the parameter, along each dimension (Adafactor)."""
    sizes = zip(entry.shape, p.shape, strict=False)
    return entry.dim() == p.dim() and all(own in (1, whole) for own, whole in sizes)


def _fits(fresh: Any, saved: Any) -> bool:
    if isinstance(fresh, Tensor):
        if not isinstance(saved, Tensor) or saved.dtype != fresh.dtype:
            return False
        grows = fresh.shape == (0,)  # a series of figures, which has none yet
        return saved.dim() == 1 if grows else saved.shape == fresh.shape
    if fresh is None:  # not known yet
        return isinstance(saved, SCALAR)
    if saved is None:  # an earlier version did not know it
        return isinstance(fresh, Mapping)
    if isinstance(fresh, bool) or isinstance(saved, bool):
        return type(fresh) is type(saved)
    if isinstance(fresh, float):
        return isinstance(saved, int | float)
    return isinstance(saved, type(fresh))


def form(value: Any) -> str:
    """The form of a value as text: a tensor's dtype and shape, a number or short text itself."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {' x '.join(map(str, value.shape))}".rstrip()
    if isinstance(value, (*SCALAR, str)):
        return repr(value)[:40]
    return f"a {type(value).__name__}"
