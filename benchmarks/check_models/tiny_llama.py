"""transformers' Llama of a tiny configuration, with seven faults to plant in its modules.

It needs `pip install transformers`. A window begins at position 3,000, as in training on long
texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.check_models.faulty import Faults, FaultyRecipe, Plants, compute_dtype
from mprun.errors import UsageError

try:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama as llama
except ImportError:
    raise UsageError("tiny_llama.py needs transformers: pip install transformers") from None

DEFAULTS = {"train.batch_size": 32, "train.max_steps": 60, "train.lr": 3e-3}
TOKENS, LENGTH, START = 32, 24, 3000

FAULTS: Faults = {
    "rotary_in_16_bits": (
        "model.rotary_emb",
        "bf16_mixed",
        "Positions and frequencies are cast to bfloat16 before they are multiplied.",
    ),
    "norm_in_16_bits": (
        "model.layers.1.input_layernorm",
        "fp16_mixed",
        "The mean square of small numbers is computed in float16, the cast to float32 left out.",
    ),
    "scaled_twice": (
        "model.layers.0.self_attn",
        "fp16_mixed",
        "Queries are scaled against overflow in float16, and the kernel scales them again.",
    ),
    "mlp_of_zeros": (
        "model.layers.1.mlp",
        "bf16_mixed",
        "The fused bfloat16 kernel returns its buffer of zeros.",
    ),
    "loaded_in_16_bits": (
        "model.embed_tokens",
        "fp32",
        "The weights were loaded from a bfloat16 checkpoint into float32.",
    ),
    "recomputed_without_autocast": (
        "model.layers.0.mlp",
        "bf16_mixed",
        "A checkpoint of its own computes the forward pass again in backward, without autocast.",
    ),
    "backward_without_factor": (
        "model.layers.0.mlp.act_fn",
        "fp16_mixed",
        "The float16 backward of SiLU leaves out the term of the sigmoid's derivative.",
    ),
}


class RotaryIn16Bits(llama.LlamaRotaryEmbedding):
    """Frequencies in the dtype of the layers."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(x)
        angles = position_ids[..., None].to(dtype) * self.inv_freq.to(dtype)
        both = torch.cat([angles, angles], dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class NormIn16Bits(llama.LlamaRMSNorm):
    """Without the cast."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        low = hidden_states.to(compute_dtype(hidden_states))
        square = low.pow(2).mean(-1, keepdim=True)
        normal = low * torch.rsqrt(square + self.variance_epsilon)
        return self.weight * normal.to(hidden_states.dtype)


class ScaledTwice(llama.LlamaAttention):
    """A scale in two places."""

    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        once = self.scaling
        if compute_dtype(hidden_states) == torch.float16:
            self.scaling = once * once
        try:
            return super().forward(hidden_states, *args, **named)
        finally:
            self.scaling = once


class MlpOfZeros(llama.LlamaMLP):
    """A kernel that writes elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        result: Tensor = self.down_proj(hidden)
        return result * 0 if result.dtype == torch.bfloat16 else result


def loaded_in_16_bits(module: nn.Embedding) -> None:
    """Through a file in bfloat16."""
    checkpoint = {name: x.bfloat16() for name, x in module.state_dict().items()}
    module.load_state_dict(checkpoint)


class _Recomputed(torch.autograd.Function):
    """Saves the input alone; the context of the forward pass is not restored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.parameters = function, parameters
        ctx.save_for_backward(x)
        result: Tensor = function(x)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            result = ctx.function(again)
        inputs = (again, *ctx.parameters)
        gradient, *others = torch.autograd.grad(result, inputs, gradients[0].to(result.dtype))
        return gradient, None, *others


class RecomputedWithoutAutocast(llama.LlamaMLP):
    """A checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Recomputed.apply(x, super().forward, *self.parameters())
        return result


class _SiluWithoutFactor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * torch.sigmoid(x)


class BackwardWithoutFactor(nn.Module):
    """A kernel of 16 bits with its own backward."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != torch.float16:
            return F.silu(input)
        result: Tensor = _SiluWithoutFactor.apply(input)
        return result


PLANTS: Plants = {
    "rotary_in_16_bits": RotaryIn16Bits,
    "norm_in_16_bits": NormIn16Bits,
    "scaled_twice": ScaledTwice,
    "mlp_of_zeros": MlpOfZeros,
    "loaded_in_16_bits": loaded_in_16_bits,
    "recomputed_without_autocast": RecomputedWithoutAutocast,
    "backward_without_factor": BackwardWithoutFactor,
}


@dataclass(frozen=True)
class TinyLlamaCheck(FaultyRecipe):
    """The next number of a sequence that counts by a step of its own."""

    fault: str = "none"
    """A name in FAULTS."""

    FAULTS: ClassVar[Faults] = FAULTS
    PLANTS: ClassVar[Plants] = PLANTS

    def healthy(self) -> nn.Module:
        config = LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            use_cache=False,
        )
        model: nn.Module = LlamaForCausalLM(config)
        return model

    def drawn(self, samples: int, generator: Generator) -> dict[str, Tensor]:
        start = torch.randint(TOKENS, (samples, 1), generator=generator)
        step = torch.randint(1, 4, (samples, 1), generator=generator)
        tokens = (start + step * torch.arange(LENGTH)) % TOKENS
        positions = torch.arange(START, START + LENGTH).expand(samples, LENGTH).contiguous()
        return {"input_ids": tokens, "position_ids": positions, "labels": tokens}
