"""Choices that change the time of a step, not its result: memory format, kernels, compilation.

`speed=plain` is the loop without optimizations: contiguous tensors and PyTorch's default optimizer
implementation, as in a raw loop. `speed=auto` uses the choices of the table below, or those that
were faster in a trial on this machine (`assemble/speed_trial.py`); everything else stays plain.
Results are equal up to float32's rounding. The table is from measurements on two AVX512-BF16
cores with PyTorch 2.15, and on one H100; benchmarks/README.md has the figures.

The result of a trial is saved for later runs, in a small JSON file for each machine, model and
shape in the user's cache folder. A damaged file counts as none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from mprun.optim import engines
from mprun.precision._torch import onednn_linear
from mprun.records.files import write_atomic
from mprun.records.run_record import backend_text


@dataclass(frozen=True)
class SpeedChoice:
    """The choices, with the names that records use."""

    memory_format: str  # contiguous or channels_last
    optimizer_impl: str
    """forloop, foreach or fused, PyTorch's; c, triton or eager, those of `mprun.optim`."""
    compile: bool = False  # Whether `torch.compile` compiles the model
    linear_impl: Literal["blas", "onednn"] = "blas"  # Whose products large linear layers have

    def __str__(self) -> str:
        return backend_text(self)

    @property
    def torch_memory_format(self) -> torch.memory_format:
        """The memory format as torch's object."""
        last = self.memory_format == "channels_last"
        return torch.channels_last if last else torch.contiguous_format

    def inputs(self, inputs: Tensor) -> Tensor:
        """A batch in the memory format; unchanged if its shape is not [B, C, H, W]."""
        if self.memory_format == "channels_last" and inputs.dim() == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs


def choose(
    speed: str, device_type: str, compute_dtype: str, optimizer: str, amx: bool = False
) -> SpeedChoice:
    """The row for a run, whose convolutions are in `compute_dtype`.

    `amx`: whether the CPU multiplies bfloat16 in tiles (`machine.has_amx`).
    """
    default = SpeedChoice("contiguous", "foreach" if device_type == "cuda" else "forloop")
    if speed == "plain":
        return default
    if device_type != "cpu":
        # on an H100 fused AdamW takes 2 to 6 % off a step, and 22 % with a loss scale, for whose
        # decision the host need not wait; channels-last gained nothing
        if device_type == "cuda" and optimizer == "rmsprop" and compute_dtype == "float16":
            # PyTorch's has no fused kernel
            return replace(default, optimizer_impl=engines.fastest(torch.device("cuda"), optimizer))
        waits = compute_dtype == "float16" or optimizer == "adamw"
        return replace(default, optimizer_impl="fused") if waits else default
    # channels-last gained for float32 convolutions, and for bfloat16 unless the CPU has AMX, where
    # it lost a tenth to a quarter
    last = compute_dtype == "float32" or (compute_dtype == "bfloat16" and not amx)
    # fused AdamW gained on every model; fused SGD and foreach RMSprop did not; RMSprop by mprun's C
    # kernels did
    implementation = "fused" if optimizer == "adamw" else "forloop"
    has_kernels = optimizer == "rmsprop" and compute_dtype != "float64"
    if has_kernels and engines.fastest(torch.device("cpu"), optimizer) == "c":
        implementation = "c"
    return SpeedChoice("channels_last" if last else "contiguous", implementation)


MIN_FLOPS = 6e7  # Of a product; smaller ones lose more in Python than oneDNN gains


class _Product(torch.autograd.Function):
    """A [N, K] matrix times the transpose of a [M, K] one, plus a bias [M], by oneDNN.

    Its gradients are such products too, of any order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
        return onednn_linear(left, right, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (left, right), needed = ctx.saved_tensors, ctx.needs_input_grad
        return (
            _Product.apply(gradient, right.t(), None) if needed[0] else None,
            _Product.apply(gradient.t(), left.t(), None) if needed[1] else None,
            gradient.sum(0) if needed[2] else None,
        )


class OneDnnLinear(nn.Linear):
    """A linear layer in float32 whose large products are oneDNN's.

    MKL, the BLAS library of PyTorch, takes up to twice their time for a few rows and a large weight
    on AMD's CPUs, and less time for square ones.
    """

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        if input.dtype != torch.float32 or 2 * len(rows) * self.weight.numel() < MIN_FLOPS:
            return super().forward(input)
        output: Tensor = _Product.apply(rows, self.weight, self.bias)
        return output.view(*input.shape[:-1], self.out_features)


def use_onednn(model: nn.Module) -> None:
    """Give the large linear layers of a model oneDNN's products."""
    for layer in model.modules():
        if type(layer) is nn.Linear:  # a subclass may compute something else
            layer.__class__ = OneDnnLinear


MAX_BYTES = 64 * 1024  # Of a file that is read: anything may lie in the cache folder
LOCK_TIMEOUT_S = 300.0  # A trial that takes longer is made once more
FORMATS = ("contiguous", "channels_last")
IMPLEMENTATIONS = ("forloop", "foreach", "fused", "c", "triton", "eager", "masters")


@dataclass(frozen=True)
class SavedChoice:
    """The result of a trial."""

    choice: SpeedChoice
    reason: str  # A sentence about the trial


def read_choice(key: str) -> SavedChoice | None:
    """The result of an earlier trial; None without one."""
    try:
        with _path(key).open("rb") as file:
            saved = msgspec.json.decode(file.read(MAX_BYTES), type=SavedChoice)
    except (OSError, ValueError):
        return None
    known = saved.choice.memory_format in FORMATS and saved.choice.optimizer_impl in IMPLEMENTATIONS
    # printable: the sentence is shown in a terminal, which obeys escape codes
    return saved if known and saved.reason.isprintable() else None


@contextlib.contextmanager
def choice_lock(key: str) -> Iterator[None]:
    """Inside, no other process makes this trial; where nothing can be locked, one may."""
    with contextlib.ExitStack() as stack:
        # NotImplementedError: a file system without locks
        with contextlib.suppress(OSError, NotImplementedError, Timeout):
            stack.enter_context(FileLock(_path(key).with_suffix(".lock"), timeout=LOCK_TIMEOUT_S))
        yield


def write_choice(key: str, saved: SavedChoice) -> None:
    """Save it; where nothing can be written, the next run tries again."""
    with contextlib.suppress(OSError):
        write_atomic(_path(key), msgspec.json.encode(saved))


def _path(key: str) -> Path:
    return cache_folder() / f"speed_{key}.json"


def cache_folder() -> Path:
    """Where the results of trials are kept: in XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path("~/.cache").expanduser()) / "mprun"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
