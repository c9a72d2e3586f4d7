"""A tiny Llama with random weights, fine-tuned by LoRA: it brings its own loss.

The base is frozen: only the low-rank matrices have gradients and optimizer state. It needs
`pip install transformers peft`, and downloads nothing.

mprun recipe=examples/llama_lora.py precision=bf16_mixed
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

DEFAULTS = {"train.batch_size": 8, "train.max_steps": 20, "train.lr": 1e-2}
METRIC = ("loss", "min")


def model():
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        use_cache=False,
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), lora)


def data():
    """Sequences that count up by a step of their own."""
    start, step = torch.randint(0, 32, (160, 1)), torch.randint(1, 4, (160, 1))
    ids = (start + step * torch.arange(16)) % 32
    samples = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return {
        "train": {name: rows[:128] for name, rows in samples.items()},
        "validation": {name: rows[128:] for name, rows in samples.items()},
    }
