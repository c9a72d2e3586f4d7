"""Every private PyTorch interface mprun uses, in one place.

Tried on PyTorch 2.11 and 2.15. A name that moves breaks here, and nowhere else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from traceback import walk_stack
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

__all__ = [
    "FakeTensorMode",
    "StorageWeakRef",
    "backward_node",
    "dispatch_modes",
    "function_modes",
    "in_backward",
    "in_recomputation",
    "is_compiled",
    "is_fake",
    "load_hooks_run",
    "next_node",
    "no_dispatch",
    "node_number",
    "onednn_takes",
    "outside_of_modes",
    "recurrent_layers_take_any_dtype",
    "run_backward",
    "step_unless",
    "unscale_and_check",
]


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """PyTorch's, whose tensors can be deep-copied as well.

    A tensor keeps the mode it was made in, and a copy of the mode would be another one, with which
    the tensors of the first do not mix: `nn.TransformerEncoder`, for one, copies its layer.
    """

    def __deepcopy__(self, memo: Any) -> FakeTensorMode:
        return self


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's backward pass."""
    return torch._C._current_autograd_node() is not None


def function_modes() -> list[TorchFunctionMode]:
    """The function modes calls of this thread go through, the outermost first.

    A thread that autograd runs a device's backward pass on has those of the thread that called it.
    """
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()
    return modes


@contextmanager
def recurrent_layers_take_any_dtype() -> Iterator[None]:
    """Inside, nn.LSTM and its kin accept inputs of another dtype than their weights.

    They refuse them unless autocast is on for some device. Here it is one that PyTorch has no
    kernels for: nothing is cast by it.
    """
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(_NO_DEVICE):
        yield
        return
    torch.set_autocast_enabled(_NO_DEVICE, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(_NO_DEVICE, False)


_NO_DEVICE = "hpu"


def run_backward(
    loss: Tensor, retain_graph: bool | None = None, create_graph: bool = False
) -> None:
    """`loss.backward()` without the Python around it, each call of which function modes see.

    Args:
        loss: a scalar.
        retain_graph, create_graph: as for `Tensor.backward`.
    """
    gradient = torch.ones_like(loss, memory_format=torch.preserve_format)
    keep = create_graph if retain_graph is None else retain_graph
    torch.autograd.graph._engine_run_backward(
        (loss,), (gradient,), keep, create_graph, (), allow_unreachable=True, accumulate_grad=True
    )


def backward_node() -> int | None:
    """The number of the autograd node that runs in the calling thread, None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def next_node() -> int:
    """The number the next autograd node of the calling thread will get."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def in_recomputation() -> bool:
    """Whether the calling thread is inside a backward pass that recomputes a forward pass."""
    if not in_backward():
        return False
    for frame, _ in walk_stack(None):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        if frame.f_code.co_name == "_engine_run_backward":  # the innermost backward pass
            return False
    return False


def no_dispatch() -> AbstractContextManager[None]:
    """A region whose ops go to PyTorch's kernels past all dispatch modes and tensor subclasses."""
    region: AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return region


def dispatch_modes() -> list[TorchDispatchMode]:
    """The dispatch modes ops of the calling thread go through, the outermost first."""
    return _get_current_dispatch_mode_stack()


def unscale_and_check(optimizer: Optimizer, scale: Tensor) -> Tensor:
    """Divide the gradients by `scale` in place; 1 where one was not finite, else 0.

    The kernel and the reciprocal are GradScaler's, so the bits are too.

    Args:
        optimizer: its parameters' float32 gradients are divided.
        scale: float32 scalar on their device.
    """
    overflow = torch.zeros((), dtype=torch.float32, device=scale.device)
    gradients = []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()  # else an overflow of a row's sum is not seen
            gradients.append(p.grad._values())
        elif p.grad is not None:
            gradients.append(p.grad)
    if gradients:
        inverse = scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
    return overflow


def step_unless(optimizer: Optimizer, overflow: Tensor) -> None:
    """`optimizer.step()` where `overflow` (float32 scalar) is 0.

    Fused optimizers on CUDA look at the flag on the device, so that the host need not wait for it.
    A fake flag has no value: the step is taken.
    """
    if overflow.device.type == "cuda" and getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, overflow  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif is_fake(overflow) or not overflow.item():
        optimizer.step()


def onednn_takes(dtype: torch.dtype) -> bool | None:
    """Whether PyTorch hands 16-bit matmuls and convolutions on a CPU to oneDNN; None: not told.

    It asks oneDNN, so that a limit on its instructions counts.

    Args:
        dtype: torch.bfloat16 or torch.float16.
    """
    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported")())
    except (AttributeError, RuntimeError):  # PyTorch built without oneDNN
        return None


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made the module, or its own `compile` was called."""
    own = getattr(module, "_compiled_call_impl", None)
    return own is not None or hasattr(module, "_orig_mod")


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no data (`FakeTensorMode`)."""
    return isinstance(tensor, fake_tensor.FakeTensor)


@contextmanager
def load_hooks_run(optimizer: Optimizer, state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`state` as the hooks before `load_state_dict` leave it; they do not run again inside."""
    hooks = optimizer._optimizer_load_state_dict_pre_hooks
    for hook in hooks.values():
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict()
    try:
        yield state
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = hooks


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Inside, what is computed is seen by no dispatch or function mode, and not by autograd."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


def node_number(node: Node) -> int | None:
    """The number autograd gave a node as it was made; None for a parameter's, which has none."""
    number = int(node._sequence_nr())
    return None if number > 2**63 else number
