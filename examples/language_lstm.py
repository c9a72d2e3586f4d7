"""A language model with an LSTM: batches are dictionaries, the loss is a mean over tokens.

mprun recipe=examples/language_lstm.py precision=bf16_mixed
"""

import torch
import torch.nn.functional as F
from torch import nn

DEFAULTS = {"train.batch_size": 8, "train.max_steps": 40, "train.lr": 1e-2}
METRIC = ("perplexity", "min")
TOKENS, LENGTH, IGNORED = 16, 12, -100


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 24)
        self.lstm = nn.LSTM(24, 32, batch_first=True)
        self.head = nn.Linear(32, TOKENS)

    def forward(self, ids, labels):
        hidden, _ = self.lstm(self.embedding(ids))
        return {"logits": self.head(hidden)}


def model():
    return LanguageModel()


def data():
    """Sequences that count up by a step of their own, of unequal lengths."""
    start, step = torch.randint(0, TOKENS, (240, 1)), torch.randint(1, 4, (240, 1))
    tokens = (start + step * torch.arange(LENGTH + 1)) % TOKENS
    lengths = torch.randint(4, LENGTH + 1, (240, 1))
    labels = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)
    samples = {"ids": tokens[:, :-1], "labels": labels}
    return {
        "train": {name: rows[:200] for name, rows in samples.items()},
        "validation": {name: rows[200:] for name, rows in samples.items()},
    }


def loss(output, batch):
    return F.cross_entropy(output["logits"].flatten(0, 1), batch["labels"].flatten())


def count(batch):
    return (batch["labels"] != IGNORED).sum()


def metrics():
    return {"perplexity": "perplexity"}
