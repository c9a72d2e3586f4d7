"""Bringing a model to a device, a dtype and a memory format.

What `Module.to` does in place, done with new `Parameter` objects: in-place conversion cannot be
done on fake tensors, which the memory figures are taken on. Call it before an optimizer is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def convert(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    memory_format: torch.memory_format = torch.contiguous_format,
    layers: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """`model` itself, with its parameters and buffers replaced.

    Args:
        model: the model; tied parameters stay tied.
        device: where parameters and buffers go.
        dtype: what floating ones become.
        memory_format: of those with four dimensions.
        layers: module names to another dtype, for the module and all inside it.

    Raises:
        ValueError: `layers` gives one tied parameter two dtypes.
    """
    made: dict[int, Tensor] = {}

    def converted(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        target = dtype if tensor.is_floating_point() else tensor.dtype
        if id(tensor) not in made:
            new = tensor.detach().to(device, target)
            if new.dim() == 4:
                new = new.contiguous(memory_format=memory_format)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
        elif made[id(tensor)].dtype != target:
            raise ValueError(f"precision.layers: '{name}' is tied to a parameter of another dtype")
        return made[id(tensor)]

    for path, module in model.named_modules():
        wanted = dtype_of(path, layers or {}, dtype)
        every = {"recurse": False, "remove_duplicate": False}  # each name of a tied one too
        for name, tensor in [*module.named_parameters(**every), *module.named_buffers(**every)]:
            setattr(module, name, converted(tensor, wanted, f"{path}.{name}"))
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return model


def dtype_of(path: str, layers: Mapping[str, T], default: T) -> T:
    """The dtype at `path`, a module or parameter: its own in `layers`, or the nearest parent's."""
    while path:
        if path in layers:
            return layers[path]
        path = path.rpartition(".")[0]
    return default


def accumulate_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the gradients of 16-bit parameters in `dtype` where that is wider than their own."""
    for p in model.parameters():
        if p.requires_grad and p.dtype != torch.float32 and dtype == torch.float32:
            p.grad_dtype = dtype
