"""A language model of Hugging Face's library, built from its config class with random weights.

Nothing is downloaded but the text: tiny-shakespeare, or a file of yours, as characters. The model
computes its own loss, the mean cross-entropy of each next character of a window. `architecture` is
any causal language model that transformers knows by its `model_type`: llama, gpt2, qwen2, ... What
its config class takes beyond the sizes below stands in `recipe.model.config`; without it, the MLP
is four times as wide as the model, and every head has its own keys and values.

It needs `pip install 'mprun[transformer]'`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from mprun.data import DataRequest, Splits, TensorSet
from mprun.data.text import LARGEST_VOCABULARY, text_sample, text_splits
from mprun.errors import UsageError, hint
from mprun.recipe import Recipe

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Tokens that a text of characters does not have."""


@dataclass(frozen=True)
class Transformer(Recipe):
    """A causal language model of transformers."""

    architecture: str
    """The config's model_type: llama, gpt2, qwen2, ..."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Attention heads; the width is a multiple of it."""
    width: int
    """Features of each character (hidden_size)."""
    context: int
    """Characters in a window."""
    vocabulary: int
    """Numbers that a character can have; tiny-shakespeare has 65."""
    text: str | None
    """A text file in UTF-8; null: tiny-shakespeare."""
    config: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the config class: {num_key_value_heads: 2}."""

    METRIC: ClassVar[tuple[str, str]] = ("loss", "min")
    draws_data: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: legal is 1 or more")
        if self.context < 2:
            raise ValueError(f"context={self.context}: legal is 2 or more")
        if self.width % self.heads:
            raise ValueError(f"width={self.width}: legal is a multiple of heads={self.heads}")
        if not 2 <= self.vocabulary <= LARGEST_VOCABULARY:
            legal = f"legal is from 2 to {LARGEST_VOCABULARY}"
            raise ValueError(f"vocabulary={self.vocabulary}: {legal}")
        kind = _config_class(self.architecture)
        for name in self.config:
            if name not in (known := _arguments(kind)):
                near = hint(name, known)
                raise ValueError(f"config.{name}: {kind.__name__} has no such argument{near}")

    def model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        kind = _config_class(self.architecture)
        sizes: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.context,
            "use_cache": False,
            **dict.fromkeys(SPECIAL),
        }
        usual = {
            "intermediate_size": 4 * self.width,
            "num_key_value_heads": self.heads,
            "head_dim": self.width // self.heads,
        }
        known = _arguments(kind)
        sizes |= {name: value for name, value in usual.items() if name in known}
        model: nn.Module = AutoModelForCausalLM.from_config(kind(**(sizes | self.config)))
        return model

    def data(self, request: DataRequest) -> Splits:
        return text_splits(self.text, self.context, self.vocabulary, request, targets=False)

    def sample(self) -> TensorSet:
        return text_sample(self.context, targets=False)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Characters [B, T] of bytes as indices."""
        return inputs.long()

    def forward(self, model: nn.Module, batch: Tensor) -> Any:
        """The model's output, with the loss of predicting each next character."""
        return model(input_ids=batch, labels=batch)


def _config_class(architecture: str) -> Any:
    """The config class of an architecture.

    Raises:
        UsageError: transformers is not installed.
        ValueError: it knows no such causal language model.
    """
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    except ImportError:
        raise UsageError(
            "recipe=transformer needs transformers: pip install 'mprun[transformer]'"
        ) from None
    known = {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
    if architecture not in known:
        near = hint(architecture, known)
        raise ValueError(
            f"architecture={architecture}: legal is the model_type of a causal language model of "
            f"transformers, such as llama, gpt2 or qwen2{near}"
        )
    return CONFIG_MAPPING[architecture]


def _arguments(kind: Any) -> set[str]:
    """The names that a config class knows."""
    return {*kind().to_dict(), *kind.attribute_map}
