"""Whether gradients are finite, at a price that a training step does not notice.

Every gradient is read once: the sum of its squares (of its values in 16 bits) is finite only if
each value is. A sum may overflow without a fault, so an alarm is confirmed value by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimizer's next step reads."""
    held = (p.grad for group in optimizer.param_groups for p in group["params"])
    return [_values(g) for g in held if g is not None]


def all_finite(tensors: list[Tensor]) -> Tensor | bool:
    """Whether every value is finite; False, too, where a sum overflows.

    A boolean on the CPU; elsewhere a tensor, which is read later so that nothing waits for it.
    """
    with torch.no_grad():
        if all(x.is_cpu for x in tensors):
            return isfinite(sum([float(_sum(x)) for x in tensors]))
        sums = [_sum(x).to(tensors[0].device, torch.float32) for x in tensors]
        return torch.stack(sums).isfinite().all()


def _sum(x: Tensor) -> Tensor:
    if x.dtype is torch.float32 and x.is_contiguous():
        flat = x.view(-1)
        return flat.dot(flat)
    return x.sum(dtype=torch.float32)


def nonfinite_names(tensors: Mapping[str, Tensor | None]) -> Iterator[str]:
    """The names of those with a NaN or an infinity, value by value."""
    for name, x in tensors.items():
        if x is not None and x.is_floating_point() and not _values(x).isfinite().all():
            yield name


def gradients_by_name(model: nn.Module) -> dict[str, Tensor | None]:
    """`gradient of fc1.weight` and so on."""
    return {f"the gradient of {name}": p.grad for name, p in model.named_parameters()}


def _values(x: Tensor) -> Tensor:
    """The stored values of a sparse tensor."""
    x = x.detach() if x.requires_grad else x
    return x.coalesce().values() if x.is_sparse else x
