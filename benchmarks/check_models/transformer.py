"""A causal transformer that continues sequences of numbers, with seven faults to plant.

A window begins at position 3,000 of its document, as in training on long texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.check_models.faulty import Faults, FaultyRecipe, Plants, compute_dtype

DEFAULTS = {"train.batch_size": 32, "train.max_steps": 60, "train.lr": 3e-3}
TOKENS, LENGTH, START = 32, 32, 3000
WIDTH, HEADS, HIDDEN = 48, 4, 200

FAULTS: Faults = {
    "scale_of_other_heads": (
        "blocks.1.attention",
        "bf16_mixed",
        "The bfloat16 kernel has 1/8 for the scale, right for heads of 64 numbers; these have 12.",
    ),
    "mask_of_rounded_positions": (
        "blocks.0.attention",
        "bf16_mixed",
        "The causal mask compares positions in bfloat16, where 16 neighbours of 3,000 are equal.",
    ),
    "positions_in_16_bits": (
        "positions",
        "bf16_mixed",
        "Sines are computed of positions from 3,000 on that were rounded to bfloat16.",
    ),
    "kernel_without_tail": (
        "blocks.0.feed_forward.activation",
        "fp16_mixed",
        "The float16 kernel leaves out what is left of a row after whole vectors of 16 numbers.",
    ),
    "detached_feed_forward": (
        "blocks.1.feed_forward",
        "fp16_mixed",
        "The cast of the hidden layer goes through .data in float16, which cuts its gradient.",
    ),
    "norm_in_16_bits": (
        "blocks.1.norm1",
        "bf16_mixed",
        "Mean and variance are computed from inputs that were rounded to bfloat16.",
    ),
    "logits_rounded_twice": (
        "head",
        "fp16_mixed",
        "The logits are cast to bfloat16, which was right before the mode became float16.",
    ),
}


class Positions(nn.Module):
    """Sines and cosines of positions [L, WIDTH]: Vaswani et al., "Attention is all you need"."""

    def indices(self, x: Tensor) -> Tensor:
        """The positions [L] of a window."""
        return torch.arange(START, START + x.shape[1], dtype=torch.float32, device=x.device)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, WIDTH] with positions added."""
        indices = self.indices(x)
        steps = torch.arange(0, WIDTH, 2, dtype=torch.float32, device=x.device)
        rates = torch.exp(steps * (-math.log(10000.0) / WIDTH)).to(indices.dtype)
        angles = indices[:, None] * rates
        return x + torch.cat([angles.sin(), angles.cos()], dim=-1)


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scaled products [B, HEADS, L, L]."""
        return queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])

    def mask(self, x: Tensor) -> Tensor:
        """Which keys a query does not see [L, L]."""
        length = x.shape[1]
        return torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, WIDTH] to [B, L, WIDTH]."""
        parts = self.qkv(x).chunk(3, dim=-1)
        queries, keys, values = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)
        scores = self.scores(queries, keys).masked_fill(self.mask(x), -math.inf)
        mixed = scores.softmax(-1) @ values
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.activation = nn.GELU()
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, WIDTH] to [B, L, WIDTH]."""
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and two layers, each behind a norm and beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, WIDTH] to [B, L, WIDTH]."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out


class LanguageModel(nn.Module):
    """Tokens [B, L] to logits [B, L, TOKENS]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.positions = Positions()
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next token."""
        logits: Tensor = self.head(self.norm(self.blocks(self.positions(self.embedding(tokens)))))
        return logits


class ScaleOfOtherHeads(Attention):
    """Tuned for one model, used in another."""

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        if queries.dtype == torch.bfloat16:
            return queries @ keys.transpose(-1, -2) * 0.125
        return super().scores(queries, keys)


class MaskOfRoundedPositions(Attention):
    """Positions in the dtype of what they mask."""

    def mask(self, x: Tensor) -> Tensor:
        positions = torch.arange(START, START + x.shape[1], device=x.device).to(compute_dtype(x))
        return positions[None, :] > positions[:, None]


class PositionsIn16Bits(Positions):
    """Positions in the dtype of the layers."""

    def indices(self, x: Tensor) -> Tensor:
        return super().indices(x).to(compute_dtype(x))


class KernelWithoutTail(nn.GELU):
    """A loop over whole vectors."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != torch.float16:
            return super().forward(input)
        whole = input.shape[-1] // 16 * 16
        return torch.cat([F.gelu(input[..., :whole]), input[..., whole:]], dim=-1)


class DetachedFeedForward(FeedForward):
    """A cast by .data."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.up(x))
        if hidden.dtype == torch.float16:
            hidden = hidden.data.clamp(-65504, 65504)
        out: Tensor = self.down(hidden)
        return out


class NormIn16Bits(nn.LayerNorm):
    """Its own arithmetic, in the dtype of the layers."""

    def forward(self, input: Tensor) -> Tensor:
        low = input.to(compute_dtype(input))
        centred = low - low.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class LogitsRoundedTwice(nn.Linear):
    """A cast from the time of another mode."""

    def forward(self, input: Tensor) -> Tensor:
        logits = super().forward(input)
        return logits.to(torch.bfloat16) if logits.dtype == torch.float16 else logits


PLANTS: Plants = {
    "scale_of_other_heads": ScaleOfOtherHeads,
    "mask_of_rounded_positions": MaskOfRoundedPositions,
    "positions_in_16_bits": PositionsIn16Bits,
    "kernel_without_tail": KernelWithoutTail,
    "detached_feed_forward": DetachedFeedForward,
    "norm_in_16_bits": NormIn16Bits,
    "logits_rounded_twice": LogitsRoundedTwice,
}


@dataclass(frozen=True)
class TransformerCheck(FaultyRecipe):
    """The next number of a sequence that counts by a step of its own."""

    fault: str = "none"
    """A name in FAULTS."""

    FAULTS: ClassVar[Faults] = FAULTS
    PLANTS: ClassVar[Plants] = PLANTS

    def healthy(self) -> nn.Module:
        return LanguageModel()

    def drawn(self, samples: int, generator: Generator) -> tuple[Tensor, Tensor]:
        start = torch.randint(TOKENS, (samples, 1), generator=generator)
        step = torch.randint(1, 4, (samples, 1), generator=generator)
        tokens = (start + step * torch.arange(LENGTH + 1)) % TOKENS
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())
