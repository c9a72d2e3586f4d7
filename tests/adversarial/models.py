"""Small hostile models that a reader can see through, each with what is true of it.

Every case is a classification that float32 learns in some hundred steps. Each has one trait that
has led a tool to a wrong answer: a gradient that is zero but for rounding, a mask of -inf, an op
that float16 cannot hold. `Case.fails` names the modes that really lose accuracy; `test_truth.py`
trains them with the autocast and GradScaler of PyTorch, without mprun, and checks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mprun.recipe import Classification
from mprun.train.data import DataRequest, Splits, TensorSet

CLASSES = 4
FEATURES = 16


class ConvBias(nn.Sequential):
    """A convolution's bias before BatchNorm: its gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 4, 4)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(128, CLASSES),
        )


class DeadRelu(nn.Module):
    """A branch whose ReLU never opens: gradients of exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.dead = nn.Linear(32, 32)
        self.last = nn.Linear(32, CLASSES)
        nn.init.constant_(self.dead.bias, -1000.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        out: Tensor = self.last(h + self.dead(h).relu())
        return out


class Tied(nn.Module):
    """One weight used three times, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.second = nn.Linear(FEATURES, FEATURES, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).relu()).relu()
        out: Tensor = self.last(h + F.linear(x, self.first.weight.t()))
        return out


class Mask(nn.Module):
    """Attention over four tokens, with a causal mask of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(64, CLASSES)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.unflatten(1, (4, 4))).relu()
        scores = self.query(h) @ self.key(h).transpose(1, 2) / 4 + self.mask
        out: Tensor = self.last((scores.softmax(-1) @ self.value(h) + h).flatten(1))
        return out


class DecayOnly(nn.Module):
    """A parameter that no output depends on: with AdamW its decay alone moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        self.unused = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + 0 * self.unused.sum()
        return out


class Symmetry(nn.Module):
    """A shift of all logits, which a softmax does not see: a gradient of zero by symmetry."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        self.shift = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.shift(x)
        return out


class Outlier(nn.Module):
    """An ordinary network; one feature of one sample in 16 is far larger than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class HandWrittenLoss(nn.Module):
    """Probabilities for a loss that takes their logarithm: 0 in float16 where they are small."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        z = 6 * self.body(x)
        e = (z - z.amax(1, keepdim=True)).exp()
        out: Tensor = e / e.sum(1, keepdim=True)
        return out


class Fp16Hostile(nn.Module):
    """A norm by hand whose squares leave float16: `square` alone is to blame."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = 512 * self.first(x)
        out: Tensor = self.last(h / h.square().mean(1, keepdim=True).sqrt())
        return out


class Offset(nn.Module):
    """A layer whose inputs are small differences on a large offset, taken off again afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(FEATURES, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        offset = torch.full_like(x, 32)
        out: Tensor = 16 * (self.map(offset + x / 16) - self.map(offset))
        return out


class Bf16Hostile(nn.Module):
    """One layer that needs precision: bfloat16 steps by 0.25 at its inputs, float16 by 0.03."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.last = Offset(), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.offset(x).tanh())
        return out


@dataclass(frozen=True)
class Case:
    """One hostile model."""

    model: Callable[[], nn.Module]
    zero: tuple[str, ...] = ()
    """Parameters whose gradient is zero in exact arithmetic."""
    fails: frozenset[str] = frozenset()
    """Modes of `MODES` that lose accuracy or never train."""
    outlier: float = 0.0
    """Added to the first feature of one sample in 16."""


MODES = ("bf16_mixed", "fp16_mixed", "bf16_true", "fp16_true")

CASES: dict[str, Case] = {
    "conv_bias": Case(ConvBias, zero=("1.bias",)),
    "dead_relu": Case(DeadRelu, zero=("dead.weight", "dead.bias")),
    "tied": Case(Tied),
    "mask": Case(Mask, zero=("key.bias",)),
    "decay_only": Case(DecayOnly, zero=("unused",)),
    "symmetry": Case(Symmetry, zero=("shift.weight", "shift.bias")),
    "outlier": Case(Outlier, outlier=2000.0),
    "outlier_beyond_fp16": Case(
        Outlier, fails=frozenset({"fp16_mixed", "fp16_true"}), outlier=100_000.0
    ),
    "log_of_zero": Case(HandWrittenLoss, fails=frozenset({"fp16_mixed", "fp16_true"})),
    "fp16_hostile": Case(Fp16Hostile, fails=frozenset({"fp16_mixed", "fp16_true"})),
    "bf16_hostile": Case(Bf16Hostile, fails=frozenset({"bf16_mixed", "bf16_true"})),
}


class Points(NamedTuple):
    """Inputs [N, 16] and class indices [N]."""

    inputs: Tensor
    targets: Tensor


def points(n: int, seed: int, outlier: float = 0.0) -> Points:
    """Samples around the centres of the classes, which are the same for every seed."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(17))
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (n,), generator=draw)
    inputs = centres[targets] + torch.randn(n, FEATURES, generator=draw)
    inputs[::16, 0] += outlier
    return Points(inputs, targets)


def log_loss(probabilities: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of probabilities; 0 times the logarithm of 0 is NaN."""
    wanted = F.one_hot(targets, CLASSES).to(probabilities.dtype)
    return -(wanted * probabilities.log()).sum(1).mean()


def loss_of(case: str) -> Callable[[Tensor, Tensor], Tensor]:
    """What a case is trained with."""
    return log_loss if case == "log_of_zero" else F.cross_entropy


@dataclass(frozen=True)
class Hostile(Classification):
    """A case as a recipe: `recipe.target=tests.adversarial.models.Hostile`."""

    case: str
    samples: int = 512

    def model(self) -> nn.Module:
        return CASES[self.case].model()

    def data(self, request: DataRequest) -> Splits:
        outlier = CASES[self.case].outlier
        train, validation, test = (
            TensorSet(*points(self.samples, 3 * request.seed + part, outlier)) for part in range(3)
        )
        return Splits(f"points of {self.case}", "generated", train, validation, test)

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(self.case)(output, batch[1])
