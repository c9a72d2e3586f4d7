"""Whether the kernels of a device compute what they should, before anything is trained with them.

Kernels that give NaN or a wrong number in one dtype on one device do occur: in new backends, on old
GPUs whose bfloat16 is emulated, with a library's update. A training run does not show them as what
they are, but as a loss that falls less.

So each op of some layers, forward and backward, is held against the same op in float64 on the CPU,
with the inputs that it had. The error that its dtype explains is that of the op computed in float32
on the CPU and rounded once to the dtype. A kernel is reported if

    its result is NaN or infinite where the exact one is not, or
    its error is both FACTOR times the explained one and STEPS units of the dtype,

errors being root mean squares relative to the exact result. FACTOR leaves room for another order of
a sum, and STEPS for short sums in the dtype: on one thread of a CPU PyTorch's layer norm adds
the gradients of its weight and bias in 16 bits, an error of 10 units for 96 rows.

`mprun doctor check` runs `LAYERS`, which most models have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun import devices
from mprun._torch import no_dispatch
from mprun.numerics.divergence.boundaries import ComparingWatcher
from mprun.numerics.nonfinite.op_call import OpCall, recomputed
from mprun.precision.policy import dtype_name
from mprun.results.kernel_check_result import KernelFault, MissingKernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FACTOR = 32.0
STEPS = 12.0


class KernelWatcher(ComparingWatcher):
    """Judges the ops that run while it is entered; enter `following(model)` first.

    Args:
        layer: the name under which faults are reported; a module's path follows it.
    """

    def __init__(self, layer: str) -> None:
        super().__init__()
        self._layer = layer
        self.faults: list[KernelFault] = []
        self.compared = 0

    def compare(self, call: OpCall) -> None:
        exact = recomputed(call, torch.float64, devices.CPU)
        usual = recomputed(call, torch.float32, devices.CPU)
        if exact is None or usual is None:
            return
        context = self.tracker.context()
        layer = ".".join(x for x in (self._layer, context.module) if x)
        for (_, _, x), true, rounded in zip(call.outputs(), exact, usual, strict=False):
            if not x.is_floating_point() or x.shape != true.shape or x.dtype not in DTYPES:
                continue
            self.compared += 1
            if found := judged(x, true, rounded):
                self.faults.append(
                    KernelFault(layer, context.phase, call.name, dtype_name(x.dtype), *found)
                )


def judged(x: Tensor, exact: Tensor, usual: Tensor) -> tuple[Any, float | None, float] | None:
    """What is wrong with a result: the problem, its error and the usual one; None if nothing is.

    Args:
        x: the result, on its device.
        exact: in float64, on the CPU.
        usual: in float32, on the CPU.
    """
    host = x.detach().cpu()
    with no_dispatch(), torch.no_grad():
        rounded = usual.to(x.dtype).double()
        counted = exact.isfinite() & rounded.isfinite()  # what leaves the dtype's range is infinite
        if not bool(counted.any()):
            return None
        true = torch.where(counted, exact, 0.0)
        scale = float(true.square().mean().sqrt())
        usually = _rms(rounded - true, counted, scale)
        if not bool(host.isfinite()[counted].all()):
            return "nan", None, usually
        error = _rms(host.double() - true, counted, scale)
    steps = STEPS * torch.finfo(x.dtype).eps
    return ("wrong", error, usually) if error > max(FACTOR * usually, steps) else None


def _rms(error: Tensor, counted: Tensor, scale: float) -> float:
    size = float(torch.where(counted, error, 0.0).square().mean().sqrt())
    return size / scale if scale else 0.0 if size == 0.0 else size


def check_layer(
    layer: str,
    model: nn.Module,
    step: Callable[[], object],
    dtype: torch.dtype,
) -> tuple[KernelWatcher, list[MissingKernel]]:
    """Compare the ops of a step, and note what PyTorch has no kernel for.

    Args:
        layer: its name.
        model: the module that the step runs.
        step: runs it forward and backward.
        dtype: what it computes in.
    """
    watcher, missing = KernelWatcher(layer), list[MissingKernel]()
    # one thread for all: a backend may not hand dispatch modes on to the one that goes backward
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with watcher.following(model), watcher, one_thread:
        try:
            step()
        except (RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split())[:120]
            missing.append(MissingKernel(layer, dtype_name(dtype), reason))
    with suppress(RuntimeError):
        model.zero_grad(set_to_none=True)
    return watcher, missing


class Layer(NamedTuple):
    """A layer and what it reads."""

    name: str
    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    """Floating ones are cast to the dtype of the check, and get gradients."""


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._function(*inputs)


class Recurrent(nn.Module):
    """The outputs of a recurrent layer, without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)[0]
        return result


class SelfAttention(nn.Module):
    """PyTorch's attention of a sequence with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x, x, x, need_weights=False)[0]
        return result


def _drawn(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(shape),)


def _heads() -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 4, 24, 16) for _ in range(3))


def _classes() -> tuple[Tensor, ...]:
    return torch.randn(32, 10), torch.randint(10, (32,))


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _upsample(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


IMAGES, TOKENS = _drawn(4, 16, 14, 14), _drawn(4, 24, 32)
LAYERS = (
    Layer("Linear", lambda: nn.Linear(512, 64), _drawn(32, 512)),
    Layer("Conv1d", lambda: nn.Conv1d(16, 32, 5, padding=2), _drawn(4, 16, 40)),
    Layer("Conv2d", lambda: nn.Conv2d(16, 32, 3, padding=1), IMAGES),
    Layer("Conv2d, strides", lambda: nn.Conv2d(16, 32, 3, stride=2), IMAGES),
    Layer("Conv2d, depthwise", lambda: nn.Conv2d(16, 16, 3, groups=16), IMAGES),
    Layer("ConvTranspose2d", lambda: nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), IMAGES),
    Layer("BatchNorm2d", lambda: nn.BatchNorm2d(16), IMAGES),
    Layer("GroupNorm", lambda: nn.GroupNorm(4, 16), IMAGES),
    Layer("LayerNorm", lambda: nn.LayerNorm(32), TOKENS),
    Layer("RMSNorm", lambda: nn.RMSNorm(32), TOKENS),
    Layer("Embedding", lambda: nn.Embedding(50, 32), lambda: (torch.randint(50, (4, 24)),)),
    Layer("LSTM", lambda: Recurrent(nn.LSTM(32, 16, batch_first=True)), TOKENS),
    Layer("GRU", lambda: Recurrent(nn.GRU(32, 16, batch_first=True)), TOKENS),
    Layer("MultiheadAttention", SelfAttention, TOKENS),
    Layer("attention, causal", lambda: Function(_causal), _heads),
    Layer("GELU", nn.GELU, TOKENS),
    Layer("SiLU", nn.SiLU, TOKENS),
    Layer("softmax", lambda: nn.Softmax(-1), TOKENS),
    Layer("MaxPool2d", lambda: nn.MaxPool2d(2), IMAGES),
    Layer("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d(1), IMAGES),
    Layer("interpolate", lambda: Function(_upsample), IMAGES),
    Layer("cross_entropy", lambda: Function(F.cross_entropy), _classes),
)
