"""What the recipes on text have in common: sizes of a transformer, and windows of characters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mprun.recipe import Recipe
from mprun.train.data import DataRequest, Splits, TensorSet
from mprun.train.data.text import MAX_VOCABULARY, text_sample, text_splits


@dataclass(frozen=True)
class TextRecipe(Recipe):
    """A model of characters, judged by its loss."""

    layers: int
    """Transformer blocks."""
    heads: int
    """Attention heads; the width is a multiple of it."""
    width: int
    """Features of each character, C."""
    context: int
    """Characters in a window, T."""
    vocabulary: int
    """Numbers that a character can have, V; tiny-shakespeare has 65."""
    text: str | None
    """A text file in UTF-8; null: tiny-shakespeare."""

    METRIC: ClassVar[tuple[str, str]] = ("loss", "min")
    draws_data: ClassVar[bool] = False
    TARGETS: ClassVar[bool] = True
    """Whether a sample is a pair of a window and the same one character later; else a window."""

    def __post_init__(self) -> None:
        shortest = 1 if self.TARGETS else 2
        for name in ("layers", "heads", "width", "context"):
            least = shortest if name == "context" else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: legal is {least} or more")
        if self.width % self.heads:
            raise ValueError(f"width={self.width}: legal is a multiple of heads={self.heads}")
        self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        if not 2 <= self.vocabulary <= MAX_VOCABULARY:
            legal = f"legal is from 2 to {MAX_VOCABULARY}"
            raise ValueError(f"vocabulary={self.vocabulary}: {legal}")

    def data(self, request: DataRequest) -> Splits:
        characters = min(self.vocabulary, MAX_VOCABULARY)
        return text_splits(self.text, self.context, characters, request, self.TARGETS)

    def sample(self) -> TensorSet:
        return text_sample(self.context, self.TARGETS)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Characters [B, T] of bytes as indices."""
        return inputs.long()
