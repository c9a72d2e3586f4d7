"""A DataLoader whose batches hold strings, trained with an optimizer of its own.

mprun recipe=examples/strings_adagrad.py precision=bf16_mixed
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

DEFAULTS = {"train.epochs": 2}
METRIC = ("accuracy", "max")
LETTERS, VOWELS = "abcdefghijklmnopqrstuvwxyz", "aeiou"


class Words(Dataset):
    """Drawn words; the class says whether one starts with a vowel."""

    def __init__(self, count, length=6):
        drawn = torch.randint(0, len(LETTERS), (count, length)).tolist()
        self.words = ["".join(LETTERS[i] for i in word) for word in drawn]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        word = self.words[index]
        return {"word": word, "starts_with_vowel": int(word[0] in VOWELS)}


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 8)
        self.head = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, words):
        ids = torch.tensor([[LETTERS.index(letter) for letter in word] for word in words])
        return self.head(self.embedding(ids.to(self.embedding.weight.device)).flatten(1))


def model():
    return Letters()


def data():
    return DataLoader(Words(320), 16, shuffle=True), DataLoader(Words(80), 16)


def forward(model, batch):
    return model(batch["word"])


def loss(output, batch):
    return F.cross_entropy(output, batch["starts_with_vowel"])


def correct(output, batch):
    return (output.argmax(1) == batch["starts_with_vowel"]).sum()


def optimizer(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)
