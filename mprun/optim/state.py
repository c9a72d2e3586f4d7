"""The state of one parameter: its step count, moments and remainder.

    step        attempts that were taken, a float32 scalar
    moments     under PyTorch's names (`exp_avg`); a second moment in 16 or 8 bits is stored as its
                square root, under its name with `_root`
    scales      of a moment in 8 bits, under its name with `_scale`: float32, one per 256 numbers
    remainder   int16, with rounding kahan; int8, with rounding split

An entry is converted where options, the device or the saved state differ from what a step needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mprun.optim import codes
from mprun.optim.formulas import Storage, root, scale
from mprun.precision import split_masters
from mprun.precision.rounding import round_nearest


def second_name(second: str | None, storage: Storage) -> str:
    """The entry that holds the second moment, which PyTorch's optimizer calls `second`."""
    return f"{second}_root" if storage.root else f"{second}"


def scale_name(moment: str) -> str:
    """The entry that holds the scales of a moment in 8 bits."""
    return f"{moment}_scale"


def entry_shape(name: str, p: Tensor) -> tuple[int, ...]:
    """The shape that an entry of the state of `p` has."""
    if name == "step":
        return ()
    return (codes.scales_for(p.numel()),) if name.endswith(scale_name("")) else tuple(p.shape)


def complete_state(
    state: dict[str, Tensor], p: Tensor, storage: Storage, first: str, second: str | None
) -> None:
    """Make or convert the entries of `state` that a step on `p` needs.

    Args:
        state: the entries; changed in place.
        storage: how the step stores its results.
        first, second: PyTorch's names of the moments.

    Raises:
        ValueError: an entry has not the parameter's shape; the engines would read beyond it.
    """
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
    state["step"] = state["step"].to(p.device)
    name_of_second = second_name(second, storage)
    if storage.second and name_of_second not in state:
        _change_root(state, f"{second}")
    if storage.first:
        _complete_moment(state, p, first, storage.first, storage.formula == "adamw")
    if storage.second:
        _complete_moment(state, p, name_of_second, storage.second, True)
    if storage.remainder:
        rest = _checked(state, "remainder", p)
        if rest is None:
            rest = torch.zeros(p.shape, dtype=storage.remainder, device=p.device)
        rest = rest.to(p.device)
        state["remainder"] = split_masters.converted(p.detach(), rest, storage.remainder)


def _checked(state: dict[str, Tensor], name: str, p: Tensor) -> Tensor | None:
    """An entry, None where there is none; raises `ValueError` where it has another shape."""
    entry = state.get(name)
    if entry is not None and entry.shape != entry_shape(name, p):
        raise ValueError(
            f"{name} of shape {tuple(entry.shape)} for a parameter of {tuple(p.shape)}; legal is "
            f"{entry_shape(name, p)}: load a state of this model, or clear the optimizer's state"
        )
    return entry


def _complete_moment(
    state: dict[str, Tensor], p: Tensor, name: str, dtype: torch.dtype, scaled: bool
) -> None:
    """Make or convert a moment; one in float16 is stored times `formulas.SCALE` if `scaled`."""
    entry, scales = _checked(state, name, p), scale_name(name)
    has_scales = _checked(state, scales, p) is not None
    if entry is None:
        _write_moment(state, p, name, torch.zeros(p.shape, device=p.device), dtype)
    elif entry.dtype != dtype or has_scales != (dtype == codes.DTYPE):
        factor = scale(dtype) if scaled else 1.0
        x = _taken(state, name, scaled).to(p.device)
        _write_moment(state, p, name, x if factor == 1 else x * factor, dtype)
    elif entry.device != p.device:
        for moved in (name, scales)[: 1 + has_scales]:
            state[moved] = state[moved].to(p.device)


def _write_moment(
    state: dict[str, Tensor], p: Tensor, name: str, x: Tensor, dtype: torch.dtype
) -> None:
    """Store `x` (float32) in `dtype`, rounded to nearest."""
    if dtype == codes.DTYPE:
        values = codes.maps(p)[1 if name.endswith("_root") else 0]
        coded, state[scale_name(name)] = codes.encode(x.reshape(-1), values, None)
        state[name] = coded.view(x.shape)
    else:
        state[name] = x if dtype == torch.float32 else round_nearest(x, dtype, "saturate")


def _taken(state: dict[str, Tensor], name: str, scaled: bool) -> Tensor:
    """A moment in float32, removed from `state` with its scales.

    Raises:
        ValueError: it is in 8 bits and has no scales.
    """
    entry, scales = state.pop(name), state.pop(scale_name(name), None)
    if entry.dtype != codes.DTYPE:
        return entry.float() / scale(entry.dtype) if scaled else entry.float()
    if scales is None:
        raise ValueError(f"{name} in uint8 without {scale_name(name)}; legal is a state with both")
    values = codes.maps(entry)[1 if name.endswith("_root") else 0]
    return codes.decode(entry.reshape(-1), scales.to(entry.device), values).view(entry.shape)


def _change_root(state: dict[str, Tensor], second: str) -> None:
    """Replace a second moment by its root, or a root by its square."""
    if second in state:
        state[f"{second}_root"] = root(state.pop(second).float())
    elif f"{second}_root" in state:
        state[second] = _taken(state, f"{second}_root", True) ** 2


def check_saved(state_dict: dict[str, Any]) -> None:
    """Refuse a state of `torch.optim` whose options give another formula.

    Raises:
        ValueError: such an option is set.
    """
    for group in state_dict["param_groups"]:
        for name in ("amsgrad", "centered", "maximize"):
            if group.get(name):
                raise ValueError(f"{name}={group[name]} in the state; legal is False")


def loaded_entries(saved: dict[str, Any], device: torch.device, ours: bool) -> dict[str, Tensor]:
    """Copies of the saved entries of one parameter, on `device`; `torch.optim`'s in float32."""
    state = {k: torch.as_tensor(v).to(device, copy=True) for k, v in saved.items() if v is not None}
    if ours:
        return state
    state = {k: v.float() for k, v in state.items()}  # their 16 bits are neither scaled nor a root
    if state:  # torch.optim.SGD counts no steps; this state comes from one step or more
        state.setdefault("step", torch.ones((), device=device))
    return state
