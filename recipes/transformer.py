"""A language model of Hugging Face's library, built from its config class with random weights.

Nothing is downloaded but the text: tiny-shakespeare, or a file of yours, as characters. The model
computes its own loss, the mean cross-entropy of each next character of a window. `architecture` is
any causal language model that transformers knows by its `model_type`: llama, gpt2, qwen2, ... What
its config class takes beyond the sizes below stands in `recipe.model.config`; without it, the MLP
is four times as wide as the model, and every head has its own keys and values. Dropout is the
class's own default: llama has none, gpt2 has 0.1.

A vocabulary larger than the 256 numbers that a character can have has the memory and the time of a
model of tokens; the further rows of its embedding stay as they were drawn, but for weight decay.

It needs `pip install 'mprun[transformer]'`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from mprun.errors import UsageError, hint

from .text_recipe import TextRecipe

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Tokens that a text of characters does not have."""
FIELDS = {
    "vocab_size": "recipe.model.vocabulary",
    "hidden_size": "recipe.model.width",
    "num_hidden_layers": "recipe.model.layers",
    "num_attention_heads": "recipe.model.heads",
    "dtype": "precision",
    "torch_dtype": "precision",
}
"""Arguments of a config class that are set elsewhere, and where."""


@dataclass(frozen=True)
class Transformer(TextRecipe):
    """A causal language model of transformers; `width` is its hidden_size."""

    architecture: str
    """The config's model_type: llama, gpt2, qwen2, ..."""
    config: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the config class: {num_key_value_heads: 2}."""

    TARGETS: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_is_language_model(self._config())

    def _check_vocabulary(self) -> None:
        if self.vocabulary < 2:
            raise ValueError(f"vocabulary={self.vocabulary}: legal is 2 or more")

    def model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_config(self._config())
        return model

    def _config(self) -> Any:
        """The config of these sizes.

        Raises:
            ValueError: it cannot be made.
        """
        kind = _config_class(self.architecture)
        with _one_line(kind):
            known = _arguments(kind)
        self._check_names(kind, known)
        usual = {name: x for name, x in self._usual_sizes(known).items() if name in known}
        with _one_line(kind):
            return kind(**(self._sizes() | usual | self.config))

    def _check_names(self, kind: Any, known: set[str]) -> None:
        elsewhere = {kind.attribute_map.get(name, name): key for name, key in FIELDS.items()}
        for name in self.config:
            if place := (FIELDS | elsewhere).get(name):
                raise ValueError(f"config.{name}: legal is to set {place} instead")
            if name not in known:
                near = hint(name, known)
                raise ValueError(f"config.{name}: {kind.__name__} has no such argument{near}")

    def _sizes(self) -> dict[str, Any]:
        """The arguments that every config class takes."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.context,
            "use_cache": False,
            **dict.fromkeys(SPECIAL),
        }

    def _usual_sizes(self, known: set[str]) -> dict[str, Any]:
        """The arguments that are set where a class knows them."""
        usual = {
            "intermediate_size": 4 * self.width,
            "num_key_value_heads": self.heads,
            "is_decoder": True,  # BERT and its like see later characters otherwise
        }
        if "qk_rope_head_dim" not in known:  # else the head has parts with sizes of their own
            usual |= dict.fromkeys(("head_dim", "rotary_dim"), self.width // self.heads)
        return usual

    def forward(self, model: nn.Module, batch: Tensor) -> Any:
        """The model's output, with the loss of predicting each next character."""
        return model(input_ids=batch, labels=batch)


def _architectures() -> dict[str, Any]:
    """The config class of each model_type of a causal language model.

    Raises:
        UsageError: transformers is not installed.
    """
    try:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    except ImportError:
        raise UsageError(
            "recipe=transformer needs transformers: pip install 'mprun[transformer]'"
        ) from None
    return {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}


def _config_class(architecture: str) -> Any:
    """The config class of an architecture.

    Raises:
        UsageError: transformers is not installed.
        ValueError: it knows no such causal language model.
    """
    known = _architectures()
    if architecture not in known:
        near = hint(architecture, known)
        raise ValueError(
            f"architecture={architecture}: legal is the model_type of a causal language model of "
            f"transformers, such as llama, gpt2 or qwen2{near}"
        )
    return known[architecture]


@contextmanager
def _one_line(kind: Any) -> Iterator[None]:
    """Turn whatever a config class raises into a `ValueError` of one line."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{kind.__name__} refuses these sizes: {reason}") from None


def _check_is_language_model(config: Any) -> None:
    """Raise `ValueError` where the recipe's sizes would not be those of the whole model.

    A model that also sees or hears has a config of parts, which keep their own sizes: billions of
    parameters. The decoder of a translation model counts its layers under another name, and its
    loss compares each output with the character that it has just read, not with the next one.
    """
    parts = [getattr(config, name, None) for name in config.sub_configs]
    if not any(hasattr(part, "hidden_size") for part in parts) and not hasattr(
        config, "decoder_layers"
    ):
        return
    known = _architectures()
    text = f"{config.model_type}_text"
    raise ValueError(
        f"architecture={config.model_type}: its config has parts with sizes of their own; legal is "
        "the model_type of a language model alone, such as "
        + (text if text in known else "llama, gpt2 or qwen2")
    )


def _arguments(kind: Any) -> set[str]:
    """The names that a config class knows."""
    return {*kind().to_dict(), *kind.attribute_map, "attn_implementation"}
