"""Bringing a model to a device, a dtype and a memory format.

What `Module.to` does in place, done with new `Parameter` objects: in-place conversion cannot be
done on fake tensors, which the memory figures are taken on. Call it before an optimizer is made.

Running statistics of PyTorch's batch and instance norms stay in float32. They are no parameters,
a handful of numbers a layer, and 16 bits do not hold them: a variance above 65,504 overflows in
float16, and a moving average that is rounded at each step stops short of its mean, in bfloat16 up
to 4 % short. Training does not use those values, evaluation does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from mprun.precision.forwards import Float32Statistics

T = TypeVar("T")
STATISTICS = ("running_mean", "running_var")


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
        dtype: what floating ones become, but for running statistics (see above).
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
        wide = torch.float32 if keeps_wide_statistics(module) else wanted
        for name, tensor in [*module.named_parameters(**every), *module.named_buffers(**every)]:
            becomes = wide if name in STATISTICS else wanted
            setattr(module, name, converted(tensor, becomes, f"{path}.{name}"))
        own_forward = isinstance(vars(module).get("forward"), Float32Statistics)
        if wide != wanted and not own_forward:
            module.forward = Float32Statistics(module)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return model


def keeps_wide_statistics(module: nn.Module) -> bool:
    """Whether `module` has running statistics, and a forward of PyTorch's that takes float32 ones.

    A subclass with a forward of its own may compute with them otherwise, and instance norm's kernel
    without weights averages statistics in its input's dtype: theirs are stored as their parameters.
    """
    forward = type(module).forward
    known = forward is _BatchNorm.forward or (
        forward is _InstanceNorm.forward and module.weight is not None
    )
    return known and module.running_mean is not None


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
