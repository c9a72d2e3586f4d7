"""Bringing a model to a device, a dtype and a memory format.

`Module.to` does it in place. Here new `Parameter` objects take the place of the old ones, because
fake tensors, on which mprun counts memory, cannot be converted in place. Convert a model before its
optimizer is made.

Running statistics of PyTorch's batch and instance norms stay in float32. Training does not use
those values, evaluation does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mprun.precision._torch import BatchNorm, InstanceNorm, own_parameters

T = TypeVar("T")
# In float32, a few numbers per layer: a variance above 65,504 overflows in float16, and a moving
# average that is rounded at each step stops up to 4 % before its mean in bfloat16
STATISTICS = ("running_mean", "running_var")


class ForwardWrapper:
    """A module's forward with code around it, to be put in place of `module.forward`.

    It is an object with the module in a field, not a closure. So a copy or pickle of the model has
    a copy of it that is bound to the copied module.

    Args:
        module: the module, whose `forward` the caller replaces by this.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.before = vars(module).get("forward")
        """What it wraps, another wrapper; None for the class's own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


@contextmanager
def forwards_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """At the end these modules have the forward again that they have now."""
    before = {module: vars(module).get("forward") for module in modules}
    try:
        yield
    finally:
        for module, forward in before.items():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


class Float32Statistics(ForwardWrapper):
    """The forward of a norm layer with 16-bit parameters and float32 running statistics.

    PyTorch's kernels take 16-bit inputs with statistics and parameters in float32, but not with
    16-bit parameters. So those are widened for the call; the output has the input's dtype.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters: dict[str, Any] = own_parameters(self._module)
        stored = dict(parameters)
        parameters.update({k: None if p is None else p.float() for k, p in stored.items()})
        try:
            return super().__call__(*args, **kwargs)
        finally:
            parameters.update(stored)


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
        dtype: of floating ones, except for running statistics (see above).
        memory_format: of those with four dimensions.
        layers: module names to another dtype, for the module and all inside it.

    Raises:
        ValueError: `layers` gives one tied parameter two dtypes.
    """
    converted: dict[int, Tensor] = {}

    def to_target(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        target = dtype if tensor.is_floating_point() else tensor.dtype
        if id(tensor) not in converted:
            new = tensor.detach().to(device, target)
            if new.dim() == 4:
                # `contiguous` keeps the strides of a tensor with one channel, which is in both
                # formats; then convolutions would give their outputs in the other one.
                new = new.to(memory_format=memory_format)
            if isinstance(tensor, nn.Parameter):
                new = _with_hooks_of(tensor, nn.Parameter(new, requires_grad=tensor.requires_grad))
            converted[id(tensor)] = new
        elif converted[id(tensor)].dtype != target:
            raise ValueError(f"precision.layers: '{name}' is tied to a parameter of another dtype")
        return converted[id(tensor)]

    for path, module in model.named_modules():
        wanted = dtype_of(path, layers or {}, dtype)
        every = {"recurse": False, "remove_duplicate": False}  # each name of a tied one too
        wide = torch.float32 if keeps_wide_statistics(module) else wanted
        for name, tensor in [*module.named_parameters(**every), *module.named_buffers(**every)]:
            target = wide if name in STATISTICS else wanted
            setattr(module, name, to_target(tensor, target, f"{path}.{name}"))
        # A model may be prepared twice
        own_forward = isinstance(vars(module).get("forward"), Float32Statistics)
        if wide != wanted and not own_forward:
            module.forward = Float32Statistics(module)
        if isinstance(module, nn.RNNBase):
            # cuDNN takes an RNN's weights as one range of memory, which new parameters are not
            module.flatten_parameters()
    return model


def _with_hooks_of(old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """`new` with the attributes and the gradient hooks of `old`, as `model.to` keeps them.

    Both share the hooks: the handle that `register_hook` gave removes them.
    """
    for name, value in vars(old).items():  # a fake one's own name its device: not those
        vars(new).setdefault(name, value)
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    return new


def keeps_wide_statistics(module: nn.Module) -> bool:
    """Whether `module` has running statistics, and a forward of PyTorch's that takes float32 ones.

    A subclass with a forward of its own may compute with them otherwise, and instance norm's kernel
    without weights averages statistics in its input's dtype: theirs are stored as their parameters.
    """
    forward = type(module).forward
    known = forward is BatchNorm.forward or (
        forward is InstanceNorm.forward and module.weight is not None
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
            # By this field autograd takes a gradient of another dtype
            p.grad_dtype = dtype
