"""The state of one parameter: its step count, moments and Kahan remainder.

    step        attempts that were taken, a float32 scalar
    moments     under PyTorch's names (`exp_avg`); a second moment in 16 bits is stored as its
                square root, under its name with `_root`
    remainder   int16, with rounding kahan

An entry is converted where options, the device or the saved state differ from what a step needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mprun.optim.formulas import Storage, root, scale
from mprun.precision.rounding import round_nearest


def second_name(second: str | None, storage: Storage) -> str:
    """The entry that holds the second moment, which PyTorch's optimizer calls `second`."""
    return f"{second}_root" if storage.root else f"{second}"


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
    needed = {
        first: storage.first,
        name_of_second: storage.second,
        "remainder": torch.int16 if storage.compensated else None,
    }
    for name, dtype in needed.items():
        if dtype is None:
            continue
        entry = state.get(name)
        if entry is None:
            state[name] = torch.zeros(p.shape, dtype=dtype, device=p.device)
        elif entry.shape != p.shape:
            raise ValueError(
                f"{name} of shape {tuple(entry.shape)} for a parameter of {tuple(p.shape)}; "
                "legal is the same: load a state of this model, or clear the optimizer's state"
            )
        elif entry.dtype != dtype or entry.device != p.device:
            scaled = name != first or storage.formula == "adamw"
            state[name] = _converted(entry, dtype, scaled).to(p.device)


def _change_root(state: dict[str, Tensor], second: str) -> None:
    """Replace a second moment by its root, or a root by its square."""
    if second in state:
        state[f"{second}_root"] = root(state.pop(second).float())
    elif f"{second}_root" in state:
        old = state.pop(f"{second}_root")
        state[second] = (old.float() / scale(old.dtype)) ** 2


def _converted(entry: Tensor, dtype: torch.dtype, scaled: bool) -> Tensor:
    """An entry in another dtype, rounded to nearest; `scaled` ones by `formulas.scale`."""
    if dtype == torch.int16:
        return entry.to(dtype)
    x = entry.float() * (scale(dtype) / scale(entry.dtype)) if scaled else entry.float()
    return x if dtype == torch.float32 else round_nearest(x, dtype, "saturate")


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
