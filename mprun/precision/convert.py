"""Bringing a model to a device, a dtype and a memory format.

What `Module.to` does in place, done with new `Parameter` objects: in-place conversion cannot be
done on fake tensors, which the memory figures are taken on. Call it before an optimizer is made.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def convert(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> nn.Module:
    """`model` itself, with its parameters and buffers replaced.

    Args:
        model: the model; tied parameters stay tied.
        device: where parameters and buffers go.
        dtype: what floating ones become.
        memory_format: of those with four dimensions.
    """
    made: dict[int, Tensor] = {}

    def converted(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            target = dtype if tensor.is_floating_point() else tensor.dtype
            new = tensor.detach().to(device, target)
            if new.dim() == 4:
                new = new.contiguous(memory_format=memory_format)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
        return made[id(tensor)]

    for module in model.modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            setattr(module, name, converted(tensor))
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return model
