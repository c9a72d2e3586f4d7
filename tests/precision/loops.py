"""Loops that tests of `Precision` share: the modes, small models, and PyTorch's own loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from mprun.optim import for_policy
from mprun.precision import Precision

EPS = {"fp32": 2.0**-23, "fp16": 2.0**-10, "half": 2.0**-10, "bf16": 2.0**-7}
"""The distance of 1 to the next larger number, by how a mode's name begins."""
SCALE = 2.0**10
"""A loss scale under which nothing here overflows."""


class Case(NamedTuple):
    """A mode and how it is carried out."""

    mode: str
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def eps(self) -> float:
        """The unit of the dtype that it computes in."""
        return EPS[self.mode.partition("_")[0]]

    def precision(self, **options: Any) -> Precision:
        """The case at work on the CPU, without the warning that it is emulated."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Precision(self.mode, device="cpu", **{**self.options, **options})

    def __str__(self) -> str:
        return "-".join([self.mode, *map(str, self.options.values())])


CASES = [
    Case("fp32"),
    Case("bf16_mixed"),
    Case("fp16_mixed"),
    Case("bf16_true"),
    Case("bf16_sr"),
    Case("half_sr"),
    Case("half_sr_full"),
    Case("bf16_mixed", {"op_lists": "hmp"}),
    Case("fp16_mixed", {"op_lists": "native"}),
    Case("bf16_sr", {"execution": "emulated"}),
]
AMP = {"fp32": None, "bf16_mixed": torch.bfloat16, "fp16_mixed": torch.float16}
"""The modes that PyTorch's own loop can be in, and autocast's dtype."""


class Ours:
    """`Precision` as a loop uses it.

    Args:
        case: the mode.
        options: further arguments of `Precision`.
    """

    def __init__(self, case: Case, **options: Any) -> None:
        self.precision = case.precision(**options)

    def prepare(self, model: nn.Module) -> nn.Module:
        return self.precision.prepare(model)

    def optimizer(
        self, model: nn.Module, kind: type[Optimizer] = torch.optim.AdamW, **options: Any
    ) -> Optimizer:
        options = {"lr": 1e-2} | options
        return for_policy(self.precision.policy, kind, model.parameters(), **options)

    def begin(self) -> None:
        self.precision.begin_step()

    def forward(self, model: nn.Module, *inputs: Tensor) -> Any:
        return self.precision.forward(model, *inputs)

    def loss(self, function: Callable[..., Tensor], *args: Any, share: float = 1) -> Tensor:
        return self.precision.loss(function, *args, share=share)

    def grad(self, loss: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.precision.grad(loss, inputs, create_graph=True)

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.precision.backward(loss, **options)

    def step(self, optimizer: Optimizer) -> bool:
        """Whether the step was taken."""
        return not self.precision.step(optimizer)

    def update(self) -> None:
        self.precision.update()

    @property
    def scale(self) -> float:
        tensor = self.precision.loss_scale.tensor
        return 1.0 if tensor is None else float(tensor)


class Raw:
    """The same by `torch.autocast` and `torch.amp.GradScaler`: what `Precision` must equal.

    Args:
        mode: one of `AMP`.
        scale: the first loss scale.
    """

    def __init__(self, mode: str, scale: float = SCALE) -> None:
        self._dtype = AMP[mode]
        self._scaler = torch.amp.GradScaler("cpu", scale, enabled=mode == "fp16_mixed")

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def optimizer(
        self, model: nn.Module, kind: type[Optimizer] = torch.optim.AdamW, **options: Any
    ) -> Optimizer:
        return kind(model.parameters(), **{"lr": 1e-2} | options)

    def begin(self) -> None:
        pass

    def forward(self, model: nn.Module, *inputs: Tensor) -> Any:
        with torch.autocast("cpu", self._dtype, enabled=self._dtype is not None):
            return model(*inputs).float()

    def loss(self, function: Callable[..., Tensor], *args: Any, share: float = 1) -> Tensor:
        return function(*args) * share

    def grad(self, loss: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        scaled = self._scaler.scale(loss)
        gradients = torch.autograd.grad(scaled, inputs, create_graph=True)
        return [g * (1.0 / self.scale) for g in gradients]

    def backward(self, loss: Tensor, **options: Any) -> None:
        self._scaler.scale(loss).backward(**options)

    def step(self, optimizer: Optimizer) -> bool:
        before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        self._scaler.step(optimizer)
        after = optimizer.param_groups[0]["params"]
        return not all(map(torch.equal, before, after))

    def update(self) -> None:
        self._scaler.update()

    @property
    def scale(self) -> float:
        return float(self._scaler.get_scale())


Loop = Ours | Raw


def loops(mode: str) -> tuple[Ours, Raw]:
    """mprun's loop and PyTorch's, with the same kernels and the same loss scale."""
    ours = Ours(Case(mode, {"execution": "native"}))
    if ours.precision.loss_scale.tensor is not None:
        ours.precision.loss_scale.tensor.fill_(SCALE)
    return ours, Raw(mode)


class Net(nn.Module):
    """[B, 8] to [B, 3], with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 3)

    def hidden(self, x: Tensor) -> Tensor:
        """[B, 8] to [B, 32]."""
        activations: Tensor = torch.tanh(self.norm(self.first(x)))
        return activations

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.hidden(x))
        return output


def made(kind: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    """A model with the weights of a seed."""
    torch.manual_seed(seed)
    return kind()


def batches(count: int, rows: int = 16, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Inputs [rows, 8] and classes [rows]; the class is that of the largest of three inputs."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(rows, 8, generator=generator) for _ in range(count)]
    return [(x, x[:, :3].argmax(1)) for x in inputs]


def train_step(loop: Loop, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> bool:
    """One ordinary step; whether it was taken."""
    optimizer.zero_grad()
    loop.begin()
    loop.backward(loop.loss(cross_entropy, loop.forward(model, x), y))
    taken = loop.step(optimizer)
    loop.update()
    return taken


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of a model's parameters as they are, in float64."""
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def distance(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The relative distance of two lists of tensors, in the L2 norm over all."""
    pairs = list(zip(got, expected, strict=True))
    error = sum(float((a.detach().double() - b.detach().double()).square().sum()) for a, b in pairs)
    norm = sum(float(b.detach().double().square().sum()) for _, b in pairs)
    return float((error / norm) ** 0.5)


def equal(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have the same bits."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)
