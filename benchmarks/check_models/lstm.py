"""An LSTM, written out, that tells classes of noisy signals apart, with seven faults to plant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.check_models.faulty import Faults, FaultyRecipe, Plants, compute_dtype

DEFAULTS = {"train.batch_size": 32, "train.max_steps": 60, "train.lr": 1e-2}
CLASSES, LENGTH, FEATURES, WIDTH = 4, 20, 6, 40
EMPTY = -1e9
"""The score of a padded step."""

FAULTS: Faults = {
    "state_in_16_bits": (
        "cell",
        "bf16_mixed",
        "The cell's state, a sum over all steps, is kept in bfloat16.",
    ),
    "stale_cast": (
        "cell.recurrent",
        "bf16_mixed",
        "The weight's bfloat16 cast is made once and not renewed after an update.",
    ),
    "no_forget_bias": (
        "cell",
        "fp16_mixed",
        "The float16 kernel leaves out the forget gate's bias of 1.",
    ),
    "backward_of_tanh": (
        "cell.squash",
        "bf16_mixed",
        "In bfloat16 the custom backward multiplies by 1 - y instead of 1 - y^2.",
    ),
    "mask_overflows": (
        "pool",
        "fp16_mixed",
        "Padded steps get the score -1e9, which no float16 number can have.",
    ),
    "epsilon_vanishes": (
        "standardize",
        "fp16_mixed",
        "The epsilon of 1e-8 is 0 in float16: a feature that is constant becomes 0 / 0.",
    ),
    "log_of_softmax": (
        "head",
        "fp16_mixed",
        "The head's log-probabilities are the logarithm of a softmax in float16 and 1e-8.",
    ),
}


class Standardize(nn.Module):
    """Each feature of each sample to mean 0 and deviation 1 over time."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, FEATURES] to the same."""
        centred = x - x.mean(1, keepdim=True)
        return centred / (centred.square().mean(1, keepdim=True).sqrt() + 1e-8)


class Squash(nn.Module):
    """Tanh."""

    def forward(self, x: Tensor) -> Tensor:
        """Between -1 and 1."""
        return torch.tanh(x)


class Cell(nn.Module):
    """A step of an LSTM: Hochreiter and Schmidhuber, 1997."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(FEATURES, 4 * WIDTH)
        self.recurrent = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.squash = Squash()

    forget_bias = 1.0

    def forward(self, x: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The next hidden values and state, each [B, WIDTH]."""
        gates = self.input(x) + self.recurrent(hidden)
        enter, forget, new, leave = gates.chunk(4, dim=-1)
        kept = torch.sigmoid(forget + self.forget_bias_of(gates)) * state
        state = kept + torch.sigmoid(enter) * self.squash(new)
        return torch.sigmoid(leave) * self.squash(state), state

    def forget_bias_of(self, gates: Tensor) -> float:
        """What is added to the forget gate."""
        return self.forget_bias


class Pool(nn.Module):
    """A weighted mean over the steps that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def scores(self, hidden: Tensor, padding: Tensor) -> Tensor:
        """[B, L]."""
        scores: Tensor = self.score(hidden).squeeze(-1)
        return scores.float().masked_fill(padding, EMPTY)

    def forward(self, hidden: Tensor, padding: Tensor) -> Tensor:
        """[B, L, WIDTH] to [B, WIDTH]."""
        weights = self.scores(hidden, padding).softmax(-1)
        return (weights[:, :, None] * hidden).sum(1)


class Head(nn.Linear):
    """Log-probabilities of the classes."""

    def forward(self, input: Tensor) -> Tensor:
        logits = super().forward(input)
        return logits.float().log_softmax(-1)


class Classifier(nn.Module):
    """Signals [B, L, FEATURES] and lengths [B] to log-probabilities [B, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.standardize = Standardize()
        self.cell = Cell()
        self.pool = Pool()
        self.head = Head(WIDTH, CLASSES)

    def forward(self, signals: Tensor, lengths: Tensor) -> Tensor:
        """Log-probabilities."""
        hidden = state = signals.new_zeros(len(signals), WIDTH)
        rows = []
        for x in self.standardize(signals).unbind(1):
            hidden, state = self.cell(x, hidden, state)
            rows.append(hidden)
        padding = torch.arange(len(rows), device=lengths.device) >= lengths[:, None]
        logits: Tensor = self.head(self.pool(torch.stack(rows, dim=1), padding))
        return logits


class StateIn16Bits(Cell):
    """A state in the dtype of the gates."""

    def forward(self, x: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden, state = super().forward(x, hidden, state)
        return hidden, state.to(compute_dtype(x))


class _LinearOfCast(torch.autograd.Function):
    """x [B, I] times the cast of a weight [O, I], with the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.save_for_backward(x, cast)
        return x @ cast.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, cast = ctx.saved_tensors
        (gradient,) = gradients
        of_weight: Tensor = gradient.T @ x
        return gradient @ cast, of_weight.float(), None


class StaleCast(nn.Linear):
    """The cast of the first micro-batch, kept for the others."""

    kept: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        dtype = compute_dtype(input)
        if dtype != torch.bfloat16:
            return super().forward(input)
        if self.kept is None:
            self.kept = self.weight.detach().to(dtype)
        result: Tensor = _LinearOfCast.apply(input.to(dtype), self.weight, self.kept)
        return result


class NoForgetBias(Cell):
    """A kernel for other cells."""

    def forget_bias_of(self, gates: Tensor) -> float:
        return 0.0 if gates.dtype == torch.float16 else self.forget_bias


class _TanhWithWrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return gradients[0] * (1 - y)


class BackwardOfTanh(Squash):
    """A kernel of 16 bits with its own backward."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            return super().forward(x)
        result: Tensor = _TanhWithWrongBackward.apply(x)
        return result


class MaskOverflows(Pool):
    """The mask in the dtype of the scores."""

    def scores(self, hidden: Tensor, padding: Tensor) -> Tensor:
        scores: Tensor = self.score(hidden).squeeze(-1)
        return scores.masked_fill(padding, EMPTY)


class EpsilonVanishes(Standardize):
    """The same in the dtype of the layers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(compute_dtype(x)))


class LogOfSoftmax(Head):
    """In the dtype of the logits."""

    def forward(self, input: Tensor) -> Tensor:
        logits: Tensor = nn.Linear.forward(self, input)
        return torch.log(logits.softmax(-1) + 1e-8)


PLANTS: Plants = {
    "state_in_16_bits": StateIn16Bits,
    "stale_cast": StaleCast,
    "no_forget_bias": NoForgetBias,
    "backward_of_tanh": BackwardOfTanh,
    "mask_overflows": MaskOverflows,
    "epsilon_vanishes": EpsilonVanishes,
    "log_of_softmax": LogOfSoftmax,
}


@dataclass(frozen=True)
class LstmCheck(FaultyRecipe):
    """The frequency of a wave of unequal length; the last feature of half the samples is 0."""

    fault: str = "none"
    """A name in FAULTS."""

    FAULTS: ClassVar[Faults] = FAULTS
    PLANTS: ClassVar[Plants] = PLANTS

    def healthy(self) -> nn.Module:
        return Classifier()

    def drawn(self, samples: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        kinds = torch.randint(CLASSES, (samples,), generator=generator)
        phase = 6.28 * torch.rand(samples, 1, FEATURES, generator=generator)
        rate = 0.2 + 0.4 * kinds[:, None, None]
        signals = torch.sin(rate * torch.arange(LENGTH)[:, None] + phase)
        signals = signals + 0.1 * torch.randn(signals.shape, generator=generator)
        signals[::2, :, -1] = 0
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (samples,), generator=generator)
        return signals, lengths, kinds

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.nll_loss(output, batch[2])
