"""Fake tensors as memory is counted on: the private interfaces of `memory_recorder.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor

from mprun.precision._torch import attribute_replaced, is_fake, own_buffers, own_parameters

_DEVICE_OF = torch.ops.prim.device.default


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """PyTorch's, whose tensors can be deep-copied as well.

    A tensor keeps the mode it was made in, and a copy of the mode would be another one, with which
    the tensors of the first do not mix: `nn.TransformerEncoder`, for one, copies its layer.
    """

    def __deepcopy__(self, memo: Any) -> FakeTensorMode:
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = MappingProxyType({})
    ) -> Any:
        """Autograd asks for a device twice per op; the answer needs none of the usual checks."""
        if func is _DEVICE_OF and isinstance(args[0], fake_tensor.FakeTensor):
            return args[0].fake_device
        if func in _RESULTS_ON_CPU and args[0].device.type == "cpu":
            with self:
                return _RESULTS_ON_CPU[func](*args)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _group_norm_on_cpu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    samples, _channels, _inner, groups, _eps = sizes
    given = [p.dtype for p in (weight, bias) if p is not None]
    dtype = given[0] if given else x.dtype
    mean = torch.empty(samples, groups, dtype=dtype, device=x.device)
    return _empty_like(x), mean, torch.empty_like(mean)


def _group_norm_backward_on_cpu(
    _gradient: Tensor, x: Tensor, mean: Tensor, _rstd: Tensor, weight: Tensor | None, *sizes: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    _samples, channels, _inner, _groups, wanted = sizes
    dtype = mean.dtype if weight is None else weight.dtype
    of_x = _empty_like(x) if wanted[0] else None
    of_weight, of_bias = (
        torch.empty(channels, dtype=dtype, device=x.device) if w else None for w in wanted[1:]
    )
    return of_x, of_weight, of_bias


def _batch_norm_on_cpu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = any(p is not None and p.dtype is torch.float32 for p in (weight, bias, mean, var))
    dtype = torch.float32 if wide else x.dtype
    saved = torch.empty(x.shape[1] if training else 0, dtype=dtype, device=x.device)
    return _empty_like(x), saved, torch.empty_like(saved)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=suggest_memory_format(x))


_RESULTS_ON_CPU: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_batch_norm.default: _batch_norm_on_cpu,
    torch.ops.aten.native_group_norm.default: _group_norm_on_cpu,
    torch.ops.aten.native_group_norm_backward.default: _group_norm_backward_on_cpu,
}
"""Results without data, with the strides and dtypes that the CPU's kernels give them.

PyTorch's fake kernels give others: contiguous outputs where the input is in channels-last
(PyTorch 2.14), and means in 16 bits where the weights are in float32.
"""


@contextmanager
def conversions_replace_parameters() -> Iterator[None]:
    """Inside, `Module.to`, `half` and their kin put new parameters in place of fake ones.

    Tied ones stay tied. PyTorch's own conversion changes a parameter in place, which a fake one
    does not allow.
    """
    original: Any = nn.Module._apply

    def replaced(self: nn.Module, fn: Any, recurse: bool = True) -> Any:
        if not any(map(is_fake, self.parameters())):
            return original(self, fn, recurse)
        done: dict[int, Any] = {}
        for module in self.modules() if recurse else [self]:
            for own in (own_parameters(module), own_buffers(module)):
                for name, old in own.items():
                    if old is None:
                        continue
                    if id(old) not in done:
                        with torch.no_grad():
                            new = fn(old)
                        if isinstance(old, nn.Parameter) and new is not old:
                            new = nn.Parameter(new, requires_grad=old.requires_grad)
                        done[id(old)] = new
                    own[name] = done[id(old)]
        return self

    with attribute_replaced(nn.Module, "_apply", replaced):
        yield
