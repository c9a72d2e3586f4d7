"""The gradients of a low-precision step: what is checked, and how their norm is clipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mprun import devices
from mprun.precision.combine import Combine

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What parameters, gradients and moments can be."""


def not_finite(gradients: Iterable[Tensor], device: torch.device, combine: Combine) -> Tensor:
    """1 where a gradient holds an infinity or NaN, else 0: a float32 scalar on `device`."""
    return combine.overflow(_not_finite(gradients, device))


def _not_finite(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    largest = [torch.linalg.vector_norm(g, float("inf")).float() for g in gradients]
    if not largest:
        return torch.zeros((), device=device)
    return (~torch.isfinite(torch.stack(largest)).all()).float().to(device)


def clipping_scale(
    gradients: Sequence[Tensor],
    scale: Tensor | None,
    max_norm: float,
    device: torch.device,
    combine: Combine,
) -> Tensor:
    """What to divide the gradients by for a norm of at most `max_norm`; `scale` or more.

    Norms are summed in float32: in float16 the squares of a few hundred overflow.
    """
    total = devices.wide(combine.total_norm(_norm(gradients, device)))
    divisor = torch.ones_like(total) if scale is None else devices.wide(scale)
    wide: Tensor = divisor * ((total / divisor + 1e-6) / max_norm).clamp(min=1.0)
    return wide


def _norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The L2 norm of all gradients together, a float32 scalar on `device`."""
    if not gradients:  # of this process, but others wait for its norm
        return torch.zeros((), device=device)
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
