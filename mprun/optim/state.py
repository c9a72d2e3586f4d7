"""The state of one parameter, and what is checked and clipped of its gradient.

    step        attempts that were taken, a float32 scalar
    moments     under PyTorch's names (`exp_avg`); a second moment in 16 or 8 bits is stored as its
                square root, under its name with `_root`
    scales      of a moment in 8 bits, under its name with `_scale`: float32, one per 256 numbers
    remainder   int16, with rounding kahan; int8, with rounding split

An entry is converted where options, the device or the saved state differ from what a step needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mprun.optim import formulas
from mprun.optim.formulas import Storage, root, scale
from mprun.precision import devices, rounding
from mprun.precision.loss_scale import Combine
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
    return (formulas.scales_for(p.numel()),) if name.endswith(scale_name("")) else tuple(p.shape)


def complete_state(
    state: dict[str, Tensor], p: Tensor, storage: Storage, first: str, second: str | None
) -> None:
    """Make or convert the entries of `state` that a step on `p` needs, in place.

    `first` and `second` are PyTorch's names of the moments. Raises `ValueError` if an entry has not
    the parameter's shape: the engines would read beyond it.
    """
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
    state["step"] = state["step"].to(p.device)
    name_of_second = second_name(second, storage)
    # The option `variance_dtype` may have changed, or the state is torch.optim's
    if storage.second and name_of_second not in state:
        _change_root(state, f"{second}")
    if storage.first:
        _complete_moment(state, p, first, storage.first, storage.formula in formulas.QUOTIENTS)
    if storage.second:
        _complete_moment(state, p, name_of_second, storage.second, True)
    if storage.remainder:
        rest = _checked(state, "remainder", p)
        if rest is None:
            rest = torch.zeros(p.shape, dtype=storage.remainder, device=p.device)
        rest = rest.to(p.device)
        state["remainder"] = rounding.converted(p.detach(), rest, storage.remainder)


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
    elif entry.dtype != dtype or has_scales != (dtype == formulas.DTYPE):
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
    if dtype == formulas.DTYPE:
        values = formulas.maps(p)[1 if name.endswith("_root") else 0]
        coded, state[scale_name(name)] = formulas.encode(x.reshape(-1), values, None)
        state[name] = coded.view(x.shape)
    else:
        # Saturated, because an infinite moment stays infinite
        state[name] = x if dtype == torch.float32 else round_nearest(x, dtype, "saturate")


def _taken(state: dict[str, Tensor], name: str, scaled: bool) -> Tensor:
    """A moment in float32, removed from `state` with its scales; `ValueError` if it lacks them."""
    entry, scales = state.pop(name), state.pop(scale_name(name), None)
    if entry.dtype != formulas.DTYPE:
        return entry.float() / scale(entry.dtype) if scaled else entry.float()
    if scales is None:
        raise ValueError(f"{name} in uint8 without {scale_name(name)}; legal is a state with both")
    values = formulas.maps(entry)[1 if name.endswith("_root") else 0]
    return formulas.decode(entry.reshape(-1), scales.to(entry.device), values).view(entry.shape)


def _change_root(state: dict[str, Tensor], second: str) -> None:
    """Replace a second moment by its root, or a root by its square."""
    if second in state:
        state[f"{second}_root"] = root(state.pop(second).float())
    elif f"{second}_root" in state:
        state[second] = _taken(state, f"{second}_root", True) ** 2


def check_saved(state_dict: dict[str, Any]) -> None:
    """Raise `ValueError` for a state of `torch.optim` whose options give another formula."""
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


# What parameters, gradients and moments can be
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def not_finite(gradients: Iterable[Tensor], device: torch.device, combine: Combine) -> Tensor:
    """1 where a gradient holds an infinity or NaN, else 0: a float32 scalar on `device`."""
    # The largest magnitude is infinite or NaN where any number is: one pass, and no copy
    largest = [torch.linalg.vector_norm(g, float("inf")).float() for g in gradients]
    if not largest:
        return combine.overflow(torch.zeros((), device=device))
    return combine.overflow((~torch.isfinite(torch.stack(largest)).all()).float().to(device))


def clipping_scale(
    gradients: Sequence[Tensor],
    scale: Tensor | None,
    max_norm: float,
    device: torch.device,
    combine: Combine,
) -> Tensor:
    """What to divide the gradients by for a norm of at most `max_norm`; `scale` or more."""
    total = devices.wide(combine.total_norm(_norm(gradients, device)))
    divisor = torch.ones_like(total) if scale is None else devices.wide(scale)
    # 1e-6 as in PyTorch's clip_grad_norm_; `total` is that of scaled gradients
    wide: Tensor = divisor * ((total / divisor + 1e-6) / max_norm).clamp(min=1.0)
    return wide


def _norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The L2 norm of all gradients together, a float32 scalar on `device`."""
    if not gradients:  # of this process, but others wait for its norm
        return torch.zeros((), device=device)
    # In float32: in float16 the squares of a few hundred overflow
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def check_operands(p: Tensor, gradient: Tensor, kind: str) -> None:
    """Refuse what the optimizer `kind` has no step for.

    Raises:
        RuntimeError: a sparse gradient.
        TypeError: a sharded parameter, or a dtype that is none of `DTYPES`.
        ValueError: the gradient has another shape or device than the parameter.
    """
    if gradient.is_sparse:
        raise RuntimeError(
            f"mprun.optim.{kind} does not take sparse gradients (nn.Embedding(sparse=True) makes "
            "them); legal: dense ones (sparse=False), or an optimizer of torch.optim that takes "
            "them, with float32 parameters"
        )
    if hasattr(p, "to_local"):
        raise TypeError(
            f"{kind} does not take sharded parameters (DTensor); legal: parallel=fsdp2 of mprun, "
            "local shards (p.to_local()) marked with mprun.optim.mark_shard, or whole parameters"
        )
    for name, x in (("parameter", p), ("gradient", gradient)):
        if x.dtype not in DTYPES:
            raise TypeError(f"a {name} of {x.dtype}; legal: {', '.join(map(str, DTYPES))}")
    # PyTorch checks this for `p.grad = ...`, but not for `p.data = ...`.
    if gradient.shape != p.shape or gradient.device != p.device:
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} on {gradient.device} for a parameter of "
            f"{tuple(p.shape)} on {p.device}; legal is the same: zero_grad() after such a change"
        )
