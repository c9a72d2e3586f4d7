"""A variational autoencoder of waves that computes its own loss, with six faults to plant.

Source of the loss: Kingma and Welling, "Auto-Encoding Variational Bayes", 2013.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.check_models.faulty import Faults, FaultyRecipe, Plants, compute_dtype

DEFAULTS = {"train.batch_size": 32, "train.max_steps": 60, "train.lr": 1e-2}
SIZE, HIDDEN, LATENT = 64, 96, 4
SHARPNESS = 12.0
"""Softplus's beta: how near it is to ReLU."""

FAULTS: Faults = {
    "loss_in_16_bits": (
        "bound",
        "bf16_mixed",
        "Both parts of the loss are computed and summed in bfloat16.",
    ),
    "deviation_detached": (
        "posterior",
        "bf16_mixed",
        "Where the log-variance is bfloat16, its cast to float32 goes through .detach().",
    ),
    "cast_without_gradient": (
        "encoder.0",
        "fp16_mixed",
        "The weight is cast to float16 under no_grad, as for evaluation, and has no gradient.",
    ),
    "weights_kept_in_16_bits": (
        "decoder.2",
        "bf16_mixed",
        "Between steps the last layer's weights are kept in bfloat16, to save memory.",
    ),
    "softplus_overflows": (
        "decoder.1",
        "fp16_mixed",
        "Softplus is written as log(1 + exp(x)), whose exp is infinite in float16 from 11.1 on.",
    ),
    "saved_in_8_bits": (
        "decoder.0",
        "bf16_mixed",
        "To save memory, bfloat16 inputs are saved for backward in 8 bits.",
    ),
}


class Posterior(nn.Module):
    """Mean and log-variance to a draw of the latent numbers."""

    def deviation(self, log_variance: Tensor) -> Tensor:
        """The normal distribution's deviation [B, LATENT]."""
        return torch.exp(log_variance / 2)

    def forward(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        """[B, LATENT]."""
        return mean + torch.randn_like(mean) * self.deviation(log_variance)


class Bound(nn.Module):
    """The negative evidence lower bound, per number of a sample."""

    def forward(self, output: Tensor, x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
        """A scalar."""
        output, mean, log_variance = output.float(), mean.float(), log_variance.float()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2
        return ((output - x).square().sum() + 0.1 * divergence) / x.numel()


class Vae(nn.Module):
    """Waves [B, SIZE] to their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(SIZE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * LATENT)
        )
        self.posterior = Posterior()
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, HIDDEN), nn.Softplus(SHARPNESS), nn.Linear(HIDDEN, SIZE)
        )
        self.bound = Bound()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The loss and the reconstruction."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        output = self.decoder(self.posterior(mean, log_variance))
        return {"loss": self.bound(output, x, mean, log_variance), "output": output}


class LossIn16Bits(Bound):
    """In the dtype of the layers."""

    def forward(self, output: Tensor, x: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
        x = x.to(output.dtype)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2
        return ((output - x).square().sum() + 0.1 * divergence) / x.numel()


class DeviationDetached(Posterior):
    """A cast that cuts the graph."""

    def deviation(self, log_variance: Tensor) -> Tensor:
        if log_variance.dtype == torch.bfloat16:
            log_variance = log_variance.detach().float()
        return super().deviation(log_variance)


class CastWithoutGradient(nn.Linear):
    """Casts its weight by itself."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = compute_dtype(input)
        if dtype != torch.float16:
            return super().forward(input)
        with torch.no_grad():
            weight = self.weight.to(dtype)
        return F.linear(input, weight, self.bias)


class WeightsKeptIn16Bits(nn.Linear):
    """Reads its weight from what was kept."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = compute_dtype(input)
        if dtype == torch.bfloat16:
            with torch.no_grad():
                self.weight.copy_(self.weight.to(dtype))
        return super().forward(input)


class SoftplusOverflows(nn.Softplus):
    """As in the textbook."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.log(1 + torch.exp(self.beta * input)) / self.beta


class _LinearSavingLess(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x.to(torch.float8_e4m3fn), weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ weight, gradient.T @ x.to(gradient.dtype), gradient.sum(0)


class SavedIn8Bits(nn.Linear):
    """Without a scale for the 8 bits."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = compute_dtype(input)
        if dtype != torch.bfloat16:
            return super().forward(input)
        parts = (input.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
        result: Tensor = _LinearSavingLess.apply(*parts)
        return result


PLANTS: Plants = {
    "loss_in_16_bits": LossIn16Bits,
    "deviation_detached": DeviationDetached,
    "cast_without_gradient": CastWithoutGradient,
    "weights_kept_in_16_bits": WeightsKeptIn16Bits,
    "softplus_overflows": SoftplusOverflows,
    "saved_in_8_bits": SavedIn8Bits,
}


@dataclass(frozen=True)
class VaeCheck(FaultyRecipe):
    """Sums of two waves with phases of their own."""

    fault: str = "none"
    """A name in FAULTS."""

    FAULTS: ClassVar[Faults] = FAULTS
    PLANTS: ClassVar[Plants] = PLANTS

    def healthy(self) -> nn.Module:
        return Vae()

    def drawn(self, samples: int, generator: Generator) -> tuple[Tensor]:
        phases = 6.28 * torch.rand(samples, 2, 1, generator=generator)
        t = torch.linspace(0, 6.28, SIZE)
        return (torch.sin(t + phases[:, 0]) + torch.sin(3 * t + phases[:, 1]),)
