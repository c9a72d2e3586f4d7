"""A small GPT that predicts characters: nanoGPT's setting for a CPU.

Four layers, four heads, width 128, a context of 64 characters, batches of 12, 2,000 steps, no
dropout; AdamW with betas 0.9 and 0.99 and weight decay 0.1, learning rate 1e-3 with a warm-up of
100 steps and a cosine down to 1e-4, gradients clipped to a norm of 1. nanoGPT's README reports a
validation loss of 1.88 on tiny-shakespeare.

As there: learned positions, pre-norm blocks without biases, GELU, output weights tied to the
embedding, weights drawn from N(0, 0.02^2) and those that end a residual branch from
N(0, 0.02^2 / (2 layers)). Otherwise: weight decay is on all weights (nanoGPT leaves out those of
LayerNorm, 0.1 % of them), a step draws places without replacement, and validation reads the whole
held-out tenth, not 240 random windows of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .text_recipe import TextRecipe


class Attention(nn.Module):
    """Causal self-attention of several heads, [B, T, C] to [B, T, C]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and an MLP of four times the width, each after a LayerNorm and added to x."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.project = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.project(F.gelu(self.expand(self.norm2(x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Logits [B, T, V] of the next character for each of characters [B, T]."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for name, weights in self.named_parameters():
            if weights.dim() == 2:
                ends_branch = name.endswith("project.weight")
                nn.init.normal_(weights, std=0.02 / (2 * layers) ** 0.5 if ends_branch else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.embedding(ids) + self.positions(places))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class CharGpt(TextRecipe):
    """nanoGPT's character model for a CPU."""

    loss_reads_inputs: ClassVar[bool] = False

    def model(self) -> nn.Module:
        return Gpt(self.vocabulary, self.context, self.layers, self.heads, self.width)

    def loss(self, output: Tensor, batch: tuple[Any, Tensor]) -> Tensor:
        """Mean cross-entropy of the next characters, in nats."""
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten().long())
